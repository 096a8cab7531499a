"""Charts as SVG text: lines with a band, stacked areas, and strips.

Colours and fonts come from the page's CSS. Every chart has an invisible column for each step that carries its
values as a tooltip, so the page needs no script. Values that are None or not finite leave a gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

LARGE, SMALL = (560, 220), (330, 150)
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 24
MAX_POINTS = 400
NUM_COLOURS = 8
ROW_HEIGHT = 46
LETTER_WIDTH = 6.2

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series over the steps."""

    name: str
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps `first` to `last`, both included, in which a row of a strip had one text."""

    first: int
    last: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Maps steps and values to the coordinates of the drawing."""

    low: float
    high: float
    first: int
    last: int
    width: int
    height: int

    def x(self, step: float) -> float:
        """Horizontal place of a step; a single step stands in the middle."""
        share = 0.5 if self.last == self.first else (step - self.first) / (self.last - self.first)
        return LEFT + share * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Vertical place of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)


def number(value: float, digits: int = 4) -> str:
    """A number for people: k, M or G for large ones, powers of ten for tiny ones."""
    if 0 < abs(value) < 1e-3:
        factor, power = f"{value:.{digits - 1}e}".split("e")
        return f"{float(factor):g}e{int(power)}"
    for size, unit, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= size:
            return f"{value / unit:.{digits}g}{suffix}"
    return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def ticks(low: float, high: float, *, count: int = 4, whole: bool = False) -> list[float]:
    """Round values that lie in [low, high], about `count` of them; whole numbers if asked."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    size = next((factor * power for factor in (1, 2, 5) if factor * power >= rough), 10 * power)
    size = max(1.0, size) if whole else size
    start = math.ceil(low / size - 1e-9)
    return [round(k * size, 12) for k in range(start, math.floor(high / size + 1e-9) + 1)]


def thin(steps: Sequence[int], columns: Sequence[Values]) -> tuple[list[int], list[list[float | None]]]:
    """At most MAX_POINTS points: neighbours are averaged; the last step of each group stands for it."""
    size = math.ceil(len(steps) / MAX_POINTS) or 1
    groups = [range(at, min(at + size, len(steps))) for at in range(0, len(steps), size)]
    return [steps[group[-1]] for group in groups], [
        [_mean(column, group) for group in groups] for column in columns
    ]


def _mean(values: Values, group: range) -> float | None:
    present = [value for i in group if (value := values[i]) is not None and math.isfinite(value)]
    return sum(present) / len(present) if present else None


def line_chart(
    steps: Sequence[int],
    lines: Sequence[Line],
    *,
    band: tuple[Values, Values] | None = None,
    zero: bool = False,
    size: tuple[int, int] = LARGE,
) -> str:
    """Lines over the steps; `band` shades between two series; `zero` makes the value axis begin at 0."""
    columns = [line.values for line in lines] + list(band or ())
    at, thinned = thin(steps, columns)
    present = [value for column in thinned for value in column if value is not None]
    frame = _frame(at, present, zero=zero, size=size)
    drawn = thinned[: len(lines)]
    shapes = []
    if band is not None:
        shapes += _areas(frame, at, thinned[-2], thinned[-1], 'class="band"')
    for index, values in enumerate(drawn):
        shapes += _path(frame, at, values, index)
    names = [line.name for line in lines]
    return _svg(frame, [*_axes(frame), *shapes, *_columns(frame, at, names, drawn)])


def stacked_chart(steps: Sequence[int], lines: Sequence[Line]) -> str:
    """Areas stacked on one another; a missing value counts as nothing."""
    at, thinned = thin(steps, [line.values for line in lines])
    layers = [[value or 0.0 for value in column] for column in thinned]
    edges = [[0.0] * len(at)]
    for layer in layers:
        edges.append([below + value for below, value in zip(edges[-1], layer, strict=True)])
    frame = _frame(at, edges[-1], zero=True, size=LARGE)
    shapes: list[str] = []
    for index, (low, high) in enumerate(pairwise(edges)):
        shapes += _areas(frame, at, low, high, f'class="area" fill="var(--c{index % NUM_COLOURS})"')
    return _svg(frame, [*_axes(frame), *shapes, *_columns(frame, at, [line.name for line in lines], layers)])


def strip_chart(rows: Mapping[str, Sequence[Segment]], first: int, last: int) -> str:
    """A row for every key; a box for each segment, coloured by its text."""
    texts = list(dict.fromkeys(segment.text for segments in rows.values() for segment in segments))
    height = len(rows) * ROW_HEIGHT + BOTTOM + 4
    frame = Frame(low=0, high=1, first=first, last=last + 1, width=2 * LARGE[0], height=height)
    shapes = _step_axis(frame, last)
    for row, (name, segments) in enumerate(rows.items()):
        top = row * ROW_HEIGHT + 4
        shapes.append(f'<text class="tick" x="{LEFT}" y="{top + 10}">{escape(name)}</text>')
        shapes += [_box(frame, top + 15, segment, texts.index(segment.text)) for segment in segments]
    return _svg(frame, shapes)


def _box(frame: Frame, top: int, segment: Segment, colour: int) -> str:
    """A segment of a strip, with its text where it fits."""
    left, right = frame.x(segment.first), frame.x(segment.last + 1)
    shown = segment.text if len(segment.text) * LETTER_WIDTH < right - left - 8 else ""
    return (
        f'<g><rect x="{left:.1f}" y="{top}" width="{max(1.0, right - left - 1):.1f}" height="24" rx="3" '
        f'fill="var(--c{colour % NUM_COLOURS})"/>'
        f'<text class="in" x="{left + 6:.1f}" y="{top + 16}">{escape(shown)}</text>'
        f"<title>steps {segment.first}-{segment.last}: {escape(segment.text)}</title></g>"
    )


def _frame(steps: Sequence[int], present: Sequence[float], *, zero: bool, size: tuple[int, int]) -> Frame:
    low, high = (min(present), max(present)) if present else (0.0, 1.0)
    low = min(0.0, low) if zero else low
    flat = high - low <= 1e-6 * max(abs(low), abs(high))  # rounding noise of a constant series
    margin = (abs(high) * 0.1 or 1.0) if flat else (high - low) * 0.06
    return Frame(
        low=low if zero else low - margin,
        high=high + margin,
        first=steps[0],
        last=steps[-1],
        width=size[0],
        height=size[1],
    )


def _svg(frame: Frame, shapes: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img">{"".join(shapes)}</svg>'


def _axes(frame: Frame) -> list[str]:
    shapes = []
    for value in ticks(frame.low, frame.high, count=frame.height // 45):
        y = f"{frame.y(value):.1f}"
        shapes.append(f'<line class="grid" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y}" y2="{y}"/>')
        shapes.append(f'<text class="tick end" x="{LEFT - 6}" y="{y}" dy=".32em">{number(value)}</text>')
    return shapes + _step_axis(frame, frame.last)


def _step_axis(frame: Frame, last: int) -> list[str]:
    return [
        f'<text class="tick mid" x="{frame.x(step):.1f}" y="{frame.height - 7}">{step:.0f}</text>'
        for step in ticks(frame.first, last, count=frame.width // 90, whole=True)
    ]


def _runs(values: Values) -> Iterator[range]:
    """The index ranges in which values are present."""
    start = None
    for index, value in enumerate([*values, None]):
        if value is None and start is not None:
            yield range(start, index)
            start = None
        elif value is not None and start is None:
            start = index


def _path(frame: Frame, steps: Sequence[int], values: Values, colour: int) -> list[str]:
    shapes = []
    for run in _runs(values):
        points = [(frame.x(steps[i]), frame.y(value)) for i in run if (value := values[i]) is not None]
        stroke = f"var(--c{colour % NUM_COLOURS})"
        if len(points) == 1:
            shapes.append(f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3" fill="{stroke}"/>')
        else:
            text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            shapes.append(f'<polyline class="line" stroke="{stroke}" points="{text}"/>')
    return shapes


def _areas(frame: Frame, steps: Sequence[int], low: Values, high: Values, style: str) -> list[str]:
    """The area between two series; a lone step is drawn as a bar."""
    shapes = []
    both = [None if a is None or b is None else 1.0 for a, b in zip(low, high, strict=True)]
    for run in _runs(both):
        if len(run) == 1:
            x, top, foot = frame.x(steps[run[0]]), frame.y(high[run[0]] or 0.0), frame.y(low[run[0]] or 0.0)
            shapes.append(
                f'<rect {style} x="{x - 12:.1f}" y="{top:.1f}" width="24" height="{foot - top:.1f}"/>'
            )
            continue
        over = [f"{frame.x(steps[i]):.1f},{frame.y(high[i] or 0.0):.1f}" for i in run]
        under = [f"{frame.x(steps[i]):.1f},{frame.y(low[i] or 0.0):.1f}" for i in reversed(run)]
        shapes.append(f'<polygon {style} points="{" ".join(over + under)}"/>')
    return shapes


def _columns(
    frame: Frame, steps: Sequence[int], names: Sequence[str], columns: Sequence[Values]
) -> list[str]:
    """An invisible column for each step with its values as a tooltip."""
    edges = [(frame.x(a) + frame.x(b)) / 2 for a, b in pairwise(steps)]
    shapes = []
    for i, (left, right) in enumerate(zip([LEFT, *edges], [*edges, frame.width - RIGHT], strict=True)):
        told = [(name, column[i]) for name, column in zip(names, columns, strict=True)]
        lines = [f"{name}: {number(value)}" for name, value in told if value is not None]
        tooltip = escape("\n".join([f"step {steps[i]}", *lines]))
        shapes.append(
            f'<rect class="hit" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" '
            f'height="{frame.height - TOP - BOTTOM}"><title>{tooltip}</title></rect>'
        )
    return shapes
