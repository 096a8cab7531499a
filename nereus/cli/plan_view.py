"""How `nereus plan` shows a plan: tables and bars for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nereus.planner.explain import Family, Verdict
from nereus.planner.occupancy import Occupancy, occupancy
from nereus.planner.plan import Assignment, Plan
from nereus.planner.request import Option, PlanRequest
from nereus.planner.sweep import Sweep
from nereus.planner.workload import ModelStage, Recompute, Stage

GB = 1e9
_BAR = 24


def plan_view(request: PlanRequest, plan: Plan, others: Sequence[Plan], rejected: Sequence[Family]) -> Group:
    """Everything about one plan."""
    parts: list[RenderableType] = [
        _heading(request, plan),
        _assignments(plan),
        _times(plan),
        _memory(plan),
        _bottleneck(plan),
    ]
    if others:
        parts.append(_others(plan, others))
    parts += [_why_not(rejected)] if rejected else []
    return Group(*parts, _proof(plan))


def comparison_view(columns: Sequence[tuple[str, Plan | str]], best: Plan) -> Table:
    """The best plan beside plans with fixed choices; a text stands for a plan that does not exist."""
    table = _table("", *(name for name, _ in columns), title="Comparison")

    def row(name: str, show: Callable[[Plan], str], otherwise: Callable[[str], str] = lambda _: "—") -> None:
        cells = (show(plan) if isinstance(plan, Plan) else otherwise(plan) for _, plan in columns)
        table.add_row(name, *cells)

    row("step", lambda plan: f"{plan.step_s:.4g} s (+{plan.step_s / best.step_s - 1:.1%})", str)
    for stage in Stage:
        row(str(stage), partial(_stage_time, stage=stage))
    row("publication", lambda plan: f"{plan.publish_s:.4g} s")
    for item in best.assignments:
        row(str(item.model_stage), partial(_choice, model_stage=item.model_stage))
    row("fullest GPU", lambda plan: f"{max(group.total_bytes for group in occupancy(plan)) / GB:.1f} GB")
    return table


def _stage_time(plan: Plan, stage: Stage) -> str:
    return f"{plan.stage_s[stage]:.4g} s"


def _choice(plan: Plan, model_stage: ModelStage) -> str:
    item = plan.of(model_stage)
    return f"{item.text} {_option(item.option)}"


def sweep_view(name: str, result: Sweep) -> Group:
    """One line a point: the best plan, and what the first point's plan would do there."""
    table = _table(
        name, "best step", "actor.generation", "actor.training", "first plan's step", title="Sweep"
    )
    first = result.segments[0] if result.segments else None
    for at, (value, plan) in enumerate(zip(result.values, result.plans, strict=True)):
        held = first.step_s[at] if first is not None else None
        old = "does not fit" if held is None else f"{held:.4g} s"
        if plan is None:
            table.add_row(f"{value:g}", Text("nothing fits", style="red"), "", "", "")
            continue
        generation, training = (
            next(item for item in plan.assignments if item.model_stage == stage)
            for stage in ("actor.generation", "actor.training")
        )
        starts = any(segment.first == at for segment in result.segments)
        table.add_row(
            f"{value:g}",
            f"{plan.step_s:.4g} s",
            f"{generation.text}{_where(plan, generation)}",
            f"{training.text}{_where(plan, training)}",
            old,
            style="bold" if starts else "",
        )
    return Group(table, Text(f"{len(result.segments)} plans; a bold line begins another", style="dim"))


def _where(plan: Plan, item: Assignment) -> str:
    """The GPU kind, where there are several."""
    return f" on {item.gpu_kind}" if len(plan.pools) > 1 else ""


def _heading(request: PlanRequest, plan: Plan) -> Text:
    work = request.workload
    text = Text(f"{plan.step_s:.4g} s a step", style="bold green")
    text.append(
        f"  {work.algorithm} · {work.schedule} · {plan.arrangement} · {request.cluster.name} · "
        f"{work.num_prompts} x {work.num_samples} responses of {work.response.mean:.0f} tokens "
        f"(max {work.response.maximum:.0f}) after {work.prompt_tokens}",
        style="default",
    )
    return text


def _assignments(plan: Plan) -> Table:
    more = [axis for axis in ("ep", "cp") if any(axis in item.more_axes for item in plan.assignments)]
    columns = ("tp", "pp", *more, "dp", "GPUs", "options", "time", "weights")
    table = _table("model-stage", *columns, title="Plan")
    for item in plan.assignments:
        inside = (item.more_axes.get(axis, 1) for axis in more)
        table.add_row(
            str(item.model_stage),
            *(str(size) for size in (item.tp, item.pp, *inside, item.dp)),
            f"{item.num_gpus} {item.gpu_kind}",
            _option(item.option),
            f"{item.cost.latency_s:.4g} s",
            "training's" if item.shares_weights else _publication(item),
        )
    return table


def _publication(item: Assignment) -> str:
    return f"publish {item.publish_s:.2g} s" if item.publish_s else "own"


def _times(plan: Plan) -> Table:
    table = _table("stage", "time", "share", title="Step")
    longest = max([*plan.stage_s.values(), plan.publish_s])
    rows = [(str(stage), seconds) for stage, seconds in plan.stage_s.items()]
    for name, seconds in [*rows, ("weight publication", plan.publish_s)]:
        bar = Text("█" * round(_BAR * seconds / longest), style="cyan")
        bar.append(f" {seconds / plan.step_s:.0%}")
        table.add_row(name, f"{seconds:.4g} s", bar)
    return table


def _memory(plan: Plan) -> Table:
    table = _table("ranks", "GPU", "kept", "peak on top", "of usable", "", title="Memory of one GPU")
    for group in occupancy(plan):
        kept = sum(group.resident_bytes.values())
        table.add_row(
            _ranks(group.ranks),
            group.gpu_kind,
            f"{kept / GB:.1f} GB",
            f"{group.peak_bytes / GB:.1f} GB {group.peak}",
            f"{group.total_bytes / GB:.1f} / {group.usable_bytes / GB:.1f} GB",
            _memory_bar(group),
        )
    return table


def _memory_bar(group: Occupancy) -> Text:
    kept = round(_BAR * sum(group.resident_bytes.values()) / group.usable_bytes)
    peak = round(_BAR * group.peak_bytes / group.usable_bytes)
    bar = Text("█" * kept, style="blue")
    bar.append("█" * peak, style="yellow")
    bar.append("·" * max(0, _BAR - kept - peak), style="dim")
    return bar


def _bottleneck(plan: Plan) -> Text:
    slowest, term = plan.bottleneck
    share = slowest.cost.terms[term] / slowest.cost.latency_s
    return Text.assemble(
        ("Bottleneck ", "bold"),
        f"{slowest.model_stage} takes {slowest.cost.latency_s:.4g} s, ",
        f"{share:.0%} of it {term.replace('_', ' ')}",
    )


def _others(best: Plan, others: Sequence[Plan]) -> Table:
    table = _table("step", "", "actor.generation", "actor.training", "arrangement", title="Runner-ups")
    for plan in others:
        shown = {item.model_stage: item for item in plan.assignments}
        cells = [
            f"{item.text} {_option(item.option)}"
            for name, item in shown.items()
            if name in ("actor.generation", "actor.training")
        ]
        table.add_row(
            f"{plan.step_s:.4g} s", f"+{plan.step_s / best.step_s - 1:.1%}", *cells, str(plan.arrangement)
        )
    return table


def _why_not(rejected: Sequence[Family]) -> Table:
    more = [axis for axis in ("ep", "cp") if any(_size(family, axis) > 1 for family in rejected)]
    table = _table("model-stage", "tp", "pp", *more, "verdict", "reason", title="Why not")
    colour = {Verdict.TOO_BIG: "red", Verdict.NO_ROOM: "yellow", Verdict.SLOWER: "default"}
    for family in rejected:
        table.add_row(
            str(family.model_stage),
            str(family.tp),
            str(family.pp),
            *(str(_size(family, axis)) for axis in more),
            Text(str(family.verdict), style=colour[family.verdict]),
            family.reason,
        )
    return table


def _size(family: Family, axis: str) -> int:
    return family.ep if axis == "ep" else family.cp


def _proof(plan: Plan) -> Text:
    proof = plan.proof
    gap = 1 - proof.root_bound_s / plan.step_s
    return Text(
        f"Optimal in the model: no choice among {proof.num_candidates:,} candidates has a shorter step. "
        f"Bound before the search {proof.root_bound_s:.4g} s (-{gap:.1%}); "
        f"search {proof.search_s * 1e3:.0f} ms.",
        style="dim",
    )


def _option(option: Option) -> str:
    words = []
    if option.micro_batch is not None:
        words.append(f"micro-batch {option.micro_batch}")
    if option.recompute not in (None, Recompute.NONE):
        words.append("recompute" if option.recompute is Recompute.FULL else f"recompute {option.recompute}")
    if option.max_resident is not None:
        words.append(f"{option.max_resident} at once")
    return ", ".join(words) or "all at once"


def _ranks(ranks: Sequence[int]) -> str:
    """Runs of ranks: "0-7, 12-15"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in runs)


def _table(*columns: str, title: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1), expand=False
    )
    for name in columns:
        right = name in ("tp", "pp", "ep", "cp", "dp", "GPUs", "time", "step", "best step", "of usable")
        table.add_column(name, justify="right" if right else "left", style=None, header_style="dim")
    return table
