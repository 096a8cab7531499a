"""Times kernels on one device: products, attention over a prompt and over a cache, copies, launches.

Products and attention run in the dtype that training would use there: float32 on CPUs, bfloat16 on GPUs.
Shapes whose work exceeds what the device does in `SHAPE_S` are left out, so that a slow device gets a smaller
table and not a longer wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import TypeVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from nereus.emu.probes.timing import queued_seconds_of, seconds_of

Columns = dict[str, list[float]]
Told = Callable[[float], None]
"""Told after every call which share of the rows is done."""

Case = TypeVar("Case", bound=tuple[int, ...])

SHAPE_S = 0.2  # the longest that one call may be expected to take
HEAD_DIM = 64


def dtype_of(device: torch.device) -> torch.dtype:
    """The dtype that kernels are timed in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def probe_gemm(device: torch.device, told: Told, *, largest: int = 8192, budget_s: float = 0.05) -> Columns:
    """Columns m, n, k, seconds of [m, k] x [k, n]; `largest` bounds every size."""
    sizes = [size for size in (32, 128, 512, 1024, 2048, 4096, 8192) if size <= largest]
    rows = [size for size in (1, 4, 16, 64, 256, 1024, 4096, 8192) if size <= largest]
    shapes = [(m, n, k) for m, n, k in product(rows, sizes, sizes) if max(n, k) <= 8 * min(n, k)]
    rate = _rate(device)
    kept = [shape for shape in shapes if 2 * shape[0] * shape[1] * shape[2] / rate <= SHAPE_S]
    dtype = dtype_of(device)

    def timed(shape: tuple[int, int, int]) -> float:
        m, n, k = shape
        a, b = (torch.randn(*size, device=device, dtype=dtype) for size in ((m, k), (n, k)))
        return seconds_of(lambda: torch.nn.functional.linear(a, b), device, budget_s=budget_s)

    return _columns(("m", "n", "k"), kept, timed, told)


def probe_context_attention(
    device: torch.device, told: Told, *, longest: int = 8192, budget_s: float = 0.05
) -> Columns:
    """Columns sequences, tokens, heads, kv_heads, seconds of causal attention over whole sequences."""
    lengths = [size for size in (16, 64, 256, 1024, 4096, 8192) if size <= longest]
    shapes = product((1, 4, 16), lengths, (4, 16), (1, 4))
    rate = _rate(device) / 4  # attention reaches less of the peak than a product
    cases = [
        (b, t, h, h // share)
        for b, t, h, share in shapes
        if 4 * b * t * t * h * HEAD_DIM / rate <= SHAPE_S and b * t <= 4 * longest
    ]
    return _columns(
        ("sequences", "tokens", "heads", "kv_heads"),
        cases,
        lambda case: _attention_s(device, case, 0, budget_s),
        told,
    )


def probe_decode_attention(
    device: torch.device, told: Told, *, longest: int = 16384, budget_s: float = 0.05
) -> Columns:
    """The same columns, of one new token a sequence against `tokens` cached ones."""
    lengths = [size for size in (16, 64, 256, 1024, 4096, 16384) if size <= longest]
    shapes = product((1, 8, 64), lengths, (4, 16), (1, 4))
    limit = 1 << (30 if device.type == "cuda" else 24)  # elements of a cache
    cases = [(b, t, h, h // share) for b, t, h, share in shapes if b * t * (h // share) * HEAD_DIM <= limit]
    return _columns(
        ("sequences", "tokens", "heads", "kv_heads"),
        cases,
        lambda case: _attention_s(device, case, 1, budget_s),
        told,
    )


def probe_memory(device: torch.device, told: Told, *, budget_s: float = 0.2) -> Columns:
    """Columns bytes, seconds, to_host: copies on the device (read and written bytes), and to host memory."""
    sizes = [1 << power for power in (20, 23, 26, *((28,) if device.type == "cuda" else ()))]
    cases = [(size, 0) for size in sizes] + [(size, 1) for size in sizes if device.type == "cuda"]

    def timed(case: tuple[int, int]) -> float:
        size, to_host = case
        source = torch.ones(size // 4, device=device)
        target = torch.empty(size // 4, pin_memory=True) if to_host else torch.empty_like(source)
        return seconds_of(lambda: target.copy_(source, non_blocking=True), device, budget_s=budget_s)

    return _columns(("bytes", "to_host"), cases, timed, told)


def probe_launch(device: torch.device, told: Told) -> Columns:
    """Column seconds: a small elementwise kernel issued behind others, five times."""
    x = torch.ones(16, device=device)
    return _columns(
        ("run",), [(run,) for run in range(5)], lambda _: queued_seconds_of(lambda: x.add_(1), device), told
    )


def _attention_s(
    device: torch.device, case: tuple[int, int, int, int], decoding: int, budget_s: float
) -> float:
    b, t, h, kv = case
    query = torch.randn(b, h, 1 if decoding else t, HEAD_DIM, device=device, dtype=dtype_of(device))
    key, value = torch.randn(2, b, kv, t, HEAD_DIM, device=device, dtype=dtype_of(device)).unbind()
    return seconds_of(
        lambda: scaled_dot_product_attention(query, key, value, is_causal=not decoding, enable_gqa=kv != h),
        device,
        budget_s=budget_s,
    )


def _rate(device: torch.device) -> float:
    """Operations a second of a large product, roughly."""
    size = 4096 if device.type == "cuda" else 256
    a = torch.randn(size, size, device=device, dtype=dtype_of(device))
    return 2 * size**3 / seconds_of(lambda: a @ a, device)


def _columns(
    names: tuple[str, ...], cases: Iterable[Case], timed: Callable[[Case], float], told: Told
) -> Columns:
    found = list(_timed(list(cases), timed, told))
    table: Columns = {name: [float(case[i]) for case, _ in found] for i, name in enumerate(names)}
    return table | {"seconds": [seconds for _, seconds in found]}


def _timed(cases: list[Case], timed: Callable[[Case], float], told: Told) -> Iterator[tuple[Case, float]]:
    with torch.no_grad():
        for number, case in enumerate(cases, 1):
            yield case, timed(case)
            told(number / len(cases))
