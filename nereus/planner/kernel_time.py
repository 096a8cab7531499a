"""How long one kernel takes: launch latency, smooth maximum of compute and memory, wave quantisation.

    T = launch + (compute^q + memory^q)^(1/q) * exp(correction)

`compute` and `memory` are the work over a fitted share of the vendor's peak. The correction is a small grid
of log residuals over the kernel's sizes; it is what separates a real library from a formula (skinny products,
tile shapes, split reductions), and it is absent where nobody has measured the GPU.
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
from nereus.planner.grid import Grid
from nereus.planner.profile import GpuProfile

Floats = NDArray[np.float64]

TILE = 128  # rows and columns of the output tile that wave quantisation counts


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModel:
    """Fitted constants of one kernel class on one GPU kind.

    `compute` and `memory` are reachable shares of the peaks, `norm` is q above, `waves` in [0, 1] is how much
    of a last, partly filled wave is lost.
    """

    compute: float
    memory: float
    launch_s: float
    norm: float
    waves: float = 0.0
    correction: Grid | None = None

    def seconds(
        self, compute_s: Floats, memory_s: Floats, sizes: tuple[Floats, ...], weight: float = 1.0
    ) -> Floats:
        """Time from the work at peak rates; `sizes` are the coordinates of the correction, `weight` its
        share.
        """
        q = self.norm
        smooth = ((compute_s / self.compute) ** q + (memory_s / self.memory) ** q) ** (1 / q)
        total = self.launch_s + smooth
        if self.correction is None or weight == 0:
            return np.asarray(total)
        return np.asarray(total * np.exp(weight * self.correction(*sizes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTable:
    """The kernel classes of one GPU kind.

    `elementwise_memory` is a share of the memory bandwidth, `elementwise_launch_s` the cost of one small
    kernel inside a layer.
    """

    gemm: KernelModel
    context_attention: KernelModel
    decode_attention: KernelModel
    elementwise_memory: float
    elementwise_launch_s: float


def table_from_tree(tree: Mapping[str, Any]) -> KernelTable:
    """Read a table from its JSON tree; corrections are stored in thousandths."""
    kernels = {
        name: KernelModel(
            **{key: float(value) for key, value in tree[name].items() if key != "correction"},
            correction=_grid_from_tree(tree[name].get("correction")),
        )
        for name in ("gemm", "context_attention", "decode_attention")
    }
    return KernelTable(
        **kernels,
        elementwise_memory=float(tree["elementwise_memory"]),
        elementwise_launch_s=float(tree["elementwise_launch_s"]),
    )


def _grid_from_tree(tree: Mapping[str, Any] | None) -> Grid | None:
    if tree is None:
        return None
    axes = tuple(tuple(float(np.log2(knot)) for knot in axis) for axis in tree["axes"])
    return Grid(axes=axes, values=tuple(value / 1000 for value in tree["thousandths"]))


@lru_cache(maxsize=16)
def kernel_table(name: str) -> KernelTable:
    """The table that a GPU profile names: one that ships with the package, or the path of a JSON file.

    A name without a table (a GPU that nobody has measured) gets the conservative one. Raises ConfigError when
    a path cannot be read.
    """
    if name.endswith(".json"):
        try:
            return table_from_tree(json.loads(Path(name).read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(explain(f"cannot read the kernel table {name}", values=repr(error))) from error
    folder = resources.files("nereus.planner") / "data/kernels"
    file = folder / f"{name}.json"
    if not file.is_file():
        file = folder / "conservative.json"
    return table_from_tree(json.loads(file.read_text()))


def gemm_work(
    gpu: GpuProfile, m: Floats, n: Floats, k: Floats, *, waves: float, element_bytes: float, speed: float
) -> tuple[Floats, Floats]:
    """(compute, memory) seconds at peak rates of an [m,k] x [k,n] product; `speed` scales the peak (fp8:
    2).
    """
    tiles = np.ceil(m / TILE) * np.ceil(n / TILE)
    idle = np.ceil(tiles / gpu.compute_units) * gpu.compute_units / tiles - 1.0
    compute = 2 * m * n * k / (gpu.peak_flops * speed) * (1 + waves * idle)
    memory = (element_bytes * (m * k + n * k) + 2 * m * n) / gpu.memory_bandwidth_Bps
    return compute, memory


def gemm_s(
    gpu: GpuProfile,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    *,
    element_bytes: float = 2,
    speed: float = 1,
    weight: float = 1,
    model: KernelModel | None = None,
) -> Floats:
    """Seconds of an [m,k] x [k,n] product; arguments broadcast. `model` replaces the built-in constants.

    `element_bytes` and `speed` describe 8-bit inputs (1, 2); `weight` is the share of the correction that
    counts.
    """
    kernel = kernel_table(gpu.kernels).gemm if model is None else model
    sizes = np.broadcast_arrays(*(np.asarray(value, dtype=np.float64) for value in (m, n, k)))
    work = gemm_work(gpu, *sizes, waves=kernel.waves, element_bytes=element_bytes, speed=speed)
    return kernel.seconds(*work, tuple(sizes), weight)


def context_attention_work(
    gpu: GpuProfile, sequences: Floats, tokens: Floats, heads: Floats, kv_heads: Floats, head_dim: int
) -> tuple[Floats, Floats]:
    """(compute, memory) seconds at peak rates of causal attention: half of 4 s^2 d a head; q, k, v, o
    moved once.
    """
    compute = 2.0 * sequences * tokens**2 * heads * head_dim / gpu.peak_flops
    memory = 4.0 * sequences * tokens * (heads + kv_heads) * head_dim / gpu.memory_bandwidth_Bps
    return compute, memory


def context_attention_s(
    gpu: GpuProfile,
    sequences: ArrayLike,
    tokens: ArrayLike,
    heads: ArrayLike,
    kv_heads: ArrayLike,
    head_dim: int,
    *,
    weight: float = 1,
    model: KernelModel | None = None,
) -> Floats:
    """Seconds of causal self-attention over `sequences` sequences of `tokens` tokens; arguments broadcast."""
    kernel = kernel_table(gpu.kernels).context_attention if model is None else model
    count, length, query, kv = np.broadcast_arrays(
        *(np.asarray(value, dtype=np.float64) for value in (sequences, tokens, heads, kv_heads))
    )
    work = context_attention_work(gpu, count, length, query, kv, head_dim)
    return kernel.seconds(*work, (count * query, length, query / kv), weight)


def decode_attention_work(
    gpu: GpuProfile,
    sequences: Floats,
    tokens: Floats,
    heads: Floats,
    kv_heads: Floats,
    head_dim: int,
    element_bytes: float,
) -> tuple[Floats, Floats]:
    """(compute, memory) seconds at peak rates of one new token a sequence against `tokens` cached ones."""
    compute = 4.0 * sequences * tokens * heads * head_dim / gpu.peak_flops
    memory = 2.0 * element_bytes * sequences * tokens * kv_heads * head_dim / gpu.memory_bandwidth_Bps
    return compute, memory


def decode_attention_s(
    gpu: GpuProfile,
    sequences: ArrayLike,
    tokens: ArrayLike,
    heads: ArrayLike,
    kv_heads: ArrayLike,
    head_dim: int,
    *,
    element_bytes: float = 2,
    weight: float = 1,
    model: KernelModel | None = None,
) -> Floats:
    """Seconds to attend one new token of every sequence to its `tokens` cached ones; arguments broadcast."""
    kernel = kernel_table(gpu.kernels).decode_attention if model is None else model
    count, length, query, kv = np.broadcast_arrays(
        *(np.asarray(value, dtype=np.float64) for value in (sequences, tokens, heads, kv_heads))
    )
    work = decode_attention_work(gpu, count, length, query, kv, head_dim, element_bytes)
    return kernel.seconds(*work, (count * kv, length, query / kv), weight)


def elementwise_s(gpu: GpuProfile, moved_bytes: ArrayLike, num_kernels: int) -> Floats:
    """Seconds of `num_kernels` memory-bound kernels that together move `moved_bytes`."""
    table = kernel_table(gpu.kernels)
    read = np.asarray(moved_bytes, dtype=np.float64) / (gpu.memory_bandwidth_Bps * table.elementwise_memory)
    return np.asarray(num_kernels * table.elementwise_launch_s + read)


def score_passes_s(
    gpu: GpuProfile, sequences: ArrayLike, tokens: ArrayLike, heads: ArrayLike, *, moved_bytes: float
) -> Floats:
    """Seconds of the passes over the [heads, tokens, tokens] scores that attention without fusion makes.

    `moved_bytes` is what one score reads and writes in all of them.
    """
    count, length, query = (np.asarray(value, dtype=np.float64) for value in (sequences, tokens, heads))
    return elementwise_s(gpu, moved_bytes * count * query * length**2, 4)
