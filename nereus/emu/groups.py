"""Process groups by generation: a fresh default world over the live workers, and unit groups in layout order.

    membership changes ──▶ every live worker leaves generation n and joins n+1 (a fresh store prefix)
                       ──▶ all call `unit_groups` for every model-stage in the same order

Ranks in layouts are worker ids and need not be contiguous, since workers come and go. A generation maps a
worker id to its rank in the default world: its place in the ascending tuple of the generation's workers.
A unit's groups keep the layout's order, which is often not ascending. Groups are cached by their ranks inside
a generation and vanish with it; a new generation's prefix keeps its names apart from all earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import Store as Client

from nereus.emu.layout import Layout, Rank
from nereus.emu.partition import cut_of
from nereus.emu.store import StoreAddress, connect, meet
from nereus.emu.tensor import ModelSpec
from nereus.emu.unit_groups import UnitGroups
from nereus.errors import InvalidLayout, TransportError, explain

Backend = Literal["gloo", "nccl"]


def backend_for(device: torch.device | str) -> Backend:
    """The communication library of a device: NCCL (or RCCL, its name is the same) on GPUs, gloo on CPUs."""
    return "nccl" if torch.device(device).type == "cuda" else "gloo"


@dataclass(kw_only=True)
class Generation:
    """One default world in this process. Make it with `join`; it is valid until `leave`."""

    number: int
    worker: Rank
    workers: tuple[Rank, ...]
    timeout_s: float
    _store: Client
    _num_meetings: int = 0
    _cache: dict[tuple[Rank, ...], ProcessGroup | None] = field(default_factory=dict)

    @classmethod
    def join(
        cls,
        address: StoreAddress,
        *,
        number: int,
        worker: Rank,
        workers: Sequence[Rank],
        backend: Backend = "gloo",
        device: torch.device | None = None,
        timeout_s: float = 30.0,
    ) -> Generation:
        """Enter generation `number` together with all `workers`; collective over them.

        `timeout_s` bounds the meeting, the start of the world, and every collective of its groups. Raises
        TransportError that names the absent workers; this process is then in no world.
        """
        everyone = tuple(sorted(workers))
        if worker not in everyone or len(set(everyone)) != len(everyone):
            raise InvalidLayout(
                explain(
                    f"worker {worker} cannot join generation {number}",
                    values=f"workers={list(everyone)}",
                    rule="a generation lists each of its workers once, this one among them",
                )
            )
        store = PrefixStore(f"generation/{number}", connect(address, timeout_s=timeout_s))
        meet(store, "join", me=worker, workers=everyone, timeout_s=timeout_s)
        generation = cls(number=number, worker=worker, workers=everyone, timeout_s=timeout_s, _store=store)
        try:
            dist.init_process_group(
                backend,
                store=PrefixStore("world", store),
                rank=generation.rank,
                world_size=len(everyone),
                timeout=timedelta(seconds=timeout_s),
                device_id=device if backend == "nccl" else None,
            )
            generation._meet_connected()
        except (RuntimeError, TransportError) as error:
            if dist.is_initialized():
                generation.leave(broken=True)
            raise generation._unconnected(error) from error
        return generation

    @property
    def rank(self) -> int:
        """This process's rank in the default world."""
        return self.world_rank(self.worker)

    def world_rank(self, worker: Rank) -> int:
        """A worker's rank in the default world. Raises InvalidLayout for a worker of another generation."""
        try:
            return self.workers.index(worker)
        except ValueError:
            raise InvalidLayout(
                explain(
                    f"worker {worker} is not in generation {self.number}",
                    values=f"workers={list(self.workers)}",
                    rule="groups hold workers of their own generation",
                    remedy="join a new generation that includes it",
                )
            ) from None

    def group(self, workers: tuple[Rank, ...]) -> ProcessGroup | None:
        """The group of these workers in the given order; None if there is one only, or for outsiders.

        Collective over the whole generation: every worker asks for the same groups in the same order. Raises
        TransportError when they do not connect; leave the generation then.
        """
        if len(workers) < 2:
            return None
        if workers not in self._cache:
            try:
                made = dist.new_group(
                    [self.world_rank(worker) for worker in workers],
                    timeout=timedelta(seconds=self.timeout_s),
                    sort_ranks=False,
                )
            except RuntimeError as error:
                raise self._unconnected(error) from error
            # new_group gives outsiders a sentinel that is no group.
            self._cache[workers] = made if isinstance(made, ProcessGroup) else None
        return self._cache[workers]

    def unit_groups(self, units: Sequence[Layout], *, model: ModelSpec) -> UnitGroups | None:
        """This worker's groups in the units of one model-stage; None when it holds no part of it.

        Collective over the generation, like `group`. The units have one shape (tp, pp, ep, cp, layers), since
        data parallelism joins equal positions; InvalidLayout is raised otherwise, TransportError as by
        `group`.
        """
        if len({cut_of(unit) for unit in units}) > 1:
            raise InvalidLayout(
                explain(
                    "cannot build the groups of a model-stage",
                    values=f"units={[f'{unit.text} layers={list(unit.layers)}' for unit in units]}",
                    rule="its units must have one shape",
                    remedy="build them after the transition, when all units have the new layout",
                )
            )
        mine: UnitGroups | None = None
        for unit in units:
            groups = self._groups_of(unit, units, model)
            mine = groups or mine
        self._meet_connected()
        return mine

    def _meet_connected(self) -> None:
        """Wait until all have connected: one that left sooner would break those who still connect."""
        self._num_meetings += 1
        place = f"connected/{self._num_meetings}"
        meet(self._store, place, me=self.worker, workers=self.workers, timeout_s=self.timeout_s)

    def _unconnected(self, error: Exception) -> TransportError:
        return TransportError(
            explain(
                f"worker {self.worker} could not connect in generation {self.number}",
                values=f"workers={list(self.workers)}: {str(error).splitlines()[0]}",
                rule="all must connect to one another",
                remedy="join a new generation without the workers that died",
            )
        )

    def _groups_of(self, unit: Layout, units: Sequence[Layout], model: ModelSpec) -> UnitGroups | None:
        """Every group of one unit, made in one order on all workers; the view of this worker if it is in."""
        whole = self.group(unit.ranks)
        mine = {
            name: self._mine(groups)
            for name, groups in (
                ("tp", unit.groups("tp")),
                ("pp", unit.groups("pp")),
                ("ep", unit.groups("ep") if unit.ep > 1 else []),
                ("cp", unit.groups("cp") if unit.cp > 1 else []),
                ("copies", unit.groups("cp", "ep") if unit.cp * unit.ep > 1 else []),
                ("kv", kv_groups(unit, model.num_kv_heads)),
                ("tie", tie_groups(unit, model)),
                ("dp", list(zip(*(other.ranks for other in units), strict=True))),
            )
        }
        if self.worker not in unit.ranks:
            return None
        return UnitGroups(layout=unit, rank=self.worker, unit=whole, dp_size=len(units), **mine)

    def _mine(self, groups: Sequence[tuple[Rank, ...]]) -> ProcessGroup | None:
        """Make all groups; the one that this worker is in."""
        made = [(ranks, self.group(ranks)) for ranks in groups]
        return next((group for ranks, group in made if self.worker in ranks), None)

    def leave(self, *, broken: bool = False) -> None:
        """Destroy every group of this generation and its world; the process may then join another.

        After an error in a collective leave at once with `broken`: hanging operations are aborted, and closed
        connections tell the peers that are not joined to the dead one directly, which would wait otherwise.
        """
        self._cache.clear()
        if broken and dist.is_initialized():
            # All groups at once: NCCL's aborts of groups that share ranks wait for one another otherwise.
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()


def kv_groups(unit: Layout, num_kv_heads: int) -> list[tuple[Rank, ...]]:
    """The ranks that hold the same kv head, by stage and head; none where tp <= num_kv_heads."""
    copies = unit.tp // num_kv_heads
    if copies < 2:
        return []
    return [ranks[lo : lo + copies] for ranks in unit.groups("tp") for lo in range(0, unit.tp, copies)]


def tie_groups(unit: Layout, model: ModelSpec) -> list[tuple[Rank, ...]]:
    """First and last stage at each position of a stage; none without a tied tensor or with one stage only."""
    if unit.pp < 2 or not any(spec.also == "last" for spec in model.tensors):
        return []
    return [(ranks[0], ranks[-1]) for ranks in unit.groups("pp")]
