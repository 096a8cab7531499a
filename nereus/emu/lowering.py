"""From a reshard plan to one rank's copies, rounds and messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING

from nereus.emu.layout import Rank, Seat, Shard, shard
from nereus.emu.rank_plan import Chunk, LocalCopy, Message, Mode, RankPlan, Round, Shared, Side, Transfer
from nereus.emu.regions import parts_of, region_of
from nereus.emu.streams import Bucket, buckets, chunk_of, direct_allowed
from nereus.emu.unit import Unit
from nereus.errors import InvalidOperation, explain

if TYPE_CHECKING:
    from nereus.emu.reshard import ReshardPlan

_WAVE_SHIFT, _CHUNK_SHIFT = 24, 40


def _seat(unit: Unit | None, rank: Rank) -> Seat:
    assert unit is not None, f"I8: rank {rank} holds no shard on this side"
    return unit.layout.seat(rank)


def _seats(plan: ReshardPlan, path: tuple[Rank, ...]) -> tuple[Seat, ...]:
    source = _seat(plan.old_unit(path[0]), path[0])
    return (source, *(_seat(plan.new_unit(rank), rank) for rank in path[1:]))


def rank_plan(plan: ReshardPlan, rank: Rank, mode: Mode) -> RankPlan:
    """Lower the plan for one rank. See `ReshardPlan.rank_plan`."""
    if mode == "bounded":
        _refuse_bounded(plan)
    old, new = plan.old_unit(rank), plan.new_unit(rank)
    turns = _turns(plan, rank, mode)
    copies = _copies(plan, rank, mode)
    allocates = _names(plan, "new", new, rank, mode) if new is not None and new != old else {}
    frees: dict[int, tuple[str, ...]] = {}
    if old is not None and old != new and mode == "bounded":
        frees = _names(plan, "old", old, rank, mode)
    chunks = tuple(
        Chunk(
            allocates=allocates.get(chunk, ()),
            copies=tuple(copies.get(chunk, ())),
            rounds=tuple(turns.get(chunk, ())),
            frees=frees.get(chunk, ()),
        )
        for chunk in sorted({*turns, *copies, *allocates, *frees})
    )
    ranks = tuple(sorted(plan.streams.by_rank))
    return RankPlan(rank=rank, ranks=ranks, digest=plan.digest, mode=mode, old=old, new=new, chunks=chunks)


def _turns(plan: ReshardPlan, rank: Rank, mode: Mode) -> dict[int, list[Round]]:
    """The rank's rounds by chunk. Messages of a round and peer are joined up to the bucket cap."""
    sends: dict[tuple[int, int], list[Message]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Message]] = defaultdict(list)
    shared: dict[tuple[int, int], list[Shared]] = defaultdict(list)
    for index in plan.streams.by_rank.get(rank, ()):
        stream = plan.streams.items[index]
        seats = _seats(plan, stream.path)
        at = stream.path.index(rank)
        for bucket in buckets(plan, stream, seats, mode):
            number = (bucket.chunk << _CHUNK_SHIFT) + (stream.wave << _WAVE_SHIFT) + bucket.turn
            if stream.shared:
                message = _message(plan, bucket, stream.path[0], seats, me=at)
                members = tuple(sorted(stream.path))
                shared[bucket.chunk, number].append(Shared(ranks=members, message=message))
                continue
            if at > 0:
                peer = stream.path[at - 1]
                message = _message(plan, bucket, peer, seats[at - 1 : at + 1], me=1, relayed=at > 1)
                _join(plan, receives[bucket.chunk, number + at - 1], message)
            if at < len(stream.path) - 1:
                peer = stream.path[at + 1]
                message = _message(plan, bucket, peer, seats[at : at + 2], me=0, relayed=at > 0)
                _join(plan, sends[bucket.chunk, number + at], message)
    out: dict[int, list[Round]] = defaultdict(list)
    step_of = pairing(sorted(plan.streams.by_rank), rank)
    for chunk, number in sorted({*sends, *receives, *shared}):
        key = chunk, number
        out[chunk].append(
            Round(
                number=number,
                sends=tuple(sorted(sends.get(key, ()), key=lambda message: step_of[message.peer])),
                receives=tuple(sorted(receives.get(key, ()), key=lambda message: step_of[message.peer])),
                shared=tuple(shared.get(key, ())),
            )
        )
    return out


def pairing(ranks: Sequence[Rank], me: Rank) -> dict[Rank, int]:
    """The step in which this rank meets each of the others: a round-robin tournament.

    In step s the ranks at places i and s - i (mod their number) meet, so in every step each rank has one
    partner and both name the same step. Messages of a group call are begun in this order: no rank is the
    first that everybody turns to.
    """
    at = {rank: place for place, rank in enumerate(ranks)}
    return {rank: (at[rank] + at[me]) % len(ranks) for rank in ranks} if me in at else {}


def _join(plan: ReshardPlan, messages: list[Message], message: Message) -> None:
    """Add a message, joined to the last one to the same peer where the cap allows."""
    for index in range(len(messages) - 1, -1, -1):
        last = messages[index]
        if last.peer != message.peer:
            continue
        if last.num_bytes + message.num_bytes <= plan.limits.bucket_bytes:
            packed = _widest_first((*last.packed, *message.packed))
            messages[index] = Message(peer=last.peer, direct=last.direct + message.direct, packed=packed)
            return
        break
    messages.append(message)


def _widest_first(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    return tuple(sorted(transfers, key=lambda transfer: -transfer.move.wire_bytes))


def _message(
    plan: ReshardPlan,
    bucket: Bucket,
    peer: Rank,
    seats: tuple[Seat, ...],
    *,
    me: int,
    relayed: bool = False,
) -> Message:
    """The message from `seats[0]` to the others as `seats[me]` sees it; `relayed` if the first received it.

    A transfer is direct when it is large and at least one end can use its live storage for it; then the
    other ends stage that one region, which still saves one of the copies of packing.
    """
    source_side: Side = "new" if relayed else "old"
    direct: list[Transfer] = []
    packed: list[Transfer] = []
    for part in bucket.parts:
        regions = [region_of(plan.partition, part, seats[0], source_side)]
        regions += [region_of(plan.partition, part, seat, "new") for seat in seats[1:]]
        for move in plan.moves:
            ends = [Transfer(region=region, move=move) for region in regions]
            large = ends[0].num_bytes >= plan.limits.direct_bytes and direct_allowed(plan)
            live = any(end.zero_copy for end in ends)
            (direct if large and live else packed).append(ends[me])
    return Message(peer=peer, direct=tuple(direct), packed=_widest_first(packed))


def _copies(plan: ReshardPlan, rank: Rank, mode: Mode) -> dict[int, list[LocalCopy]]:
    old, new = plan.old_unit(rank), plan.new_unit(rank)
    if old is None or new is None or old == new:
        return {}
    seats = _seat(old, rank), _seat(new, rank)
    out: dict[int, list[LocalCopy]] = defaultdict(list)
    for part in parts_of(plan.partition, plan.local_blocks(rank), None, seats):
        source = region_of(plan.partition, part, seats[0], "old")
        target = region_of(plan.partition, part, seats[1], "new")
        out[chunk_of(plan, part, mode)].append(LocalCopy(source=source, target=target, moves=plan.moves))
    return out


def _names(plan: ReshardPlan, side: Side, unit: Unit, rank: Rank, mode: Mode) -> dict[int, tuple[str, ...]]:
    """The physical tensors of the rank's shard by chunk, in storage order."""
    held = shard(plan.storage(side), unit.layout, rank)
    if mode == "shadow":
        return {0: tuple(tensor.name for tensor in held.tensors)}
    chunk_of = {
        name: kind.chunk(instance, plan.model.num_layers)
        for kind in (plan.partition.sources if side == "old" else plan.partition.classes)
        for instance, names in enumerate(kind.physical)
        for name in names.values()
    }
    out: dict[int, tuple[str, ...]] = {}
    for tensor in held.tensors:
        chunk = chunk_of[tensor.name]
        out[chunk] = (*out.get(chunk, ()), tensor.name)
    return out


def _refuse_bounded(plan: ReshardPlan) -> None:
    sound = {unit.id for unit in plan.old if not unit.ranks & plan.lost}
    if len(sound) < 2 and not any(unit in plan.old for unit in plan.new):
        raise InvalidOperation(
            explain(
                "cannot move the state in bounded mode",
                values=f"{len(plan.old)} old units, lost ranks {sorted(plan.lost)}",
                rule="bounded mode frees old storage before the commit, so a second replica must survive",
                remedy="use shadow mode, or checkpoint first and restore on failure",
            )
        )


def peak_bytes(plan: ReshardPlan, mine: RankPlan) -> int:
    """Old and new storage that coexist, chunk by chunk, and the staging of two rounds."""
    old = _stored(plan, "old", mine.old, mine.rank)
    new = _stored(plan, "new", mine.new, mine.rank)
    if mine.old == mine.new:
        return sum(old.values()) + mine.staging_bytes
    held = sum(old.values())
    peak = held
    for chunk in mine.chunks:
        held += sum(new[name] for name in chunk.allocates)
        peak = max(peak, held)
        held -= sum(old[name] for name in chunk.frees)
    return peak + mine.staging_bytes


def held_bytes(plan: ReshardPlan, rank: Rank) -> int:
    """Bytes of the rank's old shard, 0 without one."""
    return sum(_stored(plan, "old", plan.old_unit(rank), rank).values())


def _stored(plan: ReshardPlan, side: Side, unit: Unit | None, rank: Rank) -> dict[str, int]:
    if unit is None:
        return {}
    held: Shard = shard(plan.storage(side), unit.layout, rank)
    return {tensor.name: prod(tensor.shape) * unit.bytes_per_element for tensor in held.tensors}
