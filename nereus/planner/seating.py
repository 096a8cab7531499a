"""From a pool of GPUs to a cluster that can be planned for, and from the plan's ranks back to GPUs.

A plan counts ranks 0..n-1 over equal nodes. A pool has GPUs with ids on nodes that may be unequal after
losses. Each *shape* cuts the pool's nodes into equal virtual nodes; which virtual node takes which place of
the plan is an assignment problem on the state that already lies there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from nereus.errors import Infeasible, explain
from nereus.planner.plan import Assignment, Plan
from nereus.planner.profile import ClusterProfile
from nereus.planner.signals import Gpu, GpuId

Floats = NDArray[np.float64]
Nodes = tuple[tuple[GpuId, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A pool as equal virtual nodes, each of GPUs of one real node, and the cluster profile of that."""

    cluster: ClusterProfile
    nodes: Nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Seated:
    """A plan on GPUs: rank r of the plan is GPU `gpus[r]`; `cluster` is what it was made for."""

    plan: Plan
    cluster: ClusterProfile
    gpus: tuple[GpuId, ...]

    @property
    def in_use(self) -> frozenset[GpuId]:
        """The GPUs that some model-stage lies on."""
        return frozenset(self.gpus[rank] for item in self.plan.assignments for rank in item.ranks)

    def units(self, item: Assignment) -> tuple[tuple[GpuId, ...], ...]:
        """The GPUs of every unit of one assignment, in layout order."""
        return tuple(tuple(self.gpus[rank] for rank in unit) for unit in item.units)

    @property
    def text(self) -> str:
        """Layouts of all model-stages, e.g. for a timeline."""
        return ", ".join(f"{item.model_stage} {item.text}" for item in self.plan.assignments)


def shapes_of(pool: Iterable[Gpu], like: ClusterProfile) -> tuple[Shape, ...]:
    """The shapes worth planning for, largest nodes first: one for every size that some node has.

    `like` is the cluster as it was described, of one GPU kind; it gives kind and links. Raises Infeasible for
    an empty pool or a cluster of several kinds, whose pools cannot be told apart by GPU ids.
    """
    nodes: dict[int, list[GpuId]] = defaultdict(list)
    for gpu in sorted(pool):
        nodes[gpu.node].append(gpu.id)
    if not nodes or len(like.pools) != 1:
        raise Infeasible(
            explain(
                "cannot plan for the pool",
                values=f"{len(nodes)} nodes, GPU kinds {', '.join(like.gpu_kinds)}",
                rule="a job that adapts runs on GPUs of one kind, and needs at least one",
            )
        )
    widths = {len(ids) for ids in nodes.values()}
    # A whole node of an odd size allows no tp beyond 1, so the powers of two below it are worth a try too.
    widths |= {1 << (width.bit_length() - 1) for width in widths}
    shapes = []
    for width in sorted(widths, reverse=True):
        cut = tuple(
            tuple(ids[at : at + width])
            for ids in nodes.values()
            for at in range(0, len(ids) - width + 1, width)
        )
        pool_profile = replace(like.pools[0], num_nodes=len(cut), gpus_per_node=width)
        name = f"{len(cut)}x{width}x{pool_profile.gpu.name}"
        shapes.append(Shape(cluster=replace(like, name=name, pools=(pool_profile,)), nodes=cut))
    return tuple(shapes)


def seat(plan: Plan, shape: Shape, before: Seated | None, state_bytes: Mapping[str, float]) -> Seated:
    """The plan on the shape's GPUs, virtual nodes chosen so that most state stays where it is.

    `state_bytes` is the size of one whole replica by model-stage. Ties keep the order of the shape's nodes.
    """
    width, count = shape.cluster.pools[0].gpus_per_node, len(shape.nodes)
    if before is None:
        order: Sequence[int] = range(count)
    else:
        weight = np.zeros((count, count))
        for item in plan.assignments:
            size = state_bytes.get(item.model_stage, 0.0)
            old = [other for other in before.plan.assignments if other.model_stage is item.model_stage]
            if not size or not old:
                continue
            plain = tuple(range(count * width))
            new_boxes = _boxes(item, dict(zip(plain, plain, strict=True)), count * width)
            column = {gpu: at for at, gpu in enumerate(gpu for node in shape.nodes for gpu in node)}
            places = {rank: column[gpu] for rank, gpu in enumerate(before.gpus) if gpu in column}
            old_boxes = _boxes(old[0], places, count * width)
            weight += size * _overlaps(new_boxes.reshape(count, width, 4), old_boxes.reshape(count, width, 4))
        weight += np.eye(count) * (weight.max() * 1e-9 + 1e-12)
        _, order = linear_sum_assignment(weight, maximize=True)
    gpus = tuple(gpu for node in order for gpu in shape.nodes[node])
    return Seated(plan=plan, cluster=shape.cluster, gpus=gpus)


def _boxes(item: Assignment, place: Mapping[int, int], count: int) -> Floats:
    """[count, 4]: first and last share of the layers, and of every layer, that lie at each place; zeros:
    nothing.
    """
    total, ends = sum(item.layers), np.concatenate(([0], np.cumsum(item.layers)))
    boxes = np.zeros((count, 4))
    for at, rank in enumerate(item.ranks):
        stage, place_in_stage = divmod(at % item.unit_size, item.unit_size // item.pp)
        # Ranks along cp hold the same; of a mixture nearly all bytes are those of experts, which ep divides.
        width = item.ep * item.tp
        position = place_in_stage % width
        if rank in place:
            boxes[place[rank]] = (
                ends[stage] / total,
                ends[stage + 1] / total,
                position / width,
                (position + 1) / width,
            )
    return boxes


def _overlaps(new: Floats, old: Floats) -> Floats:
    """[new nodes, old nodes] share of the model that both hold at equal positions of the node, summed."""
    low = np.maximum(new[:, None], old[None])
    high = np.minimum(new[:, None], old[None])
    layers = np.maximum(high[..., 1] - low[..., 0], 0)
    width = np.maximum(high[..., 3] - low[..., 2], 0)
    return np.asarray((layers * width).sum(axis=2))
