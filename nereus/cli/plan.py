"""`nereus plan`: the best parallelism for a job, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nereus.cli.plan_options import (
    Algo,
    AsJson,
    AsYaml,
    Batch,
    CalibrationFile,
    Cluster,
    Compare,
    Critic,
    Epochs,
    Explain,
    FixedChoices,
    MiniBatches,
    Model,
    PlacementName,
    Plot,
    PromptLen,
    Reference,
    ResponseLen,
    Reward,
    RunnerUps,
    Samples,
    ScheduleName,
    Share,
    SpaceName,
    SweepRange,
    TurnsName,
)

if TYPE_CHECKING:  # loaded when a plan is made, so that --help is instant
    from nereus.planner.fixed import Fix
    from nereus.planner.plan import Plan
    from nereus.planner.request import PlanRequest
    from nereus.planner.sweep import Sweep


def plan(
    *,
    model: Model,
    cluster: Cluster,
    algo: Algo = "ppo",
    prompt_len: PromptLen = "1k",
    response_len: ResponseLen = "1k,2k,4k",
    batch: Batch = 512,
    samples: Samples = None,
    mini_batches: MiniBatches = 1,
    epochs: Epochs = 1,
    critic: Critic = None,
    reference: Reference = None,
    reward: Reward = None,
    calibration: CalibrationFile = None,
    schedule: ScheduleName = "sync",
    placement: PlacementName = "auto",
    turns: TurnsName = "never",
    space: SpaceName = "pow2",
    share: Share = None,
    fix: FixedChoices = None,
    compare: Compare = None,
    sweep: SweepRange = None,
    plot: Plot = None,
    runner_ups: RunnerUps = 3,
    explain: Explain = False,
    as_json: AsJson = False,
    as_yaml: AsYaml = False,
) -> None:
    """Find the fastest parallelism for a job, prove that none is faster, and show what it costs.

    Every model-stage (actor.generation, critic.training, ...) gets a tensor-parallel, a pipeline and a
    data-parallel size and its GPUs, so that a step is shortest and every GPU's memory suffices. The
    search is exact with respect to the cost model. No GPU and no network is needed.
    """
    from nereus.planner.words import PlanWords, fixes_of, read_request

    words = PlanWords(
        model=model,
        critic=critic,
        reference=reference,
        reward=reward,
        cluster=cluster,
        algo=algo,
        prompt_len=prompt_len,
        response_len=response_len,
        batch=batch,
        samples=samples,
        mini_batches=mini_batches,
        epochs=epochs,
        calibration=calibration,
        schedule=schedule,
        placement=placement,
        turns=turns,
        space=space,
        share=(*(share or ()), *(("critic",) if as_yaml else ())),
        fix=tuple(fix or ()),
    )
    request = read_request(words)
    if sweep is not None:
        _show_sweep(request, sweep, plot, f"{model} · {algo} · {cluster}", as_json=as_json)
        return
    if as_yaml:
        _print_campaign_plan(request)
        return
    columns = [(text, fixes_of(text)) for text in compare or ()]
    _show_plan(request, columns, num_others=runner_ups, explain=explain, as_json=as_json)


def _show_plan(
    request: PlanRequest,
    columns: Sequence[tuple[str, tuple[Fix, ...]]],
    *,
    num_others: int,
    explain: bool,
    as_json: bool,
) -> None:
    from nereus.planner.choose import Priced
    from nereus.planner.explain import families, runner_ups
    from nereus.planner.remedy import require_plan

    priced = Priced.of(request)
    best = require_plan(priced)
    others = runner_ups(priced, best, num_others)
    rejected = families(priced, best) if explain or as_json else ()
    compared = [(text, _compared(request, fixes)) for text, fixes in columns]
    if as_json:
        _print_json(
            {
                "plan": best.to_json(),
                "runner_ups": [other.to_json() for other in others],
                "families": [family.to_json() for family in rejected],
                "compare": {
                    text: found if isinstance(found, str) else found.to_json() for text, found in compared
                },
            }
        )
        return
    from rich.console import Console

    from nereus.cli.plan_view import comparison_view, plan_view

    console = Console()
    console.print(plan_view(request, best, others, rejected))
    if compared:
        console.print(comparison_view([("best", best), *compared], best))


def _compared(request: PlanRequest, fixes: tuple[Fix, ...]) -> Plan | str:
    """The best plan with these choices, or in a few words why there is none."""
    from dataclasses import replace

    from nereus.planner.choose import Priced, best_of
    from nereus.planner.remedy import shortage

    kept = tuple(fix for fix in request.fixed if all(fix.key != other.key for other in fixes))
    priced = Priced.of(replace(request, fixed=kept + fixes))
    return best_of(priced) or shortage(priced)


def _print_campaign_plan(request: PlanRequest) -> None:
    import yaml

    from nereus.planner.choose import Priced
    from nereus.planner.remedy import require_plan

    best = require_plan(Priced.of(request))
    text = yaml.safe_dump({"plan": best.to_campaign()}, sort_keys=False, default_flow_style=None, width=1000)
    typer.echo(
        f"# {best.step_s:.4g} s a step on {request.cluster.name}, {best.arrangement}\n{text}", nl=False
    )


def _show_sweep(request: PlanRequest, text: str, plot: Path | None, title: str, *, as_json: bool) -> None:
    from nereus.planner.sweep import CHANGES, sweep
    from nereus.planner.words import plot_path, sweep_values

    name, values = sweep_values(text, tuple(CHANGES))
    path = plot_path(plot, name)
    result = sweep(request, values, CHANGES[name])
    if as_json:
        _print_json(_sweep_json(name, result))
    else:
        from rich.console import Console

        from nereus.cli.plan_view import sweep_view

        Console().print(sweep_view(name, result))
    if not result.segments:
        return
    from nereus.cli.plan_plot import draw_sweep

    draw_sweep(name, result, path, title)
    typer.echo(f"wrote {path}", err=as_json)


def _sweep_json(name: str, result: Sweep) -> dict[str, Any]:
    return {
        "sweep": name,
        "points": [
            {"value": value, "plan": None if plan is None else plan.to_json()}
            for value, plan in zip(result.values, result.plans, strict=True)
        ],
        "segments": [
            {
                "from": result.values[segment.first],
                "to": result.values[segment.last],
                "layouts": [
                    {
                        "model_stage": str(item.model_stage),
                        "tp": item.tp,
                        "pp": item.pp,
                        "dp": item.dp,
                        "ep": item.ep,
                        "cp": item.cp,
                    }
                    for item in segment.plan.assignments
                ],
                "step_s_if_held": segment.step_s,
            }
            for segment in result.segments
        ],
    }


def _print_json(tree: dict[str, Any]) -> None:
    typer.echo(json.dumps(tree, indent=1))
