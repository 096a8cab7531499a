"""How long one kernel takes: launch latency, smooth maximum of compute and memory, wave quantisation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.planner.profile import GpuProfile

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTable:
    """Fitted constants of one GPU kind; efficiencies are shares of the vendor's dense peaks.

    `launch_s` is the floor of one kernel on the device; `elementwise_launch_s` the cost of one small
    kernel inside a layer; `decode_step_s` the host's work between two decode steps.
    """

    gemm_compute: float
    gemm_memory: float
    gemm_launch_s: float
    gemm_norm: float
    context_attention: float
    decode_attention: float
    attention_launch_s: float
    elementwise_memory: float
    elementwise_launch_s: float
    decode_step_s: float


@lru_cache(maxsize=1)
def builtin_kernels() -> Mapping[str, KernelTable]:
    """The fitted tables that ship with the package, by the `kernels` name of a GPU profile."""
    tree = json.loads((resources.files("nereus.planner") / "data/kernels.json").read_text())
    return {name: KernelTable(**row) for name, row in tree.items()}


def kernel_table(gpu: GpuProfile) -> KernelTable:
    """The table of a GPU kind; kinds nobody has measured use the conservative one."""
    known = builtin_kernels()
    return known.get(gpu.kernels, known["conservative"])


def gemm_s(gpu: GpuProfile, m: ArrayLike, n: ArrayLike, k: ArrayLike, *, element_bytes: float = 2) -> Floats:
    """Seconds of an [m,k] x [k,n] product; arguments broadcast."""
    table = kernel_table(gpu)
    m, n, k = (np.asarray(value, dtype=np.float64) for value in (m, n, k))
    compute = 2 * m * n * k / (gpu.peak_flops * table.gemm_compute)
    memory = element_bytes * (m * k + n * k + m * n) / (gpu.memory_bandwidth_Bps * table.gemm_memory)
    return np.asarray(
        table.gemm_launch_s + (compute**table.gemm_norm + memory**table.gemm_norm) ** (1 / table.gemm_norm)
    )


def context_attention_s(gpu: GpuProfile, square_tokens: ArrayLike, heads: ArrayLike, head_dim: int) -> Floats:
    """Seconds of causal attention; `square_tokens` is the sum of squared sequence lengths in the batch."""
    table = kernel_table(gpu)
    flops = (
        2.0 * np.asarray(square_tokens, dtype=np.float64) * np.asarray(heads) * head_dim
    )  # causal: half of 4
    return np.asarray(table.attention_launch_s + flops / (gpu.peak_flops * table.context_attention))


def decode_attention_s(gpu: GpuProfile, kv_bytes: ArrayLike) -> Floats:
    """Seconds to attend one new token of every sequence to `kv_bytes` of keys and values."""
    table = kernel_table(gpu)
    read = np.asarray(kv_bytes, dtype=np.float64) / (gpu.memory_bandwidth_Bps * table.decode_attention)
    return np.asarray(table.attention_launch_s + read)


def elementwise_s(gpu: GpuProfile, moved_bytes: ArrayLike, num_kernels: int) -> Floats:
    """Seconds of `num_kernels` memory-bound kernels that together move `moved_bytes`."""
    table = kernel_table(gpu)
    read = np.asarray(moved_bytes, dtype=np.float64) / (gpu.memory_bandwidth_Bps * table.elementwise_memory)
    return np.asarray(num_kernels * table.elementwise_launch_s + read)
