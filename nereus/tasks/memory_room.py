"""The memory that workers have for the state of a job's models, in which a transition has to find room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nereus.config.environment import gives_back_gpu_memory
from nereus.emu.cluster import Call
from nereus.emu.kinds import Kind
from nereus.emu.layout import Rank
from nereus.emu.shard_bytes import sizes_of
from nereus.emu.stage import StageSpec
from nereus.emu.unit import Unit
from nereus.tasks.device import device
from nereus.tasks.stages import GENERATION
from nereus.tasks.topology import limits_on

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


@dataclass(frozen=True, kw_only=True)
class MemoryRoom:
    """The memory of workers that a transition may use. `in_parts`: shards can be freed tensor by tensor.

    `state_bytes` is what a rank may hold of all state at once, without an entry anything; `host_bytes` is
    what it may put into host memory for a while: nothing where state lies there anyway. What is read from
    there passes through `staging_bytes` of the device.
    """

    state_bytes: Mapping[Rank, int]
    host_bytes: Mapping[Rank, int] = field(default_factory=dict)
    staging_bytes: int = 0
    in_parts: bool = True


def memory_room(job: Job) -> MemoryRoom:
    """The room of every live worker, by `cluster.gpu_memory_gb`, else by what its host or its GPU has free.

    Copies in the memory of peers are left out of it.
    """
    config, cluster = job.config, job.cluster
    on = device(config)
    on_cpu, capped = on == "cpu", config.cluster.gpu_memory_gb is not None
    host = {gpu.rank: gpu.node for gpu in cluster.pool()}
    state = host if on_cpu else {rank: rank for rank in host}  # a GPU has its own memory
    held = held_bytes(job.stages)
    if capped:
        state_bytes = _capped(job)
    else:
        free = _free(job, state, "free_bytes")
        state_bytes = {rank: held.get(rank, 0) + amount for rank, amount in free.items()}
    return MemoryRoom(
        state_bytes=state_bytes,
        host_bytes=_free(job, host, "free_host_bytes") if capped or not on_cpu else {},
        staging_bytes=0 if on_cpu else 2 * limits_on(on).bucket_bytes,
        in_parts=on_cpu or gives_back_gpu_memory(),
    )


def _capped(job: Job) -> dict[Rank, int]:
    """What `cluster.gpu_memory_gb` leaves every worker beside copies of peers."""
    copies: Counter[Rank] = Counter()
    for name, units in job.copies.units.items() if job.copies is not None else ():
        add_units(copies, list(units), job.stages[name])
    cap = int((job.config.cluster.gpu_memory_gb or 0.0) * 1e9)
    return {rank: cap - copies[rank] for rank in job.cluster.ranks}


def _free(job: Job, owner: Mapping[Rank, int], method: str) -> dict[Rank, int]:
    """Every worker's even part of what the owner of its memory has free, by one worker of each: if possible
    not one that may be generating.
    """
    busy = set(job.stages[GENERATION].ranks)
    ranks = job.cluster.ranks
    first = {owner[rank]: rank for rank in sorted(ranks, key=lambda rank: rank not in busy)}
    answers = job.cluster.run(dict.fromkeys(first.values(), Call(method)), what="ask for room")
    workers = Counter(owner.values())
    out: dict[Rank, int] = {}
    for rank in ranks:
        free = answers.get(first.get(owner[rank], -1))
        if free is not None:
            out[rank] = free // workers[owner[rank]]
    return out
