"""Which old shards of a live transition go to host memory, so that the new ones have room beside the rest.

Old shards live until the commit, so what a transition frees is no room for what it makes. A shard that it
ends, though, need not lie on the device meanwhile: it is read as well from the host. With all of those there
a rank holds what is kept and what was made, so what fits after the transition fits in it, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from nereus.emu.chains import Chain
from nereus.emu.graph import Spill
from nereus.emu.layout import Rank
from nereus.emu.shard_bytes import Sizes
from nereus.emu.unit import UnitId
from nereus.errors import InvalidOperation, explain

LiveSpills = tuple[tuple[int, Spill], ...]  # the number of the chain that ends the units, and what goes


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What a transition asks of ranks beside what they hold, what is free there, what they may put into host
    memory, and what buffers they need more when they have.
    """

    asked_bytes: Mapping[Rank, int]
    free_bytes: Mapping[Rank, int]
    host_bytes: Mapping[Rank, int] = field(default_factory=dict)
    staging_bytes: Mapping[Rank, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Shard:
    chain: int
    unit: UnitId
    num_bytes: int


def needed_spills(
    chains: Sequence[Chain],
    devices: Devices,
    sizes: Sizes,
    stale: Mapping[str, frozenset[Rank]] | None = None,
) -> LiveSpills:
    """The cheapest shards whose way to the host makes room, on each rank by itself.

    Ranks in `stale` may hold nothing of a model-stage. Raises InvalidOperation where no shards do that.
    """
    held = _ended(chains, sizes, stale or {})
    chosen: dict[_Shard, list[Rank]] = {}
    for rank, free in sorted(devices.free_bytes.items()):
        missing = devices.asked_bytes.get(rank, 0) - free
        if missing > 0:
            missing += devices.staging_bytes.get(rank, 0)
            for shard in _cheapest(held.get(rank, ()), missing, rank, devices):
                chosen.setdefault(shard, []).append(rank)
    return tuple(
        (shard.chain, Spill(units=(shard.unit,), ranks=tuple(ranks), rank_bytes=shard.num_bytes))
        for shard, ranks in sorted(chosen.items(), key=lambda item: (item[0].chain, item[0].unit, item[1]))
    )


def _ended(
    chains: Sequence[Chain], sizes: Sizes, stale: Mapping[str, frozenset[Rank]]
) -> dict[Rank, list[_Shard]]:
    """The shards that the chains end, by rank."""
    out: dict[Rank, list[_Shard]] = {}
    for number, chain in enumerate(chains):
        absent = stale.get(chain.model_stage, frozenset())
        for unit in chain.ends:
            for rank, num_bytes in zip(unit.layout.ranks, sizes(unit), strict=True):
                if num_bytes and rank not in absent:
                    out.setdefault(rank, []).append(_Shard(number, unit.id, num_bytes))
    return out


def _cheapest(shards: Sequence[_Shard], missing: int, rank: Rank, devices: Devices) -> tuple[_Shard, ...]:
    """Those of least bytes that free so much: a rank has few shards, so all choices are looked at."""
    choices = (
        some
        for count in range(1, len(shards) + 1)
        for some in combinations(shards, count)
        if sum(shard.num_bytes for shard in some) >= missing
    )
    best = min(choices, key=lambda some: sum(shard.num_bytes for shard in some), default=None)
    room = devices.host_bytes.get(rank, 0)
    spilled = sum(shard.num_bytes for shard in best or ())
    if best is not None and spilled <= room:
        return best
    everything = sum(shard.num_bytes for shard in shards)
    raise InvalidOperation(
        explain(
            "cannot move the state within the memory at hand",
            values=f"rank {rank} lacks {missing} bytes; its host takes {room} bytes of old shards, of which "
            f"{everything} end",
            rule="new shards, and the old ones that are not spilled, must fit together",
            remedy="free memory on this rank or its host, or go through a checkpoint",
        )
    )
