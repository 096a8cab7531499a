"""The options of `nereus replay`, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_TRACE, _SHOW = "The trace", "What is shown"

TraceWord = Annotated[
    str,
    typer.Argument(
        help="GPU supply: a file (Parcae's CSV or segments, SkyPilot's JSON, a CSV with at_s,nodes), or a "
        "generator: steady, spot (nodes come and go), grow (from an eighth of the cluster to all of it).",
        show_default=False,
    ),
]
Policies = Annotated[
    str,
    typer.Option(
        "--policy",
        help="Policies to compare, divided by commas: payback, payback=GAMMA, any_gain, every_N, verl_gate, "
        "never, fixed (layouts of the start, dp follows the GPUs), frozen (micro-batch and recompute too), "
        "oracle (knows the trace).",
        rich_help_panel=_SHOW,
    ),
]
MeanLen = Annotated[
    str,
    typer.Option(
        "--mean-len",
        help="Mean response length: FROM..TO in tokens, or a CSV with mean[,p95,max] by step.",
        rich_help_panel=_TRACE,
    ),
]
LongestLen = Annotated[
    str | None,
    typer.Option(
        "--limit", help="Longest response allowed, e.g. 16k.", show_default=False, rich_help_panel=_TRACE
    ),
]
Steps = Annotated[int, typer.Option(min=2, help="Steps to replay.", rich_help_panel=_TRACE)]
StepSeconds = Annotated[
    float,
    typer.Option(
        "--step-s", min=0.1, help="Seconds of the trace that one step spans.", rich_help_panel=_TRACE
    ),
]
Notice = Annotated[
    float,
    typer.Option(
        "--notice-s", min=0, help="Seconds by which departures are announced.", rich_help_panel=_TRACE
    ),
]
SlowSpells = Annotated[
    bool,
    typer.Option(
        "--slow-spells", help="Spells of slow computing and of a slow network.", rich_help_panel=_TRACE
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Of generators and noise.", rich_help_panel=_TRACE)]
FixedSeconds = Annotated[
    float,
    typer.Option(
        "--transition-s",
        min=0,
        help="Seconds of a transition that no byte explains: votes, new groups, engines anew.",
        rich_help_panel=_TRACE,
    ),
]
RestartSeconds = Annotated[
    float,
    typer.Option(
        "--restart-s", min=0, help="Seconds of a restart from a checkpoint.", rich_help_panel=_TRACE
    ),
]
CsvFile = Annotated[
    Path | None,
    typer.Option("--csv", help="Every step of every policy.", show_default=False, rich_help_panel=_SHOW),
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", help="The timeline as a PNG.", show_default=False, rich_help_panel=_SHOW),
]
Decisions = Annotated[
    bool,
    typer.Option("--decisions", help="Every decision of the first policy, and why.", rich_help_panel=_SHOW),
]
