"""What `benchmarks.overhead` measured, as the tables of docs/design/tracking.md, and the costs for `COST_S`.

    python -m benchmarks.overhead_page FOLDER

Writes the tables between the marks of the page and prints the `COST_S` that they call for. Measures nothing.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.overhead import RESULTS_FILE

PAGE = Path(__file__).resolve().parent.parent / "docs" / "design" / "tracking.md"
BEGIN, END = "<!-- overhead: begin -->", "<!-- overhead: end -->"
LEVELS = ("full", "tasks", "step")
MARGIN = 1.5  # a campaign's own work on the same cores makes the server slower
NAMES = {"sqlite": "SQLite", "postgres": "Postgres"}
Measured = Mapping[str, Mapping[str, Any]]


def main() -> None:
    measured = json.loads((Path(sys.argv[1]) / RESULTS_FILE).read_text())
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([f"{before}{BEGIN}", "", *tables(measured), f"{END}{after}"]))
    print("COST_S =", costs_s(measured))


def costs_s(measured: Measured) -> dict[str, float]:
    """Seconds that each level may add to a step: `MARGIN` times the median of the level less that of a step
    without Prefect, by the clock or in CPU of the driver (a task run may lie beside the step), on the
    database where that is more, rounded up to two digits.
    """
    added = {
        level: max(
            kind[level][time] - kind["none"][time]
            for kind in measured.values()
            for time in ("p50_ms", "cpu_ms")
        )
        / 1e3
        for level in LEVELS
    }
    return {level: _up(MARGIN * seconds) for level, seconds in added.items()}


def _up(seconds: float) -> float:
    """The next larger number of two digits."""
    digit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return round(math.ceil(seconds / digit - 1e-9) * digit, 6)


def tables(measured: Measured) -> Iterator[str]:
    """The tables as lines of Markdown."""
    kinds = [kind for kind in NAMES if kind in measured]
    yield from _levels(measured, kinds)
    yield from _auto(measured, kinds)
    yield from _growth(measured, kinds)


def _levels(measured: Measured, kinds: list[str]) -> Iterator[str]:
    head = [f"{NAMES[kind]}: median, largest" for kind in kinds]
    yield from ("What a step of eight stages of a second takes beyond them, milliseconds:", "")
    yield from _head("level", *head, "CPU of the driver")
    for level in ("none", "step", "tasks", "full"):
        cells = (measured[kind][level] for kind in kinds)
        times = [f"{each['p50_ms']:.1f}, {each['max_ms']:.0f}" for each in cells]
        cpu_ms = max(measured[kind][level]["cpu_ms"] for kind in kinds)
        yield _row("not tracked" if level == "none" else f"`{level}`", *times, f"{cpu_ms:.1f}")
    yield ""


def _auto(measured: Measured, kinds: list[str]) -> Iterator[str]:
    names = [name for name in measured[kinds[0]] if name.startswith("auto ")]
    if not names:
        return
    yield from ("What `auto` adds to a step, in the median and at worst:", "")
    yield from _head("step", "level", *(NAMES[kind] for kind in kinds))
    for name in names:
        cells = [measured[kind][name] for kind in kinds]
        shares = (f"{cell['share']:.2%}, {cell['worst_share']:.2%}" for cell in cells)
        shared = cells[0]["steps_a_run"]
        shown = f"`{cells[0]['level']}`" + (f", {shared} steps a task run" if shared > 1 else "")
        yield _row(name.removeprefix("auto "), shown, *shares)
    yield ""


def _growth(measured: Measured, kinds: list[str]) -> Iterator[str]:
    grown = {kind: measured[kind]["growth"] for kind in kinds if "growth" in measured[kind]}
    if not grown:
        return
    yield from ("Steps with a subflow and eight task runs each, 0.7 s apart, milliseconds a step:", "")
    yield from _head("database", "steps", "median at the start", "at the end", "size")
    for kind, chunks in grown.items():
        first, last = chunks[0], chunks[-1]
        size = f"{last['size_mb']:.0f} MB"
        yield _row(NAMES[kind], f"{last['steps']}", f"{first['p50_ms']:.0f}", f"{last['p50_ms']:.0f}", size)
    yield ""


def _head(*names: str) -> Iterator[str]:
    yield from (_row(*names), "|" + "---|" * len(names))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
