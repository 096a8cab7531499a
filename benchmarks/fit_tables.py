"""Fit the tables that ship with the planner from the measured rows in `$NEREUS_DATA/perf`, and write them.

    python benchmarks/fit_tables.py            # rewrites nereus/planner/data/{kernels/*,collectives}.json

Kernel rows: one file a GPU kind with the constants and the residual grid in thousandths. Collectives: medians
on a log-log scale. `tests/planner/test_accuracy.py` refits on a part of the same rows and gates the held-out
error.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from nereus.planner.kernel_file import significant, table_of, write_table
from nereus.planner.kernel_time import KernelModel
from nereus.planner.measured import MEASURED_GPUS, all_reduce_table, fitted_kernels, read_all_reduce

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "nereus" / "planner" / "data"

# Below every measured GPU: a plan for unknown hardware must not promise what it cannot keep.
CONSERVATIVE = table_of(
    KernelModel(compute=0.55, memory=0.65, launch_s=6e-6, norm=2.5, waves=0.3),
    KernelModel(compute=0.35, memory=0.3, launch_s=1.5e-5, norm=1.2),
    KernelModel(compute=0.3, memory=0.6, launch_s=1.5e-5, norm=2.0),
)


def main() -> None:
    folder = Path(os.environ.get("NEREUS_DATA", ROOT.parent / "shared" / "data")) / "perf" / "aiconfigurator"
    (TARGET / "kernels").mkdir(exist_ok=True)
    write_table(TARGET / "kernels" / "conservative.json", CONSERVATIVE)
    collectives: dict[str, dict[str, object]] = {}
    for name, gpu in MEASURED_GPUS.items():
        fitted = fitted_kernels(folder, gpu)
        path = TARGET / "kernels" / f"{name}.json"
        write_table(path, table_of(fitted["gemm"], fitted["context_attention"], fitted["decode_attention"]))
        collectives[name] = {}
        for kind in ("launched", "captured"):
            table = all_reduce_table(read_all_reduce(folder, gpu, captured=kind == "captured"))
            collectives[name][kind] = {
                "ranks": table.ranks,
                "sizes_log2": [round(float(np.log2(size)), 3) for size in table.sizes_bytes],
                "microseconds": [[significant(value * 1e6) for value in line] for line in table.seconds],
            }
        print(name, path.stat().st_size, "bytes")
    (TARGET / "collectives.json").write_text(json.dumps(collectives) + "\n")


if __name__ == "__main__":
    main()
