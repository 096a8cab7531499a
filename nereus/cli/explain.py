"""`nereus explain`: the transition from a campaign's plan to another one, before it is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nereus.cli.arguments import CampaignFile, Overrides
from nereus.config.load import load_campaign

if TYPE_CHECKING:  # loaded when a transition is explained, so that --help is instant
    from nereus.emu.stage import StageSpec
    from nereus.emu.unit import ClusterState, Unit

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
    """
    from nereus.tasks.stages import read_models, stages_under  # loads torch

    config = load_campaign(file, overrides or ())
    models = read_models(config)
    now = tuple(stages_under(config, load_campaign(file).plan, models).values())
    then = tuple(stages_under(config, config.plan, models).values())
    typer.echo(_explained(now, then, config.cluster.gpus, memory_gb, gpus_per_node, svg))
    if svg is not None:
        typer.echo(f"wrote {svg}", err=True)


def _explained(
    now: tuple[StageSpec, ...],
    then: tuple[StageSpec, ...],
    num_gpus: int,
    memory_gb: float | None,
    gpus_per_node: int,
    svg: Path | None,
) -> str:
    from nereus.emu.chain_time import planned
    from nereus.emu.graph import build_graph
    from nereus.emu.schedule import schedule
    from nereus.emu.schedule_problem import Room
    from nereus.emu.shard_bytes import sizes_of
    from nereus.emu.target import place_target
    from nereus.emu.topology import Topology
    from nereus.emu.transition_svg import svg as draw
    from nereus.emu.transition_text import explain as explain_schedule

    ranks = {rank for spec in (*now, *then) for rank in spec.ranks} | set(range(num_gpus))
    topology = Topology.uniform(max(ranks) + 1, gpus_per_node)
    models = {spec.name.partition(".")[0]: spec.tensors for spec in then}
    before, after = _state(now, ranks), _state(then, ranks)
    graph = build_graph(before, place_target(before, after, models, topology), topology)
    cap_bytes = 1 << 60 if memory_gb is None else int(memory_gb * 1e9)
    room = Room(cap_bytes=cap_bytes)
    found = schedule(graph, sizes_of(models), room, topology, planned(models, topology))
    if svg is not None:
        svg.write_text(draw(found.graph))
    return explain_schedule(found)


def _state(stages: tuple[StageSpec, ...], ranks: set[int]) -> ClusterState:
    """The units of a plan that have weights of their own; generation that shares training's has none."""
    from nereus.emu.kinds import serving_kinds, training_kinds
    from nereus.emu.unit import ClusterState

    units: list[Unit] = []
    for spec in stages:
        if spec.shares is not None:
            continue
        kinds = (training_kinds if spec.role == "training" else serving_kinds)(spec.model.dtype)
        model = spec.name.partition(".")[0]
        units += spec.elastic_units(kinds, model=model)
    return ClusterState.of(units, ranks)
