"""Traces: files of every kind, generators, and conditions by step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.errors import DataError
from nereus.planner.conditions import Lengths, SupplyEvent, trace_of
from nereus.planner.synthetic import (
    growing_lengths,
    growing_supply,
    slow_spells,
    spot_supply,
    steady_supply,
)
from nereus.planner.traces import read_lengths, read_supply

LENGTHS = (Lengths(mean=500, p95=1000, maximum=2000),) * 6


def written(folder: Path, text: str) -> Path:
    """A file with this text."""
    path = folder / "trace"
    path.write_text(text)
    return path


def nodes_by_step(path: Path, **options: float) -> list[int]:
    """How many nodes a supply file has at each step of a minute."""
    trace = trace_of("t", read_supply(path, **options), LENGTHS, step_s=60.0, most_nodes=99)
    return [len(step.nodes) for step in trace.steps]


def test_every_kind_of_supply_file_is_read(tmp_path: Path) -> None:
    named = "0,add,a\n0,add,b\n60000,add,c\n120000,remove,a\n180000,remove,b\n"
    assert nodes_by_step(written(tmp_path, named)) == [2, 3, 2, 1, 1, 1]
    assert nodes_by_step(written(tmp_path, "0,1\n0,2\n60000,3\n120000,2\n180000,1\n")) == [2, 3, 2, 1, 1, 1]
    lines = [
        [0, "add", {"nodes": ["a", "b"]}],
        [60000, "migration", {"nodes": []}],
        [120000, "remove", {"nodes": ["a"]}],
        [180000, "no-op", {"nodes": []}],
    ]
    assert nodes_by_step(written(tmp_path, "\n".join(map(json.dumps, lines)))) == [2, 2, 1, 1, 1, 1]
    sky = json.dumps({"metadata": {"gap_seconds": 120}, "data": [4, 2, 0]})
    assert nodes_by_step(written(tmp_path, sky)) == [4, 4, 2, 2, 0, 0]
    assert nodes_by_step(written(tmp_path, "at_s,nodes\n0,3\n200,1\n")) == [3, 3, 3, 3, 1, 1]


@pytest.mark.parametrize(
    "text", ["nonsense", '{"data": [1]}', "0,add\nx", '[0, "explode", {"nodes": ["a"]}]', ""]
)
def test_what_is_no_supply_trace_is_refused_with_the_kinds_that_are(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DataError, match=r"Parcae|node"):
        trace_of("t", read_supply(path), LENGTHS, step_s=60.0, most_nodes=9)


def test_lengths_are_read_with_and_without_their_tail(tmp_path: Path) -> None:
    found = read_lengths(written(tmp_path, "step,mean,p95,max\n0,100,150,300\n1,200,300,900\n"))
    assert found[1] == Lengths(mean=200, p95=300, maximum=900)
    logged = read_lengths(written(tmp_path, "step,response_length/mean,response_length/max\n0,310,512\n"))
    assert logged == (Lengths(mean=310, p95=512, maximum=512),)
    with pytest.raises(DataError, match="mean"):
        read_lengths(written(tmp_path, "step,loss\n0,1\n"))


def test_supplied_traces_have_the_published_counts(shared_data: Path) -> None:
    folder = shared_data / "traces" / "spot"
    lengths = LENGTHS * 10
    low = trace_of(
        "LL", read_supply(folder / "parcae_gpt6.7b_ll_10_11.txt"), lengths, step_s=60.0, most_nodes=32
    )
    assert [len(low.steps[at].nodes) for at in (0, 7, 11, 13, 59)] == [19, 17, 16, 15, 15]
    named = read_supply(folder / "parcae_p3trace.csv")
    counted = read_supply(folder / "parcae_p3.csv")
    pair = [trace_of("p3", events, LENGTHS * 50, step_s=120.0, most_nodes=40) for events in (named, counted)]
    counts = np.array([[len(step.nodes) for step in trace.steps] for trace in pair])
    assert (counts[0] == counts[1]).all()
    assert counts.max() == 32


def test_announced_departures_drain_and_sudden_ones_break() -> None:
    supply = (
        *steady_supply(3),
        SupplyEvent(at_s=130.0, node=0, joins=False, notice_s=5.0),
        SupplyEvent(at_s=190.0, node=1, joins=False, notice_s=100.0),
    )
    steps = trace_of("t", supply, LENGTHS, step_s=60.0, most_nodes=9).steps
    assert steps[2].breaking == {0}
    assert dict(steps[2].draining) == {1: 70.0}
    assert steps[3].breaking == frozenset()
    assert dict(steps[3].draining) == {1: 10.0}
    assert steps[4].nodes == {2}


def test_more_nodes_than_allowed_wait_for_a_place() -> None:
    trace = trace_of("t", steady_supply(5), LENGTHS, step_s=60.0, most_nodes=3)
    assert trace.most_nodes == 3


def test_a_trace_begins_with_a_node() -> None:
    late = (SupplyEvent(at_s=70.0, node=0, joins=True),)
    with pytest.raises(DataError, match="beginning"):
        trace_of("t", late, LENGTHS, step_s=60.0, most_nodes=3)


@settings(deadline=None)
@given(seed=st.integers(0, 1000), least=st.integers(1, 4), more=st.integers(1, 12))
def test_spot_supply_stays_in_bounds_and_is_the_seeds(seed: int, least: int, more: int) -> None:
    kwargs = {"duration_s": 2e5, "least": least, "most": least + more}
    events = spot_supply(seed, **kwargs)  # type: ignore[arg-type]
    assert events == spot_supply(seed, **kwargs)  # type: ignore[arg-type]
    present: set[int] = set()
    for event in events:
        assert (event.node in present) != event.joins
        present ^= {event.node}
        if event.at_s > 0:
            assert least <= len(present) <= least + more


def test_spot_intervals_vary_as_asked() -> None:
    events = spot_supply(3, duration_s=4e7, least=1, most=40, mean_interval_s=1200, variation=3.0)
    gaps = np.diff(np.unique([event.at_s for event in events]))
    assert gaps.mean() == pytest.approx(1200, rel=0.1)  # a few bursts at a bound do nothing
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.2)


def test_lengths_grow_from_start_to_end_within_the_limit() -> None:
    found = growing_lengths(1, 200, start=500, end=8000, noise=0.02, limit=16384)
    assert found[0].mean == pytest.approx(500, rel=0.1)
    assert found[-1].mean == pytest.approx(8000, rel=0.1)
    assert all(length.mean <= length.p95 <= length.maximum <= 16384 for length in found)
    assert found == growing_lengths(1, 200, start=500, end=8000, noise=0.02, limit=16384)


def test_a_length_is_rounded_by_no_more_than_its_grid() -> None:
    for mean in (137.0, 500.0, 7777.0):
        rounded = Lengths(mean=mean, p95=2 * mean, maximum=4 * mean).distribution
        # 1.5 % from the grid, 1 % from the fit of the log-normal body.
        assert rounded.mean == pytest.approx(mean, rel=0.03)


def test_slow_spells_take_their_share_of_the_steps() -> None:
    speeds = slow_spells(5, 20000, spell_steps=20, share=0.25)
    assert np.mean([speed.compute < 1 for speed in speeds]) == pytest.approx(0.25, abs=0.05)
    assert speeds[0].calibration.gemm == 1.0 / speeds[0].compute


def test_growth_ends_with_all_nodes() -> None:
    trace = trace_of(
        "g", growing_supply(2, 16, duration_s=360.0, stages=3), LENGTHS, step_s=60.0, most_nodes=16
    )
    assert [len(step.nodes) for step in trace.steps] == [2, 2, 9, 9, 16, 16]
