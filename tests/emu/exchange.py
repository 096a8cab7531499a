"""Rank plans executed on numpy arrays: every rule that both ends rely on is checked while the bytes move."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from nereus.emu.layout import Position, Rank, shard, shard_at
from nereus.emu.rank_plan import Message, Mode, RankPlan, Region
from nereus.emu.reshard import ReshardPlan
from nereus.emu.tensor import Box, ModelSpec
from nereus.emu.unit import Unit

Array = NDArray[np.int64]
Store = dict[tuple[str, str], Array]  # (kind, physical tensor) -> numbers


@lru_cache(maxsize=8)
def logical_values(model: ModelSpec, kind: str) -> dict[str, Array]:
    """Numbers that tell every element of every tensor of every kind apart; none is zero."""
    start = {"theta": 1, "master": 10**9, "exp_avg": 2 * 10**9, "exp_avg_sq": 3 * 10**9}[kind]
    out: dict[str, Array] = {}
    for spec in model.tensors:
        size = prod(spec.shape)
        out[spec.name] = np.arange(start, start + size, dtype=np.int64).reshape(spec.shape)
        start += size
    return out


def built(model: ModelSpec, unit: Unit, rank: Rank) -> Store:
    """The rank's shard filled straight from the definition; not to be written to."""
    names = tuple(kind.name for kind in unit.kinds)
    layout = unit.layout
    at = layout.position(rank)
    return _built(model, names, layout.tp, layout.layers, at, layout.slices, layout.ep)


@lru_cache(maxsize=256)
def _built(
    model: ModelSpec,
    kinds: tuple[str, ...],
    tp: int,
    layers: tuple[int, ...],
    position: Position,
    num_slices: int,
    ep: int,
) -> Store:
    out: Store = {}
    for kind in kinds:
        values = logical_values(model, kind)
        for tensor in shard_at(model, tp, layers, position, num_slices, ep).tensors:
            array = np.zeros(tensor.shape, dtype=np.int64)
            for piece in tensor.pieces:
                array[slices(piece.stored)] = values[piece.logical][slices(piece.box)]
            out[kind, tensor.name] = array
    return out


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in box)


@dataclass
class Machine:
    """One rank: its old and new storage, and how often each new element was written."""

    plan: RankPlan
    old: Store
    new: Store = field(default_factory=dict)
    writes: Store = field(default_factory=dict)
    steps: int = 0  # rounds begun and messages received

    def allocate(self, model: ModelSpec, names: tuple[str, ...]) -> None:
        if not names:
            return
        assert self.plan.new is not None
        shapes = {t.name: t.shape for t in shard(model, self.plan.new.layout, self.plan.rank).tensors}
        for name in names:
            for kind in self.plan.new.kinds:
                self.new[kind.name, name] = np.zeros(shapes[name], dtype=np.int64)
                self.writes[kind.name, name] = np.zeros(shapes[name], dtype=np.int64)

    def read(self, region: Region, kind: str) -> Array:
        key = kind, region.physical
        if region.side == "new":
            assert (self.writes[key][slices(region.stored)] == 1).all(), "a relay sends what it has received"
            return self.new[key][slices(region.stored)].copy()
        return self.old[key][slices(region.stored)].copy()

    def write(self, region: Region, kind: str, numbers: Array) -> None:
        assert region.side == "new"
        key = kind, region.physical
        target = self.new[key][slices(region.stored)]
        assert target.shape == numbers.shape
        target[...] = numbers
        self.writes[key][slices(region.stored)] += 1
        flags = self.new[key][slices(region.stored)].flags
        assert region.contiguous == flags.c_contiguous

    def send(self, message: Message) -> list[tuple[object, Array]]:
        return [
            ((t.region.logical, t.region.box, t.move), self.read(t.region, t.kind.name))
            for t in (*message.direct, *message.packed)
        ]

    def receive(self, message: Message, payload: list[tuple[object, Array]]) -> None:
        transfers = (*message.direct, *message.packed)
        assert [label for label, _ in payload] == [
            (t.region.logical, t.region.box, t.move) for t in transfers
        ]
        for transfer, (_, numbers) in zip(transfers, payload, strict=True):
            self.write(transfer.region, transfer.kind.name, numbers)


@dataclass
class Letter:
    """A message in flight."""

    number: int
    message: Message
    payload: list[tuple[object, Array]]
    taken: bool = False


Mail = dict[tuple[Rank, Rank], deque[Letter]]


def program(machine: Machine, plan: ReshardPlan, mail: Mail) -> Iterator[None]:
    """One rank's run; yields where it waits. A round ends when all its messages were taken (rendezvous)."""
    me = machine.plan.rank
    for chunk in machine.plan.chunks:
        machine.allocate(plan.model, chunk.allocates)
        for copy in chunk.copies:
            for move in copy.moves:
                machine.write(copy.target, move.target.name, machine.read(copy.source, move.source.name))
        for turn in chunk.rounds:
            assert turn.num_operations <= plan.limits.operation_cap
            machine.steps += 1
            mine = [Letter(turn.number, message, machine.send(message)) for message in turn.sends]
            for letter in mine:
                mail[me, letter.message.peer].append(letter)
            for message in turn.receives:
                while not mail[message.peer, me]:
                    yield
                letter = mail[message.peer, me].popleft()
                assert letter.number == turn.number
                agree(letter.message, message, plan)
                machine.receive(message, letter.payload)
                letter.taken = True
                machine.steps += 1
            while not all(letter.taken for letter in mine):
                yield
        for name in chunk.frees:
            for key in [key for key in machine.old if key[1] == name]:
                del machine.old[key]


def agree(theirs: Message, mine: Message, plan: ReshardPlan) -> None:
    """Both ends divide the message into the same operations."""
    assert len(theirs.direct) == len(mine.direct)
    assert theirs.packed_bytes == mine.packed_bytes
    widths = [transfer.move.wire_bytes for transfer in mine.packed]
    assert widths == sorted(widths, reverse=True)
    for a, b in zip(theirs.direct, mine.direct, strict=True):
        assert a.zero_copy or b.zero_copy
        assert a.num_bytes >= plan.limits.direct_bytes


@dataclass
class Outcome:
    """What each rank holds afterwards, the bytes sent, and the machines."""

    stores: dict[Rank, Store]
    sent_bytes: int
    machines: dict[Rank, Machine]


def run(plan: ReshardPlan, stores: dict[Rank, Store], mode: Mode = "shadow") -> Outcome:
    """Carry out the plan on all ranks, which hold `stores`; fails on a deadlock or a broken promise."""
    machines = {rank: Machine(plan.rank_plan(rank, mode), dict(stores.get(rank, {}))) for rank in plan.ranks}
    mail: Mail = defaultdict(deque)
    running = {rank: program(machine, plan, mail) for rank, machine in machines.items()}
    progress = -len(running) - 1
    while running:
        before = progress
        running = {rank: each for rank, each in running.items() if next(each, "over") is None}
        # Sends are posted before receives, so that in a whole pass some message is taken or some rank ends.
        progress = sum(machine.steps for machine in machines.values()) - len(running)
        assert progress > before, f"deadlock among {sorted(running)}"
    assert not any(mail.values()), "every message sent is received"
    for machine in machines.values():
        if machine.plan.new is not None and machine.plan.new == machine.plan.old:
            machine.new = machine.old
    sent = sum(machine.plan.sent_bytes for machine in machines.values())
    return Outcome({rank: machine.new for rank, machine in machines.items()}, sent, machines)


def check(plan: ReshardPlan, outcome: Outcome) -> None:
    """Every rank of the new units holds, bit for bit, what was built directly; each element was written once
    and padding never.
    """
    for unit in plan.new:
        for rank in unit.layout.ranks:
            want, machine = built(plan.model, unit, rank), outcome.machines[rank]
            assert outcome.stores[rank].keys() == want.keys()
            for key, array in want.items():
                assert np.array_equal(outcome.stores[rank][key], array), (rank, key)
                if key in machine.writes:
                    assert np.array_equal(machine.writes[key], array != 0), (rank, key)


def stores_of(plan: ReshardPlan) -> dict[Rank, Store]:
    """The old shards, built directly."""
    return {rank: built(plan.source, unit, rank) for unit in plan.old for rank in unit.layout.ranks}
