"""The table of `benchmarks.reshard` and its goals, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.reshard_cases import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method on one case."""

    case: str
    processes: int
    method: str
    title: str
    megabytes: float | None = None
    bytes_over_bound: float | None = None
    wall_s: float | None = None
    best_s: float | None = None
    cpu_s: float | None = None
    peak_mb: float | None = None
    remark: str = ""


def show(case: Case, rows: Sequence[Row]) -> None:
    """Print one case."""
    if not rows:
        return
    mine = next((row for row in rows if row.method == "ours"), None)
    print(f"\n{case.name} ({case.processes} processes)")
    heads = " ".join(
        f"{head:>8s}" for head in ("MB", "/bound", "wall s", "best s", "CPU s", "peak MB", "x ours")
    )
    print(f"  {'method':38s} {heads}")
    for row in rows:
        if row.wall_s is None:
            print(f"  {row.title:38s} {row.remark}")
            continue
        ratio = f"{row.best_s / mine.best_s:8.2f}" if mine and mine.best_s and row.best_s else f"{'':8s}"
        bound = f"{row.bytes_over_bound:8.2f}" if row.bytes_over_bound is not None else f"{'':8s}"
        best = f"{row.best_s:8.3f}" if row.best_s is not None else f"{'':8s}"
        cpu = f"{row.cpu_s:8.3f}" if row.cpu_s is not None else f"{'':8s}"
        peak = f"{row.peak_mb:8.0f}" if row.peak_mb is not None else f"{'':8s}"
        size = f"{row.megabytes:8.1f}" if row.megabytes is not None else f"{'':8s}"
        print(f"  {row.title:38s} {size} {bound} {row.wall_s:8.3f} {best} {cpu} {peak} {ratio} {row.remark}")


def verdict(rows: Sequence[Row]) -> None:
    """Print each goal with the worst case."""

    def ratios(method: str) -> dict[str, float]:
        ours_s = {row.case: row.best_s for row in rows if row.method == "ours" and row.best_s}
        return {
            row.case: row.best_s / ours_s[row.case]
            for row in rows
            if row.method == method and row.best_s and row.case in ours_s
        }

    print("\ngoals (worst case first)")
    exact = {row.case: row.bytes_over_bound for row in rows if row.method == "ours"}
    if exact:
        found_bounds = sorted({round(value or 0.0, 4) for value in exact.values()})
        print(f"  bytes / bound: {found_bounds}, goal 1.00")
    goals = (
        ("floor-gloo", "ours / gloo floor", 1 / 1.5, True),
        ("floor-read", "ours / read floor", 1 / 1.5, True),
        ("dcp-shm", "DCP on /dev/shm / ours", 8.0, False),
        ("dcp-disk", "DCP on disk / ours", 8.0, False),
        ("allgather", "AllGather + slice / ours", 4.0, False),
        ("megatron", "Megatron resharding / ours", 1.0, False),
    )
    for key, title, goal, inverse in goals:
        found = ratios(key)
        if not found:
            continue
        case, worst = min(found.items(), key=lambda item: item[1])
        shown, limit = (1 / worst, f"<= {1 / goal:.2f}") if inverse else (worst, f">= {goal:.2f}")
        print(f"  {title}: {shown:.2f} on {case!r}, goal {limit}: {'met' if worst >= goal else 'missed'}")
