"""Carries out one rank's part of a reshard plan: old shard + peers -> new shard, bit for bit.

    for each chunk     (one in shadow mode; one a place in bounded mode)
        allocate the chunk's new tensors                                   bounded
        for each round  ─▶ launch: post receives, pack and post sends       at most two rounds in flight
                        ─▶ local copies while the first round is in flight
                        ─▶ land: wait, unpack
        free the chunk's old tensors                                       bounded

On a GPU none of this waits on the host: packing, the wire and unpacking are lanes (`lanes`) of their own.

A region that is one run of memory and needs no cast goes from and into live storage; any other, and what was
spilled from a GPU to its host, passes through a pooled buffer. Between ranks that read each other's memory
most strided regions are moved from and into live storage, too. Each end decides that for itself: the bytes on
the wire are the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from nereus.emu.arena import TORCH_DTYPE, Arena, ShardState
from nereus.emu.kinds import KindMove
from nereus.emu.lanes import Lane, Lanes
from nereus.emu.layout import Rank
from nereus.emu.local_copies import copy_local, view_of
from nereus.emu.rank_plan import Chunk, Message, RankPlan, Region, Round, Shared, Transfer
from nereus.emu.staging import StagingPool
from nereus.emu.transport.protocol import (
    Broadcast,
    Channel,
    Deadline,
    Fetch,
    Mark,
    Offer,
    Operation,
    Pending,
    Receive,
    Send,
    Transport,
    reached_in_time,
)
from nereus.errors import InvalidOperation, TransportError, explain


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReport:
    """What one rank's part of a move took. `peak_state_bytes` counts both shards where they live together."""

    sent_bytes: int
    received_bytes: int
    copied_bytes: int
    peak_staging_bytes: int
    peak_state_bytes: int
    open_s: float
    move_s: float


@dataclass(eq=False)
class Executor:
    """Runs rank plans over one transport; keeps its staging buffers between runs.

    `over` are the lanes to use; by default those of the device.
    """

    transport: Transport
    device: torch.device
    over: InitVar[Lanes | None] = None
    lanes: Lanes = field(init=False)
    pool: StagingPool = field(init=False)

    def __post_init__(self, over: Lanes | None) -> None:
        self.lanes = over or Lanes.of(self.device)
        self.pool = StagingPool(self.device, self.lanes)

    def run(
        self,
        plan: RankPlan,
        old: ShardState | None,
        new: ShardState | None,
        *,
        epoch: int,
        deadline: Deadline,
    ) -> MoveReport:
        """Move the state; collective over `plan.ranks`. `new` comes zeroed (bounded mode: unallocated).

        A rank whose unit is kept passes its shard as `old` and as `new`. In shadow mode `old` is only read,
        and may lie in host memory. Raises TransportError naming a peer that is late or gone, MemoryError, or
        torch's RuntimeError, when the device is full; the epoch's channels are then closed and `new` holds
        nothing of worth.
        """
        _check(plan, old, new)
        start = time.monotonic()
        channel = self.open(plan, epoch=epoch, deadline=deadline)
        opened = time.monotonic()
        run = _Run(plan.rank, channel, self.pool, old, new, deadline)
        for arena in (*_arenas(old), *_arenas(new)):
            self.lanes.keep(arena.flat)
        self.lanes.begin()
        try:
            for chunk in plan.chunks:
                run.chunk(chunk, bounded=plan.mode == "bounded")
        except (TransportError, MemoryError, RuntimeError):
            self.transport.close(epoch, broken=True)  # first: operations in flight still use the buffers
            self.pool.forget()
            raise
        return MoveReport(
            sent_bytes=run.sent_bytes,
            received_bytes=run.received_bytes,
            copied_bytes=run.copied_bytes,
            peak_staging_bytes=run.peak_staging_bytes,
            peak_state_bytes=run.peak_state_bytes,
            open_s=opened - start,
            move_s=time.monotonic() - opened,
        )

    def open(self, plan: RankPlan, *, epoch: int, deadline: Deadline) -> Channel | None:
        """Connect to the ranks of the plan before the move; None where this rank only has local work."""
        if plan.rank not in plan.ranks:
            return None
        return self.transport.open(
            plan.ranks, epoch=epoch, digest=plan.digest, deadline=deadline, groups=plan.groups
        )


Pairs = list[tuple[Tensor, Tensor]]  # a view of live storage, and its slot in a staging buffer


@dataclass(eq=False, slots=True)
class _Landing:
    """One operation in flight, and what to do when it is complete."""

    pending: Pending
    staging: Tensor | None
    unpack: Pairs


@dataclass(eq=False)
class _Run:
    rank: Rank
    channel: Channel | None
    pool: StagingPool
    old: ShardState | None
    new: ShardState | None
    deadline: Deadline
    sent_bytes: int = 0
    received_bytes: int = 0
    copied_bytes: int = 0
    peak_staging_bytes: int = 0
    peak_state_bytes: int = 0
    _staging_bytes: int = 0
    _wires: dict[int, torch.dtype] = field(default_factory=dict)

    def chunk(self, chunk: Chunk, *, bounded: bool) -> None:
        if bounded:
            self._allocate(chunk)
            self.pool.lanes.begin()  # new memory is zeroed in the engine's lane
        self._note_state()
        flight: deque[list[_Landing]] = deque()
        copied = False
        for turn in chunk.rounds:
            relays = _relays(turn)
            while len(flight) > (0 if relays else 1):
                self._land(flight.popleft())
            if relays:  # it sends what an earlier round brought
                self._pass_on()
            flight.append(self._launch(turn))
            if not copied:
                self._copy(chunk)
                copied = True
        if not copied:
            self._copy(chunk)
        while flight:
            self._land(flight.popleft())
        ended = self.pool.lanes.end()
        if self.channel is not None:
            self.channel.settle(self.deadline, ended)
        else:
            self._settle_alone(ended)
        if bounded:
            for arena in _arenas(self.old):
                arena.free(chunk.frees)

    def _allocate(self, chunk: Chunk) -> None:
        try:
            for arena in _arenas(self.new):
                arena.allocate(chunk.allocates)
        except MemoryError as error:
            raise TransportError(
                explain(
                    f"worker {self.rank} has no memory for {', '.join(chunk.allocates[:3])} and others",
                    values=str(error),
                    rule="a bounded move holds one shard and one place of it",
                    remedy="free memory on this device; the unit is filled anew from what was kept",
                )
            ) from error

    def _settle_alone(self, ended: Mark) -> None:
        if not reached_in_time(ended, self.deadline):
            raise TransportError(
                explain(
                    f"worker {self.rank} could not copy within itself in time",
                    values=f"deadline {self.deadline.allowed_s:.3g} s",
                    rule="every move has a deadline",
                    remedy="abort the epoch; the device may hang",
                )
            )

    def _pass_on(self) -> None:
        """Let what is sent from here on follow what has landed."""
        lanes = self.pool.lanes
        landed = lanes.unpack.mark()
        lanes.pack.wait(landed)
        lanes.wire.wait(landed)

    def _launch(self, turn: Round) -> list[_Landing]:
        channel, lanes = self.channel, self.pool.lanes
        assert channel is not None, "a rank with messages is in the plan's ranks"
        operations: list[Operation] = []
        rest: list[tuple[Tensor | None, Pairs]] = []
        for message in turn.receives:
            self.received_bytes += message.num_bytes
            if channel.reads(message.peer):
                views, staging, pairs = self._views(message, channel.fills, lanes.wire)
                operations.append(Fetch(message.peer, views))
                rest.append((staging, pairs))
                continue
            for transfers, direct in _parts(message):
                buffer, staging, pairs = self._buffer(transfers, direct, lanes.wire)
                operations.append(Receive(message.peer, buffer))
                rest.append((staging, pairs))
        for message in turn.sends:
            self.sent_bytes += message.num_bytes
            if channel.reads(message.peer):
                views, staging, pairs = self._views(message, channel.lends, lanes.pack)
                operations.append(Offer(message.peer, views))
                rest.append((staging, self._packed(pairs)))
                continue
            for transfers, direct in _parts(message):
                buffer, staging, pairs = self._buffer(transfers, direct, lanes.pack)
                operations.append(Send(message.peer, buffer))
                rest.append((staging, self._packed(pairs)))
        for shared in turn.shared:
            self._share(shared, operations, rest)
        lanes.wire.wait(lanes.pack.mark())
        pending = lanes.wire.post(channel, operations)
        return [_Landing(p, staging, unpack) for p, (staging, unpack) in zip(pending, rest, strict=True)]

    def _share(
        self, shared: Shared, operations: list[Operation], rest: list[tuple[Tensor | None, Pairs]]
    ) -> None:
        """Broadcast a message, or receive it."""
        message, root = shared.message, shared.message.peer
        sending = root == self.rank
        if sending:
            self.sent_bytes += message.num_bytes * (len(shared.ranks) - 1)
        else:
            self.received_bytes += message.num_bytes
        for transfers, direct in _parts(message):
            writer = self.pool.lanes.pack if sending else self.pool.lanes.wire
            buffer, staging, pairs = self._buffer(transfers, direct, writer)
            operations.append(Broadcast(root, shared.ranks, buffer))
            rest.append((staging, self._packed(pairs) if sending else pairs))

    def _packed(self, pairs: Pairs) -> Pairs:
        """Fill the slots; nothing is left to unpack."""
        self.pool.lanes.pack.copy(pairs)
        return []

    def _land(self, landings: Iterable[_Landing]) -> None:
        unpack = self.pool.lanes.unpack
        for landing in landings:
            unpack.land(landing.pending, self.deadline)
            if landing.staging is not None:
                if landing.unpack:
                    unpack.copy([(slot, live) for live, slot in landing.unpack])
                self._staging_bytes -= landing.staging.numel()
                self.pool.give(landing.staging, unpack.mark())

    def _buffer(
        self, transfers: tuple[Transfer, ...], direct: bool, writer: Lane
    ) -> tuple[Tensor, Tensor | None, Pairs]:
        """The bytes of an operation: live storage where one run of it serves, a staging buffer otherwise."""
        views = [(self._at(t.region, t.kind.name), self._wire(t.move)) for t in transfers]
        first, wire = views[0]
        if direct and transfers[0].region.contiguous and first.dtype == wire and self._is_near(first):
            return first.view(-1).view(torch.uint8), None, []
        staging, pairs = self._stage(views, writer)
        return staging, staging, pairs

    def _views(
        self, message: Message, in_place: Callable[[Tensor], bool], writer: Lane
    ) -> tuple[tuple[Tensor, ...], Tensor | None, Pairs]:
        """What a message is read from or into: live views where that serves, slots of a buffer otherwise."""
        transfers = (*message.direct, *message.packed)
        views = [(self._at(t.region, t.kind.name), self._wire(t.move)) for t in transfers]
        live = [view.dtype == wire and in_place(view) for view, wire in views]
        if all(live):
            return tuple(view for view, _ in views), None, []
        # Widest first keeps every slot of the buffer aligned.
        staged = sorted((i for i, lies in enumerate(live) if not lies), key=lambda i: -views[i][1].itemsize)
        staging, pairs = self._stage([views[i] for i in staged], writer)
        slots = {i: slot for i, (_, slot) in zip(staged, pairs, strict=True)}
        return tuple(slots.get(i, view) for i, (view, _) in enumerate(views)), staging, pairs

    def _stage(self, views: Sequence[tuple[Tensor, torch.dtype]], writer: Lane) -> tuple[Tensor, Pairs]:
        """A buffer with a slot for every view, in the dtype of the wire."""
        staging = self.pool.take(sum(view.numel() * wire.itemsize for view, wire in views), writer)
        self._staging_bytes += staging.numel()
        self.peak_staging_bytes = max(self.peak_staging_bytes, self._staging_bytes)
        pairs: Pairs = []
        at = 0
        for view, wire in views:
            end = at + view.numel() * wire.itemsize
            pairs.append((view, staging[at:end].view(wire).view(view.shape)))
            at = end
        return staging, pairs

    def _is_near(self, view: Tensor) -> bool:
        """Whether it lies on the device, not in the host memory to which a shard was spilled."""
        return view.device.type == self.pool.device.type

    def _wire(self, move: KindMove) -> torch.dtype:
        """The dtype on the wire; the plan keeps its few moves alive, so their identity is a key."""
        found = self._wires.get(id(move))
        if found is None:
            found = self._wires[id(move)] = TORCH_DTYPE[move.wire_dtype]
        return found

    def _copy(self, chunk: Chunk) -> None:
        if chunk.copies:
            assert self.old is not None, "what is copied locally lies in the old shard"
            assert self.new is not None, "what is copied locally lies in the new shard"
            self.copied_bytes += copy_local(chunk.copies, self.old, self.new, self.pool)

    def _at(self, region: Region, kind: str) -> Tensor:
        state = self.old if region.side == "old" else self.new
        assert state is not None, f"the plan names a region of a shard that is absent: {region}"
        return view_of(region, state.arenas[kind])

    def _note_state(self) -> None:
        states = {id(state): state for state in (self.old, self.new) if state is not None}
        held = sum(state.num_bytes for state in states.values())
        self.peak_state_bytes = max(self.peak_state_bytes, held)


def _parts(message: Message) -> Iterable[tuple[tuple[Transfer, ...], bool]]:
    """The operations of a message in the order of the wire: direct transfers, then the packed ones as one."""
    for transfer in message.direct:
        yield (transfer,), True
    if message.packed:
        yield message.packed, False


def _relays(turn: Round) -> bool:
    return any(
        transfer.region.side == "new"
        for message in turn.sends
        for transfer in (*message.direct, *message.packed)
    )


def _arenas(state: ShardState | None) -> list[Arena]:
    return [] if state is None else list(state.arenas.values())


def _check(plan: RankPlan, old: ShardState | None, new: ShardState | None) -> None:
    """Raise InvalidOperation unless the given shards are those the plan speaks of."""
    rank: Rank = plan.rank
    problem = rule = ""
    if (plan.old is None) != (old is None) or (plan.new is None) != (new is None):
        problem = f"old shard {'given' if old else 'absent'}, new shard {'given' if new else 'absent'}"
        rule = f"the plan is from {plan.old or 'nothing'} to {plan.new or 'nothing'}"
    elif plan.mode == "bounded":
        moved = plan.new != plan.old
        if moved and not all(arena.releases for arena in _arenas(old)):
            problem = f"memory of {next(iter(_arenas(old))).device} cannot be given back in parts"
            rule = "bounded mode frees the old shard tensor by tensor (on GPUs with NEREUS_GPU_PAGES=1)"
        elif moved and any(arena.views for arena in _arenas(new)):
            problem = "the new shard is allocated already"
            rule = "bounded mode allocates tensor by tensor"
    if problem:
        raise InvalidOperation(
            explain(
                f"worker {rank} cannot run the plan",
                values=problem,
                rule=rule,
                remedy="pass the shards that this rank holds before and after, built for the plan's mode",
            )
        )
