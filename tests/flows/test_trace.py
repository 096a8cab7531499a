"""A campaign with `profile`: one picture of driver and workers, in which what happens inside lies inside."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from nereus.config import CampaignConfig
from nereus.flows.campaign import campaign

STAGE_OF = {"generate actor.generation": "generate", "train_step actor.training": "learn actor.training"}


def test_workers_calls_lie_inside_the_drivers_stages_and_spans_nest(
    server: None, ray_pool: None, make_config: Callable[..., CampaignConfig]
) -> None:
    config = make_config(steps=2, profile=True)
    campaign(config)
    events = json.loads((config.run_folder / "trace.json").read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names[0] == "driver"
    assert len(names) == 3
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {"step", "stage", "unit", "collective"}
    stages = defaultdict(list)
    for event in spans:
        if event["cat"] == "stage":
            stages[event["name"]].append(event)
    for event in spans:
        if event["name"] in STAGE_OF:
            # Clocks are compared by pings: either is off by half of the shortest way there and back.
            (off_us,) = re.findall(r"± (\d+) us", names[event["pid"]])
            inside = [_holds(stage, event, float(off_us) + 1) for stage in stages[STAGE_OF[event["name"]]]]
            assert sum(inside) == 1, event
    assert sum(event["name"] == "train_step actor.training" for event in spans) == 4  # two ranks, two steps
    rows = defaultdict(list)
    for event in spans:
        rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        _assert_nest(row)
    collectives = [event for event in spans if event["cat"] == "collective"]
    calls = [event for event in spans if event["name"].startswith("train_step")]
    assert any(_holds(call, one, 0.01) for one in collectives for call in calls if call["pid"] == one["pid"])


def _holds(outer: dict[str, Any], inner: dict[str, Any], tolerance_us: float) -> bool:
    starts = outer["ts"] - tolerance_us <= inner["ts"]
    return bool(starts and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + tolerance_us)


def _assert_nest(row: list[dict[str, Any]]) -> None:
    """Two spans of a row are apart, or one holds the other; times are rounded to a nanosecond."""
    open_until: list[float] = []
    for event in sorted(row, key=lambda event: (event["ts"], -event["dur"])):
        while open_until and open_until[-1] <= event["ts"] + 0.002:
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1] + 0.002, event
        open_until.append(end)
