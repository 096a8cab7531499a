"""A plan that was given, on the workers that are left: what runs at once is made smaller until it fits.

The planner prices the layouts as they are: with the options as configured, else with smaller micro-batches,
else with recomputation. That is what a job that adapts does where nothing fits (`planner.held.leaner`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nereus.emu.layout import Layout
from nereus.emu.stage import StageSpec
from nereus.errors import ConfigError
from nereus.planner.held import Sizes, leaner, with_layouts
from nereus.planner.request import PlanRequest, Turns
from nereus.planner.seating import Seated
from nereus.planner.workload import ModelStage, Schedule
from nereus.tasks.adapt import request_of, with_options
from nereus.tasks.job import Job
from nereus.tasks.stages import CRITIC, GENERATION


def fitted(job: Job, stages: Mapping[str, StageSpec]) -> Mapping[str, StageSpec]:
    """The stages with options with which they fit; as they are where those fit, or where nothing does.

    Lengths up to `sampling.max_new_tokens` are counted on. A device that the planner does not know, and a
    layout that it would not make, such as tp over several nodes, are not judged.
    """
    try:
        request = request_of(job.config, job.prepared.models, job.prepared.prompts.longest)
        lean = less_at_once(request, stages)
    except ConfigError:
        return stages
    if lean is None:
        job.listener.on_message(
            f"step {job.state.step}: by the cost model these layouts do not fit, whatever runs at once"
        )
        return stages
    if lean is not stages:
        told = ", ".join(f"{name} {spec.text}" for name, spec in lean.items())
        job.listener.on_message(f"step {job.state.step}: fits with less at once: {told}")
    return lean


def less_at_once(request: PlanRequest, stages: Mapping[str, StageSpec]) -> Mapping[str, StageSpec] | None:
    """The stages as they are where they fit, else with the options that `leaner` allows; None where nothing
    fits. Pure.
    """
    request = replace(request, turns=Turns.AUTO)  # a given plan may put two models of a stage on one GPU
    own = set(stages[GENERATION].ranks)
    if any(own & set(spec.ranks) for name, spec in stages.items() if name != GENERATION):
        # The last survivor takes turns, and a given plan may score on the GPUs of generation.
        workload = replace(request.workload, schedule=Schedule.SYNC)
        request = replace(request, workload=workload)
    sizes = layouts_of(stages)
    if with_layouts(request, sizes) is not None:
        return stages
    plan = with_layouts(leaner(request), sizes)
    return None if plan is None else with_options(stages, Seated(plan=plan, cluster=request.cluster, gpus=()))


def layouts_of(stages: Mapping[str, StageSpec]) -> Sizes:
    """(tp, pp, dp, ep, cp) as the planner asks for them; the critic scores under the layout that it trains
    with.
    """
    sizes = {ModelStage(name): _sizes(spec.units) for name, spec in stages.items()}
    if CRITIC in stages:
        sizes[ModelStage.CRITIC_INFERENCE] = sizes[ModelStage.CRITIC_TRAINING]
    return tuple((name, *numbers) for name, numbers in sizes.items())


def _sizes(units: Sequence[Layout]) -> tuple[int, int, int, int, int]:
    first = units[0]
    return first.tp, first.pp, len(units), first.ep, first.cp
