"""Read measured kernel and collective rows: CSV exports, or the tables of the `aiconfigurator-core` package.

Both have the same columns. What comes out are rows for `kernel_fit` and `CollectiveTable`s; nothing here is
needed to plan, since the fitted result ships with the package.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nereus.errors import DataError, explain
from nereus.planner.collective_time import CollectiveTable
from nereus.planner.kernel_fit import fit_context_attention, fit_decode_attention, fit_gemm
from nereus.planner.kernel_time import KernelModel
from nereus.planner.profile import gpu_profile

Floats = NDArray[np.float64]
Columns = Mapping[str, Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGpu:
    """One system of the tables: our GPU kind, its folder name there and the versions that were measured."""

    kind: str
    system: str
    engine: str
    nccl: str


MEASURED_GPUS: Mapping[str, MeasuredGpu] = {
    "A100": MeasuredGpu(kind="A100-80", system="a100_sxm", engine="0.14.0", nccl="2.27.3"),
    "H100": MeasuredGpu(kind="H100", system="h100_sxm", engine="0.24.0", nccl="2.27.3"),
    "H200": MeasuredGpu(kind="H200", system="h200_sxm", engine="0.24.0", nccl="2.26.2"),
    "B200": MeasuredGpu(kind="B200", system="b200_sxm", engine="0.24.0", nccl="2.27.3"),
    "L40S": MeasuredGpu(kind="L40S", system="l40s", engine="0.24.0", nccl="2.27.3"),
}


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a (gzipped) CSV with a header, as text. Raises DataError when it is absent."""
    if not path.is_file():
        raise DataError(explain("cannot read measured rows", values=str(path), rule="the file is absent"))
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


def read_columns(path: Path, where: Callable[[Mapping[str, str]], bool] | None = None) -> dict[str, Floats]:
    """Numeric columns of a (gzipped) CSV; rows for which `where` is false are left out, text columns too."""
    rows = [row for row in read_rows(path) if where is None or where(row)]
    columns = {}
    for name in rows[0] if rows else ():
        try:
            columns[name] = np.array([float(row[name]) for row in rows])
        except ValueError:
            continue
    return columns


def read_gemm(folder: Path, gpu: MeasuredGpu) -> dict[str, Floats]:
    """Columns m, n, k, seconds of 16-bit products."""
    rows = read_columns(folder / f"{gpu.system}_gemm_bf16_vllm{gpu.engine}.csv.gz")
    return {name: rows[name] for name in ("m", "n", "k")} | {"seconds": rows["latency_ms"] * 1e-3}


def read_attention(folder: Path, gpu: MeasuredGpu, *, decode: bool) -> dict[str, Floats]:
    """Columns sequences, tokens, heads, kv_heads, seconds (head_dim 128, 16-bit cache)."""
    phase = "generation" if decode else "context"
    rows = read_columns(folder / f"{gpu.system}_{phase}_attention_bf16_hd128_vllm{gpu.engine}.csv.gz")
    found = {
        "sequences": rows["batch_size"],
        "tokens": rows["step"] + 1 if decode else rows["isl"],
        "heads": rows["num_heads"],
        "kv_heads": rows["num_key_value_heads"],
        "seconds": rows["latency_ms"] * 1e-3,
    }
    kept = found["seconds"] > 0
    return {name: column[kept] for name, column in found.items()}


def read_all_reduce(folder: Path, gpu: MeasuredGpu, *, captured: bool) -> dict[str, Floats]:
    """Columns ranks, bytes, seconds; sizes in the files are elements of two bytes.

    Captured: the engine's own kernel inside a graph; it hands large messages to the library itself.
    """
    if not captured:
        library = read_columns(
            folder / f"{gpu.system}_nccl{gpu.nccl}_half.csv.gz", lambda row: row["op_name"] == "all_reduce"
        )
        return {
            "ranks": library["num_gpus"],
            "bytes": library["message_elems_half"] * 2,
            "seconds": library["latency_ms"] * 1e-3,
        }
    own = read_columns(
        folder / f"{gpu.system}_vllm_custom_allreduce_bf16.csv.gz", lambda row: row["backend"] == "vllm_graph"
    )
    return {
        "ranks": own["num_gpus"],
        "bytes": own["message_size"] * 2,
        "seconds": own["latency_ms"] * 1e-3,
    }


def all_reduce_table(rows: Columns) -> CollectiveTable:
    """Medians of equal (ranks, bytes), made monotone in size so that one bad run bends no neighbour."""
    ranks, sizes = np.unique(rows["ranks"]), np.unique(rows["bytes"])
    table = np.full((len(ranks), len(sizes)), np.nan)
    for i, count in enumerate(ranks):
        for j, size in enumerate(sizes):
            here = rows["seconds"][(rows["ranks"] == count) & (rows["bytes"] == size)]
            if len(here):
                table[i, j] = np.median(here)
        known = ~np.isnan(table[i])
        table[i] = np.exp(np.interp(np.log(sizes), np.log(sizes[known]), np.log(table[i, known])))
        table[i] = np.minimum.accumulate(table[i, ::-1])[::-1]
    return CollectiveTable(
        ranks=tuple(int(count) for count in ranks),
        sizes_bytes=tuple(float(size) for size in sizes),
        seconds=tuple(tuple(float(value) for value in line) for line in table),
    )


def fitted_kernels(folder: Path, gpu: MeasuredGpu) -> dict[str, KernelModel]:
    """Fit the three kernel classes of one GPU kind to all its rows."""
    profile = gpu_profile(gpu.kind)
    gemm = read_gemm(folder, gpu)
    found = {"gemm": fit_gemm(profile, gemm["m"], gemm["n"], gemm["k"], gemm["seconds"])}
    for name, decode, fit in (
        ("context_attention", False, fit_context_attention),
        ("decode_attention", True, fit_decode_attention),
    ):
        rows = read_attention(folder, gpu, decode=decode)
        sizes = (rows["sequences"], rows["tokens"], rows["heads"], rows["kv_heads"])
        found[name] = fit(profile, *sizes, 128, rows["seconds"])
    return found
