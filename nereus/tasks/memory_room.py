"""The memory that workers have for the state of a job's models, in which a transition has to find room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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


def memory_room(job: Job) -> dict[Rank, int]:
    """What every live worker may hold of state, by `cluster.gpu_memory_gb`, else by what its host or its GPU
    has free.

    Copies in the memory of peers are left out of it. Empty for GPUs whose memory cannot be given back in
    parts: there a shard without room is a no vote, and no mode needs less.
    """
    config, cluster = job.config, job.cluster
    on_cpu = device(config) == "cpu"
    if not on_cpu and not gives_back_gpu_memory():
        return {}
    copies: Counter[Rank] = Counter()
    for name, units in job.copies.units.items() if job.copies is not None else ():
        add_units(copies, list(units), job.stages[name])
    if config.cluster.gpu_memory_gb is not None:
        cap = int(config.cluster.gpu_memory_gb * 1e9)
        return {rank: cap - copies[rank] for rank in cluster.ranks}
    # Hosts have the memory, so one worker of each is asked; if possible not one that may be generating. A GPU
    # has its own.
    busy = set(job.stages[GENERATION].ranks)
    node = {gpu.rank: gpu.node if on_cpu else gpu.rank for gpu in cluster.pool()}
    first = {node[rank]: rank for rank in sorted(cluster.ranks, key=lambda rank: rank not in busy)}
    answers = cluster.run(dict.fromkeys(first.values(), Call("free_bytes")), what="ask for room")
    held, workers = held_bytes(job.stages), Counter(node.values())
    out: dict[Rank, int] = {}
    for rank in cluster.ranks:
        free = answers.get(first.get(node[rank], -1))
        if free is not None:
            out[rank] = held.get(rank, 0) + free // workers[node[rank]]
    return out
