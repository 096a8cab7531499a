"""How long a message takes: all-reduce from measured tables or a two-protocol formula, and point to point.

Tables are read on a log-log scale. "captured" is the engine's own one-shot kernel inside a captured graph,
which a decode step uses; "launched" is the collective library's call, which training and scoring use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.errors import ConfigError, explain
from nereus.planner.profile import ClusterProfile, LinkClass, LinkProfile

Floats = NDArray[np.float64]

_SMALL_BYTES = 256 * 1024  # below this the latency protocol's hops decide, above it the bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTable:
    """Measured all-reduce seconds: `seconds[i][j]` for `ranks[i]` GPUs and `sizes_bytes[j]`; all
    ascending.
    """

    ranks: tuple[int, ...]
    sizes_bytes: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __call__(self, size_bytes: Floats, num_ranks: Floats) -> Floats:
        """Log-log interpolation; beyond the ends the last slope towards large sizes, the floor below."""
        x = np.log(np.maximum(size_bytes, 1.0))
        knots, table = np.log(np.asarray(self.sizes_bytes)), np.log(np.asarray(self.seconds))
        index = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(knots) - 2)
        share = np.maximum((x - knots[index]) / (knots[index + 1] - knots[index]), 0.0)
        steps = np.log2(np.asarray(self.ranks, dtype=np.float64))
        at = np.clip(np.log2(np.maximum(num_ranks, 1.0)), steps[0], steps[-1])
        row = np.clip(np.searchsorted(steps, at, side="right") - 1, 0, max(len(steps) - 2, 0))
        above = np.minimum(row + 1, len(steps) - 1)
        width = np.where(above > row, steps[above] - steps[row], 1.0)
        rise = (at - steps[row]) / width
        low = table[row, index] * (1 - share) + table[row, index + 1] * share
        high = table[above, index] * (1 - share) + table[above, index + 1] * share
        return np.asarray(np.exp(low * (1 - rise) + high * rise))

    @property
    def max_ranks(self) -> int:
        """The largest group that was measured."""
        return self.ranks[-1]


@lru_cache(maxsize=1)
def builtin_collectives() -> Mapping[tuple[str, bool], CollectiveTable]:
    """The measured tables that ship with the package, by (name, captured)."""
    return tables_from_tree(
        json.loads((resources.files("nereus.planner") / "data/collectives.json").read_text())
    )


@lru_cache(maxsize=16)
def collective_table(name: str, captured: bool) -> CollectiveTable | None:
    """The table that a link names: one that ships with the package, or the path of a JSON file of that form.

    None where nobody has measured it. Raises ConfigError when a path cannot be read.
    """
    if not name.endswith(".json"):
        return builtin_collectives().get((name, captured))
    try:
        tables = tables_from_tree(json.loads(Path(name).read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            explain(f"cannot read the table of collectives {name}", values=repr(error))
        ) from error
    return next((table for (_, kind), table in tables.items() if kind is captured), None)


def tables_from_tree(tree: Mapping[str, Any]) -> dict[tuple[str, bool], CollectiveTable]:
    """Read tables by (name, captured) from their JSON tree."""
    return {
        (name, kind == "captured"): CollectiveTable(
            ranks=tuple(row["ranks"]),
            sizes_bytes=tuple(2.0**power for power in row["sizes_log2"]),
            seconds=tuple(tuple(value * 1e-6 for value in line) for line in row["microseconds"]),
        )
        for name, kinds in tree.items()
        for kind, row in kinds.items()
    }


def tree_of(table: CollectiveTable) -> dict[str, object]:
    """One table as its JSON tree."""
    return {
        "ranks": table.ranks,
        "sizes_log2": [round(float(np.log2(size)), 3) for size in table.sizes_bytes],
        "microseconds": [[float(f"{value * 1e6:.4g}") for value in line] for line in table.seconds],
    }


def group_all_reduce_s(
    link: LinkProfile, size_bytes: ArrayLike, num_ranks: ArrayLike, *, captured: bool = False
) -> Floats:
    """Seconds of an all-reduce of `size_bytes` over ranks that share one link class; 0 for one rank.

    Without a table: small messages pay log2(n) hops and a tree's wire time, large ones a ring's; the smaller
    counts.
    """
    size, ranks = np.broadcast_arrays(
        np.asarray(size_bytes, dtype=np.float64), np.asarray(num_ranks, dtype=np.float64)
    )
    rate = link.bandwidth_Bps * link.efficiency
    hops = np.log2(np.maximum(ranks, 2))
    ring = 2 * (ranks - 1) / ranks * size / rate + link.latency_s * (1 + hops)
    tree = link.latency_s * (1 + hops / 2) + 2 * hops * size / rate
    formula = np.where(size < _SMALL_BYTES, np.minimum(ring, tree), ring)
    table = collective_table(link.collectives, captured) if link.collectives else None
    if table is not None:
        formula = np.where(ranks <= table.max_ranks, table(size, ranks), formula)
    return np.asarray(np.where(ranks > 1, formula, 0.0))


def all_reduce_s(
    cluster: ClusterProfile,
    gpu_kind: str,
    size_bytes: ArrayLike,
    num_ranks: ArrayLike,
    stride: ArrayLike,
    *,
    captured: bool = False,
) -> tuple[Floats, Floats]:
    """Seconds (inside the node, across nodes) of an all-reduce over ranks that lie `stride` GPUs apart.

    Hierarchical: reduce inside the node first, so that each GPU's network link carries its share only.
    """
    per_node = cluster.pool(gpu_kind).gpus_per_node
    size, ranks = np.asarray(size_bytes, dtype=np.float64), np.asarray(num_ranks, dtype=np.float64)
    inside = np.clip(per_node // np.asarray(stride), 1, ranks)
    across = np.ceil(ranks / inside)
    up = group_all_reduce_s(cluster.link(gpu_kind, LinkClass.SCALE_UP), size, inside, captured=captured)
    out = group_all_reduce_s(cluster.link(gpu_kind, LinkClass.SCALE_OUT), size / inside, across)
    return up, out


def all_to_all_s(
    cluster: ClusterProfile,
    gpu_kind: str,
    size_bytes: ArrayLike,
    num_ranks: ArrayLike,
    stride: ArrayLike,
) -> tuple[Floats, Floats]:
    """Seconds (inside the node, across nodes) in which every rank gives `size_bytes` away in equal parts, one
    of them to itself; ranks lie `stride` GPUs apart.
    """
    per_node = cluster.pool(gpu_kind).gpus_per_node
    size, ranks = np.asarray(size_bytes, dtype=np.float64), np.asarray(num_ranks, dtype=np.float64)
    inside = np.clip(per_node // np.asarray(stride), 1, ranks)
    near = point_to_point_s(cluster, gpu_kind, size * (inside - 1) / ranks, LinkClass.SCALE_UP)
    far = point_to_point_s(cluster, gpu_kind, size * (ranks - inside) / ranks, LinkClass.SCALE_OUT)
    return np.where(inside > 1, near, 0.0), np.where(ranks > inside, far, 0.0)


def point_to_point_s(
    cluster: ClusterProfile, gpu_kind: str, size_bytes: ArrayLike, link_class: LinkClass
) -> Floats:
    """Seconds to send `size_bytes` from one GPU to another over a link class."""
    link = cluster.link(gpu_kind, link_class)
    size = np.asarray(size_bytes, dtype=np.float64)
    return np.asarray(link.latency_s + size / (link.bandwidth_Bps * link.efficiency))
