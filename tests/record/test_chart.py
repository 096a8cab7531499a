"""Charts are well-formed SVG, keep within the drawing, and leave gaps where values are missing."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.record.chart import (
    LARGE,
    MAX_POINTS,
    Line,
    Segment,
    line_chart,
    number,
    stacked_chart,
    strip_chart,
    thin,
    ticks,
)

VALUES = st.lists(
    st.none() | st.floats(-1e12, 1e12) | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=30
)


def shapes(svg: str, tag: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(svg).findall(f".//{tag}")


@given(VALUES)
def test_any_values_give_an_svg_that_stays_within_its_box(values: list[float | None]) -> None:
    svg = line_chart(range(len(values)), [Line(name="a", values=values)])
    for line in shapes(svg, "polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= LARGE[0]
            assert 0 <= y <= LARGE[1]


def test_a_missing_value_leaves_a_gap() -> None:
    svg = line_chart(range(6), [Line(name="a", values=[1, 2, None, 3, math.nan, 4])])
    assert len(shapes(svg, "polyline")) == 1
    assert len(shapes(svg, "circle")) == 2


def test_a_tooltip_tells_the_values_of_its_step() -> None:
    svg = line_chart([7, 8], [Line(name="mean<", values=[1.5, None])])
    assert [title.text for title in shapes(svg, "title")] == ["step 7\nmean<: 1.5", "step 8"]


def test_stacked_areas_stand_on_one_another() -> None:
    svg = stacked_chart([0, 1], [Line(name="a", values=[1, 1]), Line(name="b", values=[2, None])])
    low, high = (area.attrib["points"].split() for area in shapes(svg, "polygon"))
    assert low[:2] == high[2:][::-1], "the upper edge of one is the lower edge of the next"


def test_a_long_run_is_thinned_to_its_means() -> None:
    at, (values,) = thin(range(10 * MAX_POINTS), [[float(i) for i in range(10 * MAX_POINTS)]])
    assert len(at) == MAX_POINTS
    assert at[-1] == 10 * MAX_POINTS - 1
    assert values[0] == 4.5


def test_a_strip_has_a_box_for_each_segment() -> None:
    rows = {"actor.training": [Segment(first=0, last=9, text="tp2"), Segment(first=10, last=19, text="tp4")]}
    svg = strip_chart(rows, 0, 19)
    boxes = [float(box.attrib["width"]) for box in shapes(svg, "rect")]
    assert len(boxes) == 2
    assert boxes[0] == pytest.approx(boxes[1], abs=0.11)  # rounded to a tenth of a pixel each
    assert [title.text for title in shapes(svg, "title")] == ["steps 0-9: tp2", "steps 10-19: tp4"]


@given(st.floats(-1e9, 1e9), st.floats(1e-5, 1e9))
def test_ticks_are_few_and_inside(low: float, share: float) -> None:
    high = low + share * max(1.0, abs(low))
    found = ticks(low, high)
    slack = 1e-6 * (high - low)  # rounding of k * size
    assert 1 <= len(found) <= 7
    assert all(low - slack <= tick <= high + slack for tick in found)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (1234.5, "1234"),
        (12345, "12.35k"),
        (3.2e6, "3.2M"),
        (5e9, "5G"),
        (1e-4, "1e-4"),
        (1.05e-5, "1.05e-5"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_a_number_with_more_digits_than_asked_is_written_out() -> None:
    assert number(1893.4, 3) == "1893"
