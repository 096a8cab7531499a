"""Ways to move a state between layouts: ours, the floors, AllGather + slice, gather + scatter.

A method gets a `Setup` and returns a function that moves old -> new once and says how many bytes this rank
received over the wire.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.reshard_cases import MODEL, Case, direct, empty
from nereus.emu.arena import ShardState, offsets
from nereus.emu.executor import Executor
from nereus.emu.layout import Piece, Shard, shard
from nereus.emu.rank_plan import LocalCopy, RankPlan
from nereus.emu.reshard import ReshardPlan
from nereus.emu.tensor import Box, box_size, intersect
from nereus.emu.transport import process_memory
from nereus.emu.transport.protocol import Deadline
from nereus.emu.unit import Unit

Move = Callable[[ShardState | None], int]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a method may use on one rank."""

    case: Case
    rank: int
    plan: ReshardPlan
    mine: RankPlan
    old: ShardState | None
    executor: Executor
    over_gloo: Executor
    epoch: int
    folder: str

    @property
    def source(self) -> Unit:
        """The first old unit: a full copy of the state."""
        return self.plan.old[0]


def ours(setup: Setup) -> Move:
    """The executor over a channel that is open, as a weight sync or a prepared transition has it."""
    return _run_by(setup.executor, setup)


def ours_over_gloo(setup: Setup) -> Move:
    """The same where no process may read another's memory."""
    return _run_by(setup.over_gloo, setup)


def _run_by(executor: Executor, setup: Setup) -> Move:
    def move(new: ShardState | None) -> int:
        kept = setup.mine.old == setup.mine.new
        executor.run(
            setup.mine,
            setup.old,
            setup.old if kept else new,
            epoch=setup.epoch,
            deadline=Deadline.after(120),
        )
        return setup.mine.received_bytes

    return move


def memcpy_floor(setup: Setup) -> Move:
    """Every byte that a rank must newly hold, copied once within its own memory."""
    wanted = None if setup.mine.old == setup.mine.new else direct(setup.mine.new, setup.rank)

    def move(new: ShardState | None) -> int:
        if wanted is not None and new is not None:
            for kind, arena in wanted.arenas.items():
                new[kind].flat.copy_(arena.flat)
        return 0

    return move


@dataclass(frozen=True)
class Raw:
    """The plan's bytes between each pair as one raw buffer, and its local bytes as one flat copy."""

    into: dict[int, Tensor]
    out: dict[int, Tensor]
    here: Tensor
    there: Tensor

    @classmethod
    def of(cls, setup: Setup) -> Raw:
        """Touched buffers of this rank's sizes."""
        received: dict[int, int] = defaultdict(int)
        sent: dict[int, int] = defaultdict(int)
        for turn in setup.mine.rounds:
            for message in turn.receives:
                received[message.peer] += message.num_bytes
            for message in turn.sends:
                sent[message.peer] += message.num_bytes
        local = sum(copied_bytes(copy) for copy in setup.mine.copies)
        return cls(
            into={peer: touched(size) for peer, size in received.items()},
            out={peer: touched(size) for peer, size in sent.items()},
            here=touched(local),
            there=touched(local),
        )


def touched(size: int) -> Tensor:
    """A buffer whose pages are in memory."""
    return torch.ones(size, dtype=torch.uint8)


def read_floor(setup: Setup) -> Move:
    """The same raw bytes read out of each peer's memory, at addresses that are known before."""
    raw = Raw.of(setup)
    mine = (os.getpid(), {peer: buffer.data_ptr() for peer, buffer in raw.out.items()})
    told: list[tuple[int, dict[int, int]]] = [mine] * dist.get_world_size()
    dist.all_gather_object(told, mine)

    def run_of(address: int, size: int) -> process_memory.Runs:
        return np.array([address]), np.array([size])

    def move(new: ShardState | None) -> int:
        for peer, buffer in raw.into.items():
            pid, addresses = told[peer]
            into, out = (
                run_of(buffer.data_ptr(), buffer.numel()),
                run_of(addresses[setup.rank], buffer.numel()),
            )
            process_memory.read(pid, into, out, check=lambda: None)
        raw.there.copy_(raw.here)
        return sum(buffer.numel() for buffer in raw.into.values())

    return move


def transport_floor(setup: Setup) -> Move:
    """The same raw bytes as one gloo message a pair."""
    raw = Raw.of(setup)

    def move(new: ShardState | None) -> int:
        works = [dist.irecv(buffer, peer) for peer, buffer in raw.into.items()]
        works += [dist.isend(buffer, peer) for peer, buffer in raw.out.items()]
        raw.there.copy_(raw.here)
        for work in works:
            work.wait()
        return sum(buffer.numel() for buffer in raw.into.values())

    return move


def copied_bytes(copy: LocalCopy) -> int:
    """Bytes of one local copy."""
    return copy.target.num_elements * sum(move.target.num_bytes for move in copy.moves)


def flats(state: ShardState) -> list[Tensor]:
    """A shard's arenas as bytes, widest first so that every part of a joint buffer is aligned."""
    parts = sorted(state.arenas.values(), key=lambda arena: -arena.flat.element_size())
    return [arena.flat.view(torch.uint8) for arena in parts]


def num_bytes(held: Shard, like: ShardState) -> int:
    """Bytes of another rank's arenas of the same kinds."""
    return sum(offsets(held)[1] * arena.flat.element_size() for arena in like.arenas.values())


def views(buffer: Tensor, held: Shard, like: ShardState) -> dict[str, dict[str, Tensor]]:
    """Kind -> physical tensor -> view of a joint buffer of that shard's arenas."""
    starts, size = offsets(held)
    out: dict[str, dict[str, Tensor]] = {}
    at = 0
    for kind, arena in sorted(like.arenas.items(), key=lambda item: -item[1].flat.element_size()):
        end = at + size * arena.flat.element_size()
        flat = buffer[at:end].view(arena.flat.dtype)
        out[kind] = {
            t.name: flat[starts[t.name] : starts[t.name] + prod(t.shape)].view(t.shape) for t in held.tensors
        }
        at = end
    return out


def inside(piece: Piece, box: Box) -> tuple[slice, ...]:
    """Where a part of a piece's logical box is stored."""
    return tuple(
        slice(s + lo - b, s + hi - b)
        for (s, _), (b, _), (lo, hi) in zip(piece.stored, piece.box, box, strict=True)
    )


def overlaps(shards: dict[int, Shard], target: Shard) -> Iterator[tuple[int, Piece, Piece, Box]]:
    """Every part that the target needs: the rank that holds it, both pieces, the box. Each part once."""
    holders: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for rank, held in shards.items():
        for piece in held.pieces:
            if all(piece.box != other.box for _, other in holders[piece.logical]):
                holders[piece.logical].append((rank, piece))
    for wanted in target.pieces:
        for rank, piece in holders[wanted.logical]:
            box = intersect(piece.box, wanted.box)
            if box_size(box):
                yield rank, piece, wanted, box


def assemble(
    into: dict[str, dict[str, Tensor]],
    parts: list[tuple[int, Piece, Piece, Box]],
    buffers: dict[int, dict[str, dict[str, Tensor]]],
) -> None:
    """Slice what a shard needs out of whole shards of others."""
    for rank, piece, wanted, box in parts:
        source, target = inside(piece, box), inside(wanted, box)
        for kind, tensors in into.items():
            tensors[wanted.physical][target].copy_(buffers[rank][kind][piece.physical][source])


def allgather_slice(setup: Setup) -> Move:
    """Every rank receives the whole state of one unit, then slices what it needs."""
    ranks = setup.source.layout.ranks
    shards = {rank: shard(MODEL, setup.source.layout, rank) for rank in ranks}
    like = direct(setup.source, ranks[0]) if setup.old is None else setup.old
    assert like is not None
    sizes = {rank: num_bytes(held, like) for rank, held in shards.items()}
    widest = max(sizes.values())
    buffers = {rank: torch.zeros(widest, dtype=torch.uint8) for rank in ranks}
    seen = {rank: views(buffers[rank], shards[rank], like) for rank in ranks}
    target = None if setup.mine.new is None else shard(MODEL, setup.mine.new.layout, setup.rank)
    parts = [] if target is None else list(overlaps(shards, target))
    everyone = len(ranks) == dist.get_world_size()

    def move(new: ShardState | None) -> int:
        if setup.rank in ranks:
            assert setup.old is not None
            at = 0
            for flat in flats(setup.old):
                buffers[setup.rank][at : at + flat.numel()].copy_(flat)
                at += flat.numel()
        if everyone:
            dist.all_gather([buffers[rank] for rank in sorted(ranks)], buffers[setup.rank].clone())
        else:
            for rank in ranks:
                dist.broadcast(buffers[rank], rank)
        if new is not None:
            assemble({kind: arena.views for kind, arena in new.arenas.items()}, parts, seen)
        return widest * (len(ranks) - (setup.rank in ranks))

    return move


def gather_scatter(setup: Setup) -> Move:
    """All shards of one unit go to its first rank, which builds every new shard and sends it."""
    ranks = setup.source.layout.ranks
    root = ranks[0]
    shards = {rank: shard(MODEL, setup.source.layout, rank) for rank in ranks}
    made = [unit for unit in setup.plan.new if unit not in setup.plan.old]
    targets = {rank: unit for unit in made for rank in unit.layout.ranks}

    def send(state: ShardState, to: int) -> None:
        for flat in flats(state):
            dist.send(flat, to)

    def receive(state: ShardState, source: int) -> int:
        parts = flats(state)
        for flat in parts:
            dist.recv(flat, source)
        return sum(flat.numel() for flat in parts)

    def at_root(new: ShardState | None) -> int:
        assert setup.old is not None
        got = 0
        whole = {root: {kind: arena.views for kind, arena in setup.old.arenas.items()}}
        for rank in ranks:
            if rank != root:
                state = empty(setup.source, rank)
                assert state is not None
                got += receive(state, rank)
                whole[rank] = {kind: arena.views for kind, arena in state.arenas.items()}
        for rank, unit in sorted(targets.items()):
            state = new if rank == root else empty(unit, rank)
            assert state is not None
            parts = list(overlaps(shards, state.shard))
            assemble({kind: arena.views for kind, arena in state.arenas.items()}, parts, whole)
            if rank != root:
                send(state, rank)
        return got

    def move(new: ShardState | None) -> int:
        if setup.rank == root:
            return at_root(new)
        if setup.rank in ranks:
            assert setup.old is not None
            send(setup.old, root)
        return 0 if new is None else receive(new, root)

    return move
