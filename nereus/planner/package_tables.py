"""Kernel and collective tables from the `aiconfigurator-core` package (extra `profiles`): read, fit, write.

The package holds measured rows of more systems and engines than the built-in tables. Fitting one takes about
a second; write the result once and name it in a cluster file: `gpus: {H100: {..., kernels:
h100-sglang.json}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nereus.errors import DataError, explain
from nereus.planner.collective_time import CollectiveTable
from nereus.planner.kernel_file import table_of
from nereus.planner.kernel_fit import fit_context_attention, fit_decode_attention, fit_gemm
from nereus.planner.kernel_time import KernelTable
from nereus.planner.measured import all_reduce_table
from nereus.planner.profile import GpuProfile

Floats = NDArray[np.float64]

_HEAD_DIM = (
    128  # the packages' attention rows of this size cover all models in the built-in list but the smallest
)


def package_folder() -> Path:
    """Where the installed package keeps its systems. Raises DataError when it is absent."""
    spec = find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            explain(
                "cannot read measured tables",
                rule="the package aiconfigurator-core is not installed",
                remedy="install the extra `profiles`, or use the built-in tables",
            )
        )
    return Path(spec.submodule_search_locations[0]) / "systems" / "data"


def package_systems(folder: Path | None = None) -> tuple[str, ...]:
    """Systems for which the package has dense products."""
    root = package_folder() if folder is None else folder
    return tuple(sorted(path.name for path in root.iterdir() if (path / "gemm").is_dir()))


def package_kernels(
    system: str, gpu: GpuProfile, *, engine: str = "vllm", folder: Path | None = None
) -> KernelTable:
    """Fit the newest 16-bit rows of `engine` on `system`; `gpu` gives the peaks that the constants relate to.

    Raises DataError when the package or the system's rows are absent.
    """
    root = (package_folder() if folder is None else folder) / system
    gemm = _rows(root / "gemm" / engine, "gemm_perf", {"gemm_dtype": "bfloat16"})
    dense: dict[str, str | int] = {
        "head_dim": _HEAD_DIM,
        "kv_cache_dtype": "bfloat16",
        "attn_dtype": "bfloat16",
        "window_size": 0,
    }
    context = _rows(root / "attention" / engine, "context_attention_perf", dense)
    decode = _rows(root / "attention" / engine, "generation_attention_perf", dense)
    return table_of(
        fit_gemm(gpu, gemm["m"], gemm["n"], gemm["k"], gemm["latency"] * 1e-3),
        fit_context_attention(
            gpu, *_attention(context, context["isl"]), _HEAD_DIM, context["latency"] * 1e-3
        ),
        fit_decode_attention(
            gpu, *_attention(decode, decode["step"] + 1), _HEAD_DIM, decode["latency"] * 1e-3
        ),
    )


def package_all_reduce(system: str, *, folder: Path | None = None) -> CollectiveTable:
    """The newest library all-reduce of `system` inside one node; sizes in the package are elements of two
    bytes.
    """
    root = (package_folder() if folder is None else folder) / system
    rows = _rows(root / "comm" / "nccl", "nccl_perf", {"op_name": "all_reduce", "nccl_dtype": "half"})
    return all_reduce_table(
        {"ranks": rows["num_gpus"], "bytes": 2 * rows["message_size"], "seconds": rows["latency"] * 1e-3}
    )


def _attention(rows: Mapping[str, Floats], tokens: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    return rows["batch_size"], tokens, rows["num_heads"], rows["num_key_value_heads"]


def _rows(folder: Path, name: str, where: Mapping[str, str | int]) -> dict[str, Floats]:
    """Numeric columns of the newest version's table, for rows that match `where`."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    versions = sorted(folder.glob(f"*/{name}.parquet"), key=lambda path: _version(path.parent.name))
    if not versions:
        raise DataError(explain("cannot read measured tables", values=f"{folder}/*/{name}.parquet is absent"))
    table = pq.read_table(versions[-1])
    for column, value in where.items():
        if column in table.column_names:
            table = table.filter(pc.equal(table[column], value))
    table = table.filter(pc.greater(table["latency"], 0))
    if not table.num_rows:
        raise DataError(
            explain(
                "cannot read measured tables", values=str(versions[-1]), rule=f"no row matches {dict(where)}"
            )
        )
    numeric = (
        field.name for field in table.schema if str(field.type) in ("int64", "int32", "double", "float")
    )
    return {column: table[column].to_numpy().astype(np.float64) for column in numeric}


def _version(name: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key that puts 0.24.0 after 0.5.6 and 1.3.0rc20 after 1.3.0rc5."""
    words = name.replace("rc", ".-1.").replace("post", ".1.").split(".")
    return tuple((1, int(word)) if word.lstrip("-").isdigit() else (0, word) for word in words if word)
