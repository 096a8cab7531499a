"""The memory that workers have for the state of a job's models, in which a transition has to find room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nereus.config.environment import gives_back_gpu_memory
from nereus.emu.cluster import Call
from nereus.emu.device_memory import FreeMemory
from nereus.emu.kinds import Kind
from nereus.emu.layout import Rank
from nereus.emu.shard_bytes import sizes_of
from nereus.emu.stage import StageSpec
from nereus.emu.unit import Unit
from nereus.tasks.device import device

if TYPE_CHECKING:
    from nereus.tasks.job import Job


GRADIENTS = (Kind("grad", "fp32"),)


def held_bytes(stages: Mapping[str, StageSpec]) -> dict[Rank, int]:
    """Bytes of state by rank, and of the gradients that training engines keep beside it until they end."""
    out: Counter[Rank] = Counter()
    for spec in stages.values():
        if spec.shares is not None:
            continue
        add_units(out, [*spec.elastic_units(spec.kinds), *spec.optimizer_units], spec)
        if spec.role == "training":
            add_units(out, spec.optimizer_units_on(spec.units, spec.name, kinds=GRADIENTS), spec)
    return dict(out)


def add_units(held: Counter[Rank], units: Sequence[Unit], spec: StageSpec) -> None:
    """Add the shards of units of a model-stage."""
    for unit in units:
        for rank, size in zip(unit.layout.ranks, sizes_of(spec.models)(unit), strict=True):
            held[rank] += size


HOST_SHARE = 0.8  # of what a host has free: its other processes go on meanwhile


@dataclass(frozen=True, kw_only=True)
class MemoryRoom:
    """The memory of workers that a transition may use. `in_parts`: shards can be freed tensor by tensor.

    `state_bytes` is what a rank may hold of all state at once, without an entry anything; `host_bytes` is
    what it may put into host memory for a while: nothing where state lies there anyway. `is_far`: what is
    read from there passes through buffers of the device.
    """

    state_bytes: Mapping[Rank, int]
    host_bytes: Mapping[Rank, int] = field(default_factory=dict)
    is_far: bool = False
    in_parts: bool = True


def memory_room(job: Job, ranks: Collection[Rank]) -> MemoryRoom:
    """The room of these workers, by `cluster.gpu_memory_gb`, else by what their hosts or GPUs have free.

    Copies in the memory of peers are left out of it.
    """
    config = job.config
    on_cpu, capped = device(config) == "cpu", config.cluster.gpu_memory_gb is not None
    node = {gpu.rank: gpu.node for gpu in job.cluster.pool()}
    owner = node if on_cpu else {rank: rank for rank in node}  # a GPU has its own memory
    calls = dict.fromkeys(_first_of_each(node if capped else owner, ranks), Call("free_memory"))
    told: Mapping[Rank, FreeMemory] = job.cluster.run(calls, what="ask for room")
    device_bytes = _shares(owner, ranks, {rank: free.device_bytes for rank, free in told.items()})
    host_bytes = _shares(node, ranks, {rank: free.host_bytes for rank, free in told.items()})
    held = held_bytes(job.stages)
    free = {rank: held.get(rank, 0) + amount for rank, amount in device_bytes.items()}
    spills = capped or not on_cpu
    return MemoryRoom(
        state_bytes=_capped(job, ranks) if capped else free,
        host_bytes={rank: int(HOST_SHARE * amount) for rank, amount in host_bytes.items()} if spills else {},
        is_far=not on_cpu,
        in_parts=on_cpu or gives_back_gpu_memory(),
    )


def _capped(job: Job, ranks: Iterable[Rank]) -> dict[Rank, int]:
    """What `cluster.gpu_memory_gb` leaves every worker beside copies of peers."""
    copies: Counter[Rank] = Counter()
    for name, units in job.copies.units.items() if job.copies is not None else ():
        add_units(copies, list(units), job.stages[name])
    cap = int((job.config.cluster.gpu_memory_gb or 0.0) * 1e9)
    return {rank: cap - copies[rank] for rank in ranks}


def _first_of_each(owner: Mapping[Rank, int], ranks: Iterable[Rank]) -> list[Rank]:
    """One rank for each owner of memory."""
    return list({owner[rank]: rank for rank in sorted(ranks, reverse=True) if rank in owner}.values())


def _shares(owner: Mapping[Rank, int], ranks: Iterable[Rank], free: Mapping[Rank, int]) -> dict[Rank, int]:
    """Every rank's even part of what the owner of its memory has free, as one of its ranks told."""
    known = {owner[rank]: amount for rank, amount in free.items()}
    workers = Counter(owner.values())
    return {rank: known[owner[rank]] // workers[owner[rank]] for rank in ranks if owner.get(rank) in known}
