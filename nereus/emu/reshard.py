"""The reshard plan: from old units and new units to who sends which elements to whom. Pure and deterministic.

```
old units ─┐             ┌─▶ placement ─▶ new units with ranks ─┐
           ├─▶ partition ┤                                      ├─▶ need \\ have ─▶ routes ─▶ ReshardPlan
new units ─┘             └──────────────────────────────────────┘                     │
                                            lowering: ReshardPlan + rank ─▶ RankPlan ◀┘
```
Every element that a rank needs and lacks reaches it exactly once, from a rank that holds it; an element that
it holds is copied locally. Hence the bytes on the wire equal the lower bound, sum over ranks |need \\ have|,
for the placement. Split, Merge, Extend and a general change of layout are shapes of this one plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from nereus.emu import lowering, report
from nereus.emu.kinds import KindMoves
from nereus.emu.layout import Rank
from nereus.emu.partition import Bools, Cut, Partition, cut_of, partition
from nereus.emu.placement import Placement, holdings, place
from nereus.emu.rank_plan import Mode, RankPlan, Side
from nereus.emu.refusals import check_storage, check_units, no_source
from nereus.emu.report import Collective, Traffic
from nereus.emu.sources import Route, choose_routes
from nereus.emu.streams import Streams, make_streams
from nereus.emu.tensor import ModelSpec
from nereus.emu.topology import Topology
from nereus.emu.unit import Unit

Collectives = Literal["never", "pays", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes that both ends of a transfer must agree on; they are part of the plan's digest.

    `bucket_bytes` caps a message, `operation_cap` the point-to-point operations of one group call (NCCL may
    hang on very many). Regions of at least `direct_bytes` travel without packing. Bundles of at least
    `relay_bytes` are relayed when demanded more often than held; smaller ones would wait longer than they
    gain. `collectives` says whether messages of one holder to several ranks are run as broadcasts: never,
    where that pays, or always.
    """

    bucket_bytes: int = 64 << 20
    operation_cap: int = 256
    direct_bytes: int = 128 << 10
    relay_bytes: int = 8 << 20
    collectives: Collectives = "never"


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """All moves of one transition of one model-stage (or of one weight sync). A value: hashable, comparable.

    `digest` is equal in every process that plans from equal inputs. `model` is how the new units store it,
    `source` how the old ones do. `new` carries the chosen ranks; `lost` are ranks of old units that hold
    nothing of worth any more: they died, or what they hold is stale.
    """

    model: ModelSpec
    source: ModelSpec
    old: tuple[Unit, ...]
    new: tuple[Unit, ...]
    moves: KindMoves
    topology: Topology
    limits: Limits
    lost: frozenset[Rank]
    routes: tuple[Route, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything that determines the transfer; compared by all ranks before a byte moves."""
        text = repr(
            (
                _model_digest(self.model),
                _model_digest(self.source),
                self.old,
                self.new,
                self.moves,
                self.limits,
                sorted(self.lost),
                self.routes,
            )
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    @property
    def wire_bytes_per_element(self) -> int:
        """Bytes of one element on the wire over all kinds."""
        return sum(move.wire_bytes for move in self.moves)

    @cached_property
    def bytes(self) -> int:
        """Bytes on the wire, relayed copies included."""
        elements = sum(route.num_elements * len(route.hops) for route in self.routes)
        return elements * self.wire_bytes_per_element

    @cached_property
    def _matrix(self) -> tuple[dict[Rank, int], Bools, Bools]:
        ranks, have, need = _matrices(self.partition, self.old, self.new, self.lost)
        return {rank: row for row, rank in enumerate(ranks)}, have, need

    @cached_property
    def lower_bound(self) -> int:
        """Sum over ranks of |need \\ have| in bytes: no plan for this placement can move less."""
        _, have, need = self._matrix
        return int(((need & ~have) @ self.partition.num_elements).sum()) * self.wire_bytes_per_element

    def local_blocks(self, rank: Rank) -> tuple[int, ...]:
        """Blocks that a rank needs and already holds."""
        row, have, need = self._matrix
        return tuple(np.flatnonzero(have[row[rank]] & need[row[rank]]).tolist())

    @cached_property
    def max_local_bytes(self) -> int:
        """Most bytes that any rank copies from its own old storage; a kept unit copies none."""
        row, have, need = self._matrix
        local = (have & need) @ self.partition.num_elements
        changed = [row[r] for r in self.ranks if self.old_unit(r) != self.new_unit(r)]
        return int(local[changed].max(initial=0)) * self.wire_bytes_per_element

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes by sender, receiver and link class."""
        return report.traffic(self.routes, self.topology, self.wire_bytes_per_element)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The parts of the plan that equal an AllGather or a Broadcast: a backend may run them as such."""
        return report.collectives(self.routes, self.partition, self.wire_bytes_per_element)

    @cached_property
    def partition(self) -> Partition:
        """The blocks that the routes number."""
        return partition(self.model, _cuts((*self.old, *self.new)), self.source)

    def storage(self, side: Side) -> ModelSpec:
        """How the units of one side store the model."""
        return self.source if side == "old" else self.model

    @cached_property
    def streams(self) -> Streams:
        """The routes by path, with the budget of operations that the whole plan allows each message."""
        return make_streams(self)

    def old_unit(self, rank: Rank) -> Unit | None:
        """The unit whose shard the rank holds before, None when it holds none."""
        return None if rank in self.lost else self._owner[0].get(rank)

    def new_unit(self, rank: Rank) -> Unit | None:
        """The unit whose shard the rank holds afterwards, None when it holds none."""
        return self._owner[1].get(rank)

    @cached_property
    def _owner(self) -> tuple[dict[Rank, Unit], dict[Rank, Unit]]:
        old, new = ({r: unit for unit in units for r in unit.layout.ranks} for units in (self.old, self.new))
        return old, new

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks that hold a shard before or after, sorted."""
        return tuple(sorted({*(self._owner[0].keys() - self.lost), *self._owner[1]}))

    def rank_plan(self, rank: Rank, mode: Mode = "shadow") -> RankPlan:
        """That rank's ordered copies, sends and receives.

        Raises InvalidOperation in bounded mode when an old shard has no second live holder to fall back on.
        """
        return lowering.rank_plan(self, rank, mode)

    def peak_bytes(self, rank: Rank, mode: Mode = "shadow") -> int:
        """Most bytes the rank holds at once: old and new storage that coexist, and staging."""
        return lowering.peak_bytes(self, self.rank_plan(rank, mode))

    def held_bytes(self, rank: Rank) -> int:
        """Bytes of the rank's old shard, which its peak counts."""
        return lowering.held_bytes(self, rank)

    def seconds(self, topology: Topology | None = None) -> float:
        """Predicted duration of the exchange on a topology, by default the plan's own."""
        return report.seconds(self, topology or self.topology)

    def explain(self) -> str:
        """The plan in words and numbers, for people."""
        return report.explain_plan(self)


def plan_reshard(
    model: ModelSpec,
    old_units: Sequence[Unit],
    new_units: Sequence[Unit],
    kinds: KindMoves | None = None,
    topology: Topology | None = None,
    *,
    source: ModelSpec | None = None,
    placement: Placement = "max_overlap",
    pinned: Collection[Rank] = (),
    lost: Collection[Rank] = (),
    stale: Collection[Rank] = (),
    limits: Limits | None = None,
) -> ReshardPlan:
    """Plan the change from the old units to the new ones.

    `model` is how the new units store the model; `source` is how the old ones do where that differs (an
    engine that fuses heads in another order), with equal tensors and cuts.

    All old units are sources; a new unit equal to an old one keeps its storage and only serves. With
    `max_overlap` the ranks of the other new units are permuted among themselves, except tensor-parallel
    groups with a rank in `pinned`; with `as_given` none moves. `kinds` default to the new units' kinds from
    those of the same names. `lost` ranks died, `stale` ones live and hold nothing of worth: what only these
    held has no source. A unit that a stale rank is to be in needs another name than its old one.

    Raises NoSource when no live rank holds a needed part, InvalidOperation when the units do not fit.
    """
    old, new = tuple(old_units), tuple(new_units)
    gone = frozenset(lost)
    source = source or model
    check_storage(model, source, kept=any(unit in old for unit in new))
    moves = check_units(old, new, kinds, gone)
    gone |= frozenset(stale)
    topology = topology or Topology.single_node(
        1 + max(r for unit in (*old, *new) for r in unit.layout.ranks)
    )
    kept = {rank for unit in new if unit in old for rank in unit.layout.ranks}
    part = partition(model, _cuts((*old, *new)), source)
    if placement == "max_overlap":
        new = place(part, old, new, topology, pinned=kept | set(pinned), lost=gone)
    ranks, have, need = _matrices(part, old, new, gone)
    remote = need & ~have
    orphans = np.flatnonzero(remote.any(axis=0) & ~have.any(axis=0))
    if len(orphans):
        raise no_source(part, int(orphans[0]), len(orphans), gone)
    limits = limits or Limits()
    routes = choose_routes(
        part,
        have,
        remote,
        ranks,
        topology,
        relay_elements=-(-limits.relay_bytes // sum(move.wire_bytes for move in moves)),
    )
    return ReshardPlan(
        model=model,
        source=source,
        old=old,
        new=new,
        moves=moves,
        topology=topology,
        limits=limits,
        lost=gone,
        routes=routes,
    )


def _cuts(units: Sequence[Unit]) -> tuple[Cut, ...]:
    return tuple(sorted({cut_of(unit.layout) for unit in units}))


def _matrices(
    part: Partition, old: tuple[Unit, ...], new: tuple[Unit, ...], lost: frozenset[Rank]
) -> tuple[tuple[Rank, ...], Bools, Bools]:
    """Ranks, and [ranks, blocks] of what each rank has and needs."""
    ranks = tuple(sorted({rank for unit in (*old, *new) for rank in unit.layout.ranks}))
    have, need = holdings(part, old, ranks), holdings(part, new, ranks)
    have[[rank in lost for rank in ranks]] = False
    return ranks, have, need


@lru_cache(maxsize=64)
def _model_digest(model: ModelSpec) -> str:
    return hashlib.sha256(repr((model.tensors, model.fused, model.counts)).encode()).hexdigest()
