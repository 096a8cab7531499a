"""Write a kernel table as JSON: the form that ships with the package and that a GPU profile may name by
path.
"""

from __future__ import annotations

import json
from pathlib import Path

from nereus.planner.kernel_time import KernelModel, KernelTable

# What no public table holds: a share of the bandwidth and the launch cost of small kernels inside a layer.
ELEMENTWISE_MEMORY, ELEMENTWISE_LAUNCH_S = 0.8, 2.0e-6


def table_of(gemm: KernelModel, context: KernelModel, decode: KernelModel) -> KernelTable:
    """A table of fitted kernels with the general constants for small kernels."""
    return KernelTable(
        gemm=gemm,
        context_attention=context,
        decode_attention=decode,
        elementwise_memory=ELEMENTWISE_MEMORY,
        elementwise_launch_s=ELEMENTWISE_LAUNCH_S,
    )


def write_table(path: Path, table: KernelTable) -> None:
    """Write `table` to `path`; residuals are rounded to thousandths."""
    tree = {
        "gemm": _kernel_tree(table.gemm),
        "context_attention": _kernel_tree(table.context_attention),
        "decode_attention": _kernel_tree(table.decode_attention),
        "elementwise_memory": table.elementwise_memory,
        "elementwise_launch_s": table.elementwise_launch_s,
    }
    path.write_text(json.dumps(tree) + "\n")


def _kernel_tree(kernel: KernelModel) -> dict[str, object]:
    tree: dict[str, object] = {
        "compute": significant(kernel.compute),
        "memory": significant(kernel.memory),
        "launch_s": significant(kernel.launch_s),
        "norm": significant(kernel.norm),
        "waves": significant(kernel.waves),
    }
    if (grid := kernel.correction) is not None:
        tree["correction"] = {
            "axes": [[round(2.0**knot) for knot in axis] for axis in grid.axes],
            "thousandths": [round(1000 * value) for value in grid.values],
        }
    return tree


def significant(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")
