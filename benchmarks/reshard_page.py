"""The tables of docs/reshard-benchmark.md from the rows that `benchmarks.reshard --json` wrote.

    python -m benchmarks.reshard_page rows.json [more.json ...]

Rows of a case must come from one file, since ratios are taken within a run. Besides each goal's worst, median
and best case the page says what the floor of reads would reach: where it misses a goal, nobody can meet it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.reshard_cases import CASES
from benchmarks.reshard_table import Row

TIMED = (
    "ours",
    "floor-read",
    "floor-gloo",
    "gloo",
    "allgather",
    "gather",
    "dcp-shm",
    "dcp-disk",
    "megatron",
    "mcp",
)
MOVED = ("ours", "allgather", "gather", "dcp-shm", "megatron", "megatron-placed")
# method, goal in words, least allowed ratio of its wall to ours
GOALS = (
    ("floor-gloo", "ours / gloo floor at most 1.5", 1 / 1.5),
    ("floor-read", "ours / read floor at most 1.5", 1 / 1.5),
    ("dcp-shm", "DCP on /dev/shm / ours at least 8", 8.0),
    ("dcp-disk", "DCP on disk / ours at least 8", 8.0),
    ("allgather", "AllGather + slice / ours at least 4", 4.0),
    ("megatron", "Megatron's resharding / ours above 1", 1.0),
)
Cells = Mapping[tuple[str, str], Row]  # case, method


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("files", type=Path, nargs="+")
    rows = [Row(**fields) for file in parser.parse_args().files for fields in json.loads(file.read_text())]
    cells = {(row.case, row.method): row for row in rows if row.best_s is not None}
    cases = [case.name for case in CASES if (case.name, "ours") in cells]
    titles = {row.method: row.title for row in cells.values()}
    print(page(cases, cells, titles))


def page(cases: Sequence[str], cells: Cells, titles: Mapping[str, str]) -> str:
    """Times, bytes and goals, in this order."""
    return "\n".join(
        [
            "Best wall seconds; in brackets CPU seconds:\n",
            *table(cases, [method for method in TIMED if method in titles], cells, titles, _time),
            "\nMB that cross between processes (checkpoints: written plus read):\n",
            *table(cases, [method for method in MOVED if method in titles], cells, titles, _size),
            "\n| goal | measured, worst to best | met in | floor of reads in place of ours |",
            "|---|---|---|---|",
            *(line for key, goal, least in GOALS if (line := _goal(key, goal, least, cases, cells))),
        ]
    )


def table(
    cases: Sequence[str],
    methods: Sequence[str],
    cells: Cells,
    titles: Mapping[str, str],
    cell: Callable[[Row], str],
) -> list[str]:
    """A row a case, a column a method."""
    found = [
        [cell(cells[case, method]) if (case, method) in cells else "-" for method in methods]
        for case in cases
    ]
    return [
        "| case | " + " | ".join(titles[method] for method in methods) + " |",
        "|---" * (len(methods) + 1) + "|",
        *(f"| {case} | " + " | ".join(line) + " |" for case, line in zip(cases, found, strict=True)),
    ]


def _time(row: Row) -> str:
    return f"{row.best_s or 0:.3f} ({row.cpu_s or 0:.2f})"


def _size(row: Row) -> str:
    return f"{row.megabytes or 0:.0f}"


def _goal(key: str, goal: str, least: float, cases: Sequence[str], cells: Cells) -> str:
    """One line of the goals; empty without a measurement."""
    ours = _ratios(key, "ours", cases, cells)
    if not ours:
        return ""
    floor = _ratios(key, "floor-read", cases, cells)
    met = sum(ratio >= least for ratio in ours)
    ours, floor = [([1 / r for r in ratios] if least < 1 else ratios) for ratios in (ours, floor)]
    return f"| {goal} | {_spread(ours, least < 1)} | {met} of {len(ours)} | {_spread(floor, least < 1)} |"


def _ratios(key: str, base: str, cases: Sequence[str], cells: Cells) -> list[float]:
    pairs = [(cells.get((case, key)), cells.get((case, base))) for case in cases]
    return [a.best_s / b.best_s for a, b in pairs if a and b and a.best_s and b.best_s]


def _spread(ratios: list[float], low_is_good: bool) -> str:
    if not ratios:
        return "-"
    worst, best = (max(ratios), min(ratios)) if low_is_good else (min(ratios), max(ratios))
    return f"{worst:.2f} to {best:.2f}, median {median(ratios):.2f}"


if __name__ == "__main__":
    main()
