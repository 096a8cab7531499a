"""Everything of Nereus that only a GPU can show, on one GPU, in under eight minutes: a table and a JSON file.

    python -m benchmarks.gpu_suite [--json FILE] [--only NAME ...]
    python -m benchmarks.gpu_suite --interpret          tiny shapes on the CPU: that every section runs

Sections are those of `gpu_sections.py`, `gpu_moves.py` and `gpu_campaign.py`. One that fails is a line of the
table and makes the exit status 1; the others still run, for such a machine may be at hand for minutes only.
None begins after eight minutes. Without a GPU the status is 2.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

BUDGET_S = 480.0  # a lent machine goes back; a section that has begun is not ended


def main() -> None:
    """Run the sections and print what they found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--interpret", action="store_true", help="tiny shapes on the CPU; no number counts")
    parser.add_argument("--json", type=Path, default=Path("gpu_suite.json"), help="where the numbers go")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these sections only")
    given = parser.parse_args()
    if given.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # chosen when a kernel is defined, so before the import below
    import torch

    if not given.interpret and not torch.cuda.is_available():
        print(
            "no GPU here: this suite measures a GPU. --interpret runs its lines on the CPU.", file=sys.stderr
        )
        sys.exit(2)
    sys.exit(run(interpret=given.interpret, file=given.json, only=given.only))


def run(*, interpret: bool, file: Path, only: list[str] | None) -> int:
    """Run, print and write; the exit status."""
    import torch
    from rich.console import Console

    from benchmarks.gpu_campaign import campaign_rows
    from benchmarks.gpu_moves import MOVES
    from benchmarks.gpu_sections import FULL, SECTIONS, TINY, Row, table_of

    device = torch.device("cpu" if interpret else "cuda")
    size = TINY if interpret else FULL
    sections = {**SECTIONS, **MOVES, "campaign": campaign_rows}
    rows: list[Row] = []
    began = time.perf_counter()
    for name in only or sections:
        start = time.perf_counter()
        if start - began > BUDGET_S:
            rows.append(Row(section=name, what="left out", ok=False, note=f"{BUDGET_S:.0f} s had passed"))
            continue
        try:
            found = sections[name](device, size)
        except Exception as error:  # sections are apart; the failure is shown, and the status says so
            traceback.print_exc()
            found = [
                Row(section=name, what="failed", note=f"{type(error).__name__}: {error}"[:200], ok=False)
            ]
        rows += found
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    where = platform.machine() if interpret else torch.cuda.get_device_name()
    Console(width=150).print(table_of(rows, f"{where}, torch {torch.__version__}"))
    file.write_text(
        json.dumps({"device": where, "interpret": interpret, "rows": [asdict(row) for row in rows]}, indent=1)
        + "\n"
    )
    print(f"wrote {file}")
    return 1 if any(row.ok is False for row in rows) else 0


if __name__ == "__main__":
    main()
