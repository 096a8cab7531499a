"""Traces from files: GPU supply (Parcae, SkyPilot, plain CSV) and response lengths (CSV).

| file | read as |
|---|---|
| `ms,add\\|remove,node` a line | Parcae's instance events |
| `ms,count` a line | a number of instances from that moment on |
| `[ms, "add"\\|"remove"\\|"no-op", {"nodes": [...]}]` a line | Parcae's segments |
| `{"metadata": {"gap_seconds": g}, "data": [count, ...]}` | SkyPilot's: one number every g seconds |
| CSV with a header `at_s,nodes` | a number of nodes from that moment on |
| CSV with a header `step,mean[,p95,max]` | lengths; or `response_length/mean` and `/max`, as verl logs |
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from nereus.errors import DataError, explain
from nereus.planner.conditions import Lengths, SupplyEvent

# Shape of a reasoning model's lengths where a log gives the mean alone.
P95_OF_MEAN, MAX_OF_MEAN = 2.0, 4.0
_IDLE = ("no-op", "migration")  # nothing joins or leaves


def read_supply(path: Path, *, notice_s: float = 0.0) -> tuple[SupplyEvent, ...]:
    """Supply events from a file of any kind in the table; a departure is announced `notice_s` before.

    Where a file has counts only, the node that came last leaves first. Raises DataError for anything else.
    """
    text = _text(path)
    first = text.lstrip()[:1]
    try:
        if first == "{":
            return _sky_pilot(json.loads(text), notice_s)
        if first == "[":
            return _segments(text, notice_s)
        rows = [row for row in csv.reader(text.splitlines()) if row]
        if rows and not rows[0][0].strip().replace(".", "", 1).isdigit():
            return _headed(rows, notice_s)
        if rows and len(rows[0]) == 3:
            return _events(((float(at) / 1e3, verb, [node]) for at, verb, node in rows), notice_s)
        return _counts([(float(at) / 1e3, round(float(count))) for at, count in rows], notice_s)
    except (ValueError, KeyError, IndexError, TypeError, StopIteration) as error:
        raise DataError(
            explain(
                f"cannot read the supply trace {path}",
                values=repr(error),
                rule="it is one of Parcae's, SkyPilot's, or a CSV with the header at_s,nodes",
            )
        ) from error


def read_lengths(path: Path) -> tuple[Lengths, ...]:
    """Lengths by step from a CSV with a header. Raises DataError for one without a mean."""
    rows = list(csv.DictReader(_text(path).splitlines()))
    try:
        return tuple(_lengths({key.strip(): value for key, value in row.items()}) for row in rows)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            explain(
                f"cannot read the lengths {path}",
                values=repr(error),
                rule="a CSV with the columns mean, p95, max, or response_length/mean and response_length/max",
            )
        ) from error


def _lengths(row: dict[str, str]) -> Lengths:
    mean = float(row["mean"] if "mean" in row else row["response_length/mean"])
    longest = row.get("max") or row.get("response_length/max")
    maximum = MAX_OF_MEAN * mean if longest is None else max(float(longest), mean)
    p95 = float(row["p95"]) if row.get("p95") else min(P95_OF_MEAN * mean, maximum)
    return Lengths(mean=mean, p95=p95, maximum=maximum)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(explain(f"cannot read the trace {path}", values=str(error))) from error


def _segments(text: str, notice_s: float) -> tuple[SupplyEvent, ...]:
    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    return _events(((at / 1e3, verb, detail["nodes"]) for at, verb, detail in lines), notice_s)


def _sky_pilot(tree: dict[str, object], notice_s: float) -> tuple[SupplyEvent, ...]:
    metadata, data = tree["metadata"], tree["data"]
    if not isinstance(metadata, dict) or not isinstance(data, list):
        raise ValueError("metadata is no object, or data no list")
    gap = float(metadata["gap_seconds"])
    return _counts([(number * gap, round(float(count))) for number, count in enumerate(data)], notice_s)


def _headed(rows: Sequence[Sequence[str]], notice_s: float) -> tuple[SupplyEvent, ...]:
    names = [name.strip() for name in rows[0]]
    at, count = names.index("at_s"), names.index("nodes")
    return _counts([(float(row[at]), round(float(row[count]))) for row in rows[1:]], notice_s)


def _events(rows: Iterable[tuple[float, str, Sequence[str]]], notice_s: float) -> tuple[SupplyEvent, ...]:
    """Named nodes numbered in the order in which they appear."""
    numbers: dict[str, int] = {}
    events = []
    for at, verb, names in rows:
        if verb not in ("add", "remove", *_IDLE):
            raise ValueError(f"unknown event {verb!r}")
        for name in names if verb not in _IDLE else ():
            node = numbers.setdefault(name, len(numbers))
            joins = verb == "add"
            events.append(SupplyEvent(at_s=at, node=node, joins=joins, notice_s=0.0 if joins else notice_s))
    return tuple(events)


def _counts(rows: Sequence[tuple[float, int]], notice_s: float) -> tuple[SupplyEvent, ...]:
    events: list[SupplyEvent] = []
    for (_, before), (at, after) in pairwise([(0.0, 0), *rows]):
        events += [SupplyEvent(at_s=at, node=node, joins=True) for node in range(before, after)]
        events += [
            SupplyEvent(at_s=at, node=node, joins=False, notice_s=notice_s)
            for node in reversed(range(after, before))
        ]
    return tuple(events)
