"""`nereus explain`: a transition of a campaign before it is made, or those that a run has made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nereus.cli.arguments import CampaignFile, Overrides
from nereus.config.load import load_campaign
from nereus.record.transitions import read_transitions, told

if TYPE_CHECKING:  # loaded when a transition is explained, so that --help is instant
    from nereus.emu.stage import StageSpec
    from nereus.tasks.planned_transition import Transition

MemoryGb = Annotated[
    float | None,
    typer.Option("--memory-gb", help="Memory for model state on each GPU; without it, there is enough."),
]
GpusPerNode = Annotated[int, typer.Option("--gpus-per-node", help="GPUs that share a node.", min=1)]
SvgPath = Annotated[Path | None, typer.Option("--svg", help="Draw the graph of operations into this file.")]


def explain(
    file: CampaignFile,
    overrides: Overrides = None,
    memory_gb: MemoryGb = None,
    gpus_per_node: GpusPerNode = 8,
    svg: SvgPath = None,
) -> None:
    """Show how a campaign would move from its file's plan to the plan with KEY=VALUE laid over it.

    Lists the operations of every model-stage in the order in which they would run, what each waits for, where
    GPU memory is short, and what would pass through host memory. Nothing is started and nothing moves.
    With a run folder instead of a file, lists the transitions that the run has made.
    """
    if file.is_dir():
        typer.echo("\n".join(map(told, read_transitions(file))) or "this run has made no transition")
        return
    from nereus.emu.transition_svg import svg as draw
    from nereus.emu.transition_text import explain as explain_schedule
    from nereus.tasks.stages import read_models, stages_under  # loads torch

    config = load_campaign(file, overrides or ())
    models = read_models(config)
    now = stages_under(config, load_campaign(file).plan, models)
    then = stages_under(config, config.plan, models)
    transition = _transition(now, then, memory_gb, gpus_per_node)
    typer.echo(explain_schedule(transition.schedule))
    if svg is not None:
        svg.write_text(draw(transition.graph))
        typer.echo(f"wrote {svg}", err=True)


def _transition(
    now: Mapping[str, StageSpec],
    then: Mapping[str, StageSpec],
    memory_gb: float | None,
    gpus_per_node: int,
) -> Transition:
    from nereus.emu.schedule_problem import Room
    from nereus.emu.topology import Topology
    from nereus.tasks.transition_plan import AMPLE, plan_transition

    num_ranks = 1 + max(rank for spec in (*now.values(), *then.values()) for rank in spec.ranks)
    topology = Topology.uniform(num_ranks, gpus_per_node)
    room = AMPLE if memory_gb is None else Room(cap_bytes=int(memory_gb * 1e9))
    return plan_transition(now, then, topology=topology, room=room)
