"""The distribution of response lengths: a histogram in, quantile nodes and a survival curve out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.errors import ConfigError, explain

Floats = NDArray[np.float64]

_NUM_BINS = 64
_TAIL = 1e-3  # the share of responses that the log-linear tail up to `max` holds
_AT_MAXIMUM = 3.0  # e^-3: the chance that none of the draws is there
_BODY = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthNodes:
    """Cells over the length axis, each array of shape [cells]: mid-point, width, and two survival curves.

    `survival` is the share of responses still running, averaged over the cell. `residual` is the same for
    what is left of a response met at a random moment (integral of the survival beyond, over the mean:
    renewal theory), which describes a continuously filled engine when its queue runs empty.
    """

    positions: Floats
    widths: Floats
    survival: Floats
    residual: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthDistribution:
    """A histogram of lengths in tokens; mass is uniform inside a bin.

    `edges_tokens` has one entry more than `shares` and never falls; a bin of zero width is a point mass
    (responses cut at the limit). `shares` sum to one.
    """

    edges_tokens: tuple[float, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        edges, shares = np.asarray(self.edges_tokens), np.asarray(self.shares)
        fits = len(edges) == len(shares) + 1 and len(shares) > 0 and edges[0] >= 0 and edges[-1] >= 1
        if not fits or (np.diff(edges) < 0).any() or (shares < 0).any() or abs(shares.sum() - 1) > 1e-6:
            raise ConfigError(
                explain(
                    "cannot read the histogram of lengths",
                    values=f"{len(edges)} edges, {len(shares)} shares that sum to {shares.sum():.6g}",
                    rule="edges must not fall, number one more than the shares, and the shares sum to 1",
                )
            )

    @classmethod
    def constant(cls, tokens: float) -> Self:
        """Every response has the same length."""
        return cls(edges_tokens=(float(tokens), float(tokens)), shares=(1.0,))

    @classmethod
    def from_histogram(cls, edges_tokens: Sequence[float], counts: Sequence[float]) -> Self:
        """From bin edges and counts; the counts are normalised."""
        total = float(sum(counts))
        if not total > 0:
            raise ConfigError(explain("cannot read the histogram of lengths", rule="it counts no response"))
        return cls(
            edges_tokens=tuple(float(edge) for edge in edges_tokens),
            shares=tuple(float(count) / total for count in counts),
        )

    @classmethod
    def from_lengths(cls, lengths_tokens: ArrayLike) -> Self:
        """From observed lengths: equal-mass bins between their quantiles."""
        lengths = np.asarray(lengths_tokens, dtype=np.float64).ravel()
        if lengths.size == 0:
            raise ConfigError(explain("cannot build a length distribution", rule="no length was given"))
        edges = np.quantile(lengths, np.linspace(0, 1, _NUM_BINS + 1))
        edges *= lengths.mean() / max(((edges[1:] + edges[:-1]) / 2).mean(), 1e-9)
        return cls(edges_tokens=tuple(edges.tolist()), shares=(1 / _NUM_BINS,) * _NUM_BINS)

    @classmethod
    def from_mean_p95_max(cls, mean: float, p95: float, maximum: float) -> Self:
        """A log-normal body and a log-linear last 0.1 % up to `maximum`, with this mean and 95 % quantile.

        Raises ConfigError where no such distribution exists: mean <= p95 <= maximum is needed, and p95 may be
        at most about 3.8 means (a heavier tail needs the histogram itself).
        """
        edges, shares = _from_mean_p95_max(float(mean), float(p95), float(maximum))
        return cls(edges_tokens=edges, shares=shares)

    @classmethod
    def of_step(cls, mean: float, p95: float, maximum: float, count: int) -> Self:
        """What `count` lengths with these three numbers look like: the longest of them is `maximum`.

        A distribution that lengths are drawn from says what to expect of the longest; here it is known, and
        it decides how many decode steps there were. So a share of 3 / count lies at the maximum: one of
        `count` draws is there with 95 %. The rest are uniform on either side of half the 95 % quantile.
        Raises ConfigError unless 0 < mean <= maximum.
        """
        if not 0 < mean <= maximum:
            raise ConfigError(
                explain(
                    "cannot tell how long responses were",
                    values=f"mean {mean:g}, max {maximum:g}",
                    rule="0 < mean <= max must hold",
                )
            )
        top = min(_AT_MAXIMUM / max(count, 1), 0.5, mean / maximum)
        rest = max(mean - top * maximum, 0.0) / (1 - top)  # never below by a rounding
        high = min(max(p95, rest), maximum)
        middle = high / 2
        below = min(max(1.5 - 2 * rest / high, 0.0), 1.0)
        edges: tuple[float, ...]
        shares: tuple[float, ...]
        if rest < high / 4:
            edges, shares = (0.0, 2 * rest), (1.0,)
        elif rest > 3 * high / 4:
            edges, shares = (2 * rest - high, high), (1.0,)
        else:
            edges, shares = (0.0, middle, high), (below, 1 - below)
        kept = (*((1 - top) * share for share in shares), 0.0, top)
        return cls(edges_tokens=(*edges, maximum, maximum), shares=kept)

    @property
    def mean(self) -> float:
        """Mean length in tokens."""
        edges = np.asarray(self.edges_tokens)
        return float(((edges[1:] + edges[:-1]) / 2) @ np.asarray(self.shares))

    @property
    def mean_square(self) -> float:
        """Mean of the squared length; attention's work grows with it."""
        edges = np.asarray(self.edges_tokens)
        low, high = edges[:-1], edges[1:]
        return float(((low * low + low * high + high * high) / 3) @ np.asarray(self.shares))

    @property
    def maximum(self) -> float:
        """The longest response in tokens."""
        return self.edges_tokens[-1]

    def quantile(self, share: float) -> float:
        """The length that `share` of the responses do not exceed."""
        cumulative = np.concatenate(([0.0], np.cumsum(self.shares)))
        return float(np.interp(min(max(share, 0.0), 1.0) * cumulative[-1], cumulative, self.edges_tokens))

    def survival(self, tokens: ArrayLike) -> Floats:
        """Share of responses longer than `tokens`; same shape as `tokens`."""
        cumulative = np.concatenate(([0.0], np.cumsum(self.shares)))
        at = np.asarray(tokens, dtype=np.float64)
        edges = np.asarray(self.edges_tokens)
        below = np.interp(at, edges, cumulative / cumulative[-1], left=0.0, right=1.0)
        return np.asarray(np.where(at >= edges[-1], 0.0, 1.0 - below), dtype=np.float64)

    def nodes(self, count: int = 24) -> LengthNodes:
        """Cells that integrate a function of position over [0, maximum].

        Half the edges sit at equal quantiles, half at equal steps, so that both the crowded start and the
        long thin tail are resolved.
        """
        shares = np.linspace(0, 1, count // 2 + 1)
        cumulative = np.concatenate(([0.0], np.cumsum(self.shares)))
        quantiles = np.interp(shares * cumulative[-1], cumulative, self.edges_tokens)
        even = np.linspace(0, self.maximum, count - count // 2 + 1)
        edges = np.unique(np.concatenate(([0.0], quantiles, even)))
        # Edges that differ by rounding only would make a cell of no width.
        edges = edges[np.append(np.diff(edges) > 1e-6 * self.maximum, True)]
        grid = np.union1d(edges, np.linspace(0.0, self.maximum, 1025))
        fresh = self.survival(grid)
        area = np.concatenate(([0.0], np.cumsum((fresh[1:] + fresh[:-1]) / 2 * np.diff(grid))))
        residual = 1.0 - area / area[-1]
        left = np.concatenate(([0.0], np.cumsum((residual[1:] + residual[:-1]) / 2 * np.diff(grid))))
        widths = np.diff(edges)
        return LengthNodes(
            positions=(edges[1:] + edges[:-1]) / 2,
            widths=widths,
            survival=np.diff(np.interp(edges, grid, area)) / widths,
            residual=np.diff(np.interp(edges, grid, left)) / widths,
        )


@lru_cache(maxsize=64)
def _from_mean_p95_max(
    mean: float, p95: float, maximum: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    values = f"mean {mean:g}, p95 {p95:g}, max {maximum:g}"
    what = "cannot build a length distribution"
    if not 0 < mean <= p95 <= maximum:
        raise ConfigError(explain(what, values=values, rule="0 < mean <= p95 <= max must hold"))
    if mean == p95:
        return (mean, mean, maximum), (1 - _TAIL, _TAIL)
    low, high = 0.0, 1.645  # beyond 1.645 a larger sigma lowers p95 / mean again
    for _ in range(60):
        sigma = (low + high) / 2
        reached = _mean(*_log_normal(p95, maximum, sigma))
        low, high = (sigma, high) if reached > mean else (low, sigma)
    edges, shares = _log_normal(p95, maximum, (low + high) / 2)
    if abs(_mean(edges, shares) - mean) > 0.01 * mean:
        raise ConfigError(
            explain(
                what,
                values=values,
                rule=f"a log-normal with this p95 and max has a mean of at least {_mean(edges, shares):.0f}",
                remedy="give the observed lengths or a histogram",
            )
        )
    return tuple(edges.tolist()), tuple(shares.tolist())


def _mean(edges: Floats, shares: Floats) -> float:
    return float(((edges[1:] + edges[:-1]) / 2) @ shares)


def _log_normal(p95: float, maximum: float, sigma: float) -> tuple[Floats, Floats]:
    """The log-normal with this 95 % quantile, cut at `maximum`; its last 0.1 % stretches up to `maximum`."""
    steps = np.union1d(np.linspace(0, 1 - _TAIL, _NUM_BINS - 4 + 1), [0.95])
    z = np.array([_BODY.inv_cdf(max(float(share), 1e-4)) for share in steps]) - _BODY.inv_cdf(0.95)
    body = np.minimum(maximum, p95 * np.exp(sigma * z))
    tail = np.geomspace(body[-1], maximum, 5)[1:]
    # Rounding may lower an edge by an ulp.
    edges = np.minimum(np.maximum.accumulate(np.concatenate((body, tail))), maximum)
    shares = np.concatenate((np.diff(steps), np.full(4, _TAIL / 4)))
    return edges, shares / shares.sum()
