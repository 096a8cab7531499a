"""Triton where kernels can run; elsewhere names under which they can be defined but not launched.

Kernels are compiled for GPUs, which torch must be built for. With TRITON_INTERPRET=1 in the environment
before this module is loaded they run on CPU tensors, one program after the other, which is how they are
tested without a GPU.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

__all__ = ["HAS_TRITON", "INTERPRETED", "cdiv", "jit", "narrow", "power_of_2", "tl"]

_INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = _INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = INTERPRETED or (_INSTALLED and (torch.version.cuda or torch.version.hip) is not None)


class _Absent:
    """Stands for `triton.language` in annotations; a kernel without Triton is never run."""

    constexpr = Any


if HAS_TRITON:
    import triton
    import triton.language as tl

    jit = triton.jit
else:
    tl = _Absent()

    def jit(kernel: Any) -> Any:
        """Leave the kernel as it is."""
        return kernel


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is not below `n`."""
    return 1 << max(0, n - 1).bit_length()


@jit
def narrow(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """`x` in another dtype, rounded to nearest even. The interpreter would truncate to bf16, so there it is
    done on the bits.
    """
    if INTERPRETED and x.dtype != tl.bfloat16 and tl.bfloat16 == DTYPE:
        x = x.to(tl.float32)
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)
