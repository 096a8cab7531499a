"""Length distributions keep the numbers they were built from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nereus.errors import ConfigError
from nereus.planner.lengths import LengthDistribution


@given(
    mean=st.floats(50, 8000),
    spread=st.floats(1.05, 3.0),
    stretch=st.floats(1.0, 20.0),
)
@settings(max_examples=60, deadline=None)
def test_mean_p95_and_max_are_kept(mean: float, spread: float, stretch: float) -> None:
    p95 = mean * spread
    try:
        built = LengthDistribution.from_mean_p95_max(mean, p95, p95 * stretch)
    except ConfigError:
        # Only where cutting at `maximum` takes so much that no log-normal keeps both numbers.
        assert stretch < 1.6 or spread > 2
        return
    assert built.mean == pytest.approx(mean, rel=0.011)  # the promise is one percent
    assert built.quantile(0.95) == pytest.approx(p95, rel=1e-6)
    assert built.maximum == pytest.approx(p95 * stretch, rel=1e-9)


def test_impossible_numbers_are_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="mean <= p95 <= max"):
        LengthDistribution.from_mean_p95_max(100, 90, 200)
    with pytest.raises(ConfigError, match="histogram"):
        LengthDistribution.from_mean_p95_max(100, 1900, 2000)


def test_histogram_must_be_one() -> None:
    with pytest.raises(ConfigError, match="one more than the shares"):
        LengthDistribution(edges_tokens=(0.0, 1.0), shares=(0.5, 0.5))
    with pytest.raises(ConfigError, match="counts no response"):
        LengthDistribution.from_histogram([0, 1], [0])


def test_observed_lengths_keep_their_mean_and_maximum() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 4000)
    built = LengthDistribution.from_lengths(lengths)
    assert built.mean == pytest.approx(lengths.mean(), rel=1e-6)
    # Equal-mass bins of 1/64 keep the tail's mean, not its last sample.
    assert built.maximum == pytest.approx(lengths.max(), rel=0.1)
    assert built.quantile(0.5) == pytest.approx(np.median(lengths), rel=0.1)


@given(st.lists(st.floats(1, 10_000), min_size=2, max_size=200))
@settings(max_examples=60, deadline=None)
def test_nodes_integrate_the_survival_curve_to_the_mean(lengths: list[float]) -> None:
    built = LengthDistribution.from_lengths(lengths)
    nodes = built.nodes()
    # The integral of survival is the mean; the grid under the cells is max / 1024 wide: the step of a point
    # mass may be off by half of that.
    assert float(nodes.survival @ nodes.widths) == pytest.approx(built.mean, abs=built.maximum / 500)
    assert float(nodes.widths.sum()) == pytest.approx(built.maximum)
    assert (np.diff(nodes.survival) <= 1e-9).all()


def test_residual_life_has_the_mean_that_renewal_theory_gives() -> None:
    built = LengthDistribution.from_mean_p95_max(1000, 3000, 8192)
    nodes = built.nodes(64)
    expected = built.mean_square / (2 * built.mean)
    assert float(nodes.residual @ nodes.widths) == pytest.approx(expected, rel=0.01)


def test_survival_falls_from_one_to_nothing() -> None:
    built = LengthDistribution.from_mean_p95_max(500, 1500, 2048)
    at = built.survival(np.array([0.0, 500.0, 2047.0, 2048.0, 9999.0]))
    assert at[0] == 1.0
    assert (np.diff(at) <= 0).all()
    assert at[3] == at[4] == 0.0


def test_constant_lengths_are_a_point_mass() -> None:
    built = LengthDistribution.constant(128)
    assert built.mean == built.maximum == built.quantile(0.1) == 128
    assert built.mean_square == 128**2


@given(
    shares=st.tuples(st.floats(0.02, 1.0), st.floats(0.0, 1.0)),
    maximum=st.floats(1, 4000),
    count=st.integers(1, 4096),
)
@example(shares=(0.25, 0.0), maximum=5.0, count=3)  # nothing is left beside the longest but a rounding
@settings(max_examples=60, deadline=None)
def test_a_step_that_was_seen_has_its_mean_and_its_longest_response(
    shares: tuple[float, float], maximum: float, count: int
) -> None:
    mean = max(maximum * shares[0], maximum / count)
    built = LengthDistribution.of_step(mean, mean + shares[1] * (maximum - mean), maximum, count)
    assert built.mean == pytest.approx(mean, rel=1e-6)
    assert built.maximum == maximum
    running = built.survival(0.999 * maximum)
    # 3 / count of the responses lie at the maximum; small counts and means leave room for fewer.
    assert running >= min(3 / count, 0.5, mean / maximum) * (1 - 1e-6)


def test_no_response_is_longer_than_the_longest() -> None:
    with pytest.raises(ConfigError, match="mean <= max"):
        LengthDistribution.of_step(10, 12, 9, 64)
