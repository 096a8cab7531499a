"""The words of a replay read into a trace of GPUs, lengths and slow spells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nereus.planner.conditions import Lengths, SupplyEvent, Trace, trace_of
from nereus.planner.synthetic import growing_lengths, growing_supply, slow_spells, spot_supply, steady_supply
from nereus.planner.traces import read_lengths, read_supply
from nereus.planner.words import tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWords:
    """What the command line says of a trace, unread. `supply` is a generator's name or a file."""

    supply: str
    mean_len: str
    limit: str | None
    steps: int
    step_s: float
    notice_s: float
    slow_spells: bool
    seed: int


def read_trace(words: TraceWords, *, most_nodes: int) -> Trace:
    """The trace over at most so many nodes. Raises ConfigError or DataError for what cannot be read."""
    longest = None if words.limit is None else float(tokens("--limit", words.limit))
    lengths = _lengths(words, longest)
    return trace_of(
        Path(words.supply).name,
        _supply(words, most_nodes, len(lengths) * words.step_s),
        lengths,
        slow_spells(words.seed, len(lengths)) if words.slow_spells else (),
        step_s=words.step_s,
        most_nodes=most_nodes,
    )


def _supply(words: TraceWords, most: int, duration_s: float) -> tuple[SupplyEvent, ...]:
    if words.supply == "steady":
        return steady_supply(most)
    if words.supply == "spot":
        return spot_supply(
            words.seed,
            duration_s=duration_s,
            least=max(1, most // 2),
            most=most,
            notice_s=words.notice_s,
        )
    if words.supply == "grow":
        return growing_supply(max(1, most // 8), most, duration_s=duration_s, stages=6)
    return read_supply(Path(words.supply), notice_s=words.notice_s)


def _lengths(words: TraceWords, limit: float | None) -> tuple[Lengths, ...]:
    text = words.mean_len
    if ".." in text and not text.endswith(".csv"):
        start, end = (float(tokens("--mean-len", part)) for part in text.split("..", 1))
        return growing_lengths(words.seed, words.steps, start=start, end=end, limit=limit)
    return read_lengths(Path(text))[: words.steps]
