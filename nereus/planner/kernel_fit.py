"""Fit kernel models to measured rows: robust least squares for the constants, then a smooth grid of
residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nereus.planner.grid import Grid, corners
from nereus.planner.kernel_time import KernelModel, context_attention_work, decode_attention_work, gemm_work
from nereus.planner.profile import GpuProfile

Floats = NDArray[np.float64]
Work = Callable[[KernelModel], tuple[Floats, Floats]]

# Knots of the residual grids, in the kernels' own sizes.
GEMM_AXES = (
    (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768),  # m
    (32, 128, 256, 512, 1024, 2048, 4096, 6144, 8192, 12288, 16384, 65536),  # n
    (32, 128, 256, 512, 1024, 2048, 4096, 6144, 8192, 12288, 16384, 65536),  # k
)
CONTEXT_AXES = (
    (1, 4, 16, 64, 256, 1024, 4096, 16384),  # sequences * query heads
    (16, 64, 256, 1024, 4096, 16384),  # tokens
    (1, 4, 16),  # query heads a kv head
)
DECODE_AXES = (
    (1, 4, 16, 64, 256, 1024, 4096, 16384),  # sequences * kv heads
    (2, 32, 256, 1024, 4096, 16384, 131072),  # cached tokens
    (1, 2, 4, 8, 16),  # query heads a kv head
)
_CONSTANT_ROWS = 4000  # the five constants need no more
_SMOOTH = (
    0.5  # weight of a unit step of log residual between neighbouring knots (chosen inside the training split)
)
_SHRINK = 0.05  # weight that pulls unseen knots to zero


def fit_gemm(
    gpu: GpuProfile,
    m: Floats,
    n: Floats,
    k: Floats,
    measured_s: Floats,
    *,
    element_bytes: float = 2,
    speed: float = 1,
) -> KernelModel:
    """Fit dense products from rows of equal length; at least a few dozen are needed.

    `element_bytes` and `speed` say what was measured, as for `kernel_time.gemm_s`: float32 is 4 and 0.5.
    """
    return _fit(
        lambda kernel: gemm_work(gpu, m, n, k, waves=kernel.waves, element_bytes=element_bytes, speed=speed),
        (m, n, k),
        GEMM_AXES,
        measured_s,
    )


def fit_context_attention(
    gpu: GpuProfile,
    sequences: Floats,
    tokens: Floats,
    heads: Floats,
    kv_heads: Floats,
    head_dim: int,
    measured_s: Floats,
) -> KernelModel:
    """Fit causal self-attention."""
    work = context_attention_work(gpu, sequences, tokens, heads, kv_heads, head_dim)
    return _fit(lambda _: work, (sequences * heads, tokens, heads / kv_heads), CONTEXT_AXES, measured_s)


def fit_decode_attention(
    gpu: GpuProfile,
    sequences: Floats,
    tokens: Floats,
    heads: Floats,
    kv_heads: Floats,
    head_dim: int,
    measured_s: Floats,
    *,
    element_bytes: float = 2,
) -> KernelModel:
    """Fit attention of one new token a sequence over a cache of `element_bytes` an element."""
    work = decode_attention_work(gpu, sequences, tokens, heads, kv_heads, head_dim, element_bytes)
    return _fit(lambda _: work, (sequences * kv_heads, tokens, heads / kv_heads), DECODE_AXES, measured_s)


def _fit(
    work: Work, sizes: tuple[Floats, ...], axes: Sequence[Sequence[float]], measured: Floats
) -> KernelModel:
    base = _fit_constants(work, measured)
    residual = np.log(measured / base.seconds(*work(base), sizes))
    knots = tuple(tuple(float(np.log2(knot)) for knot in axis) for axis in axes)
    return replace(base, correction=_fit_grid(knots, sizes, residual))


def _fit_constants(work: Work, measured: Floats) -> KernelModel:
    """Five constants by soft-L1 least squares on log ratios, so that no single shape rules the fit."""
    from scipy.optimize import least_squares

    rows = np.random.default_rng(0).permutation(len(measured))[:_CONSTANT_ROWS]

    def build(theta: Floats) -> KernelModel:
        compute, memory, launch, norm = np.exp(theta[:4])
        return KernelModel(
            compute=float(compute),
            memory=float(memory),
            launch_s=float(launch),
            norm=float(norm),
            waves=float(1 / (1 + np.exp(-theta[4]))),
        )

    def error(theta: Floats) -> Floats:
        kernel = build(theta)
        compute, memory = work(kernel)
        return np.asarray(np.log(kernel.seconds(compute[rows], memory[rows], ()) / measured[rows]))

    launch = max(float(measured.min()), 1e-7)
    start = np.log([0.8, 0.8, launch, 3.0, np.exp(-1.0)])
    bounds = (np.log([1e-3, 1e-3, 1e-8, 0.5, 1e-4]), np.log([1.5, 1.5, 1e-2, 12.0, 1e4]))
    return build(least_squares(error, start, bounds=bounds, loss="soft_l1", f_scale=0.1).x)


def _fit_grid(axes: tuple[tuple[float, ...], ...], sizes: tuple[Floats, ...], residual: Floats) -> Grid:
    """Ridge regression on multilinear weights with a first-difference penalty along every axis."""
    from scipy import sparse
    from scipy.sparse.linalg import spsolve

    counts = [len(axis) for axis in axes]
    total = int(np.prod(counts))
    found = corners(axes, sizes)
    rows = np.tile(np.arange(len(residual)), len(found))
    design = sparse.csr_matrix(
        (np.concatenate([w for _, w in found]), (rows, np.concatenate([i for i, _ in found]))),
        (len(residual), total),
    )
    normal = design.T @ design + _SHRINK * sparse.identity(total)
    index = np.arange(total).reshape(counts)
    for axis, knots in enumerate(axes):
        moved = np.moveaxis(index, axis, 0)
        low, high = moved[:-1].ravel(), moved[1:].ravel()
        weight = _SMOOTH * np.repeat(1 / np.diff(knots), moved[0].size)
        edge = np.tile(np.arange(len(low)), 2)
        step = sparse.csr_matrix(
            (np.concatenate((weight, -weight)), (edge, np.concatenate((low, high)))), (len(low), total)
        )
        normal = normal + step.T @ step
    values = spsolve(normal.tocsc(), design.T @ residual)
    return Grid(axes=axes, values=tuple(float(value) for value in values))
