"""Runner-ups are the next best, verdicts are true, remedies really help, held layouts are held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereus.errors import Infeasible
from nereus.planner.choose import Priced, best_of, best_plan
from nereus.planner.explain import Verdict, families, runner_ups
from nereus.planner.fixed import parse_fixes
from nereus.planner.occupancy import occupancy
from nereus.planner.plan import Plan
from nereus.planner.remedy import remedies, require_plan
from nereus.planner.request import PlanRequest
from nereus.planner.sweep import layouts_of, sweep, with_response_length
from nereus.planner.workload import Algorithm, ModelStage
from tests.planner.plan_requests import request

ACTOR = (ModelStage.ACTOR_GENERATION, ModelStage.ACTOR_TRAINING)


def solved(asked: PlanRequest) -> tuple[Priced, Plan]:
    priced = Priced.of(asked)
    plan = best_of(priced)
    assert plan is not None
    return priced, plan


def with_cuts(asked: PlanRequest, cuts: dict[ModelStage, tuple[int, int]]) -> PlanRequest:
    text = ",".join(f"{stage}.tp={tp},{stage}.pp={pp}" for stage, (tp, pp) in cuts.items())
    return replace(asked, fixed=parse_fixes(text))


def test_runner_ups_are_the_best_of_all_other_cuts_of_the_actor() -> None:
    priced, best = solved(request("1x8xH100", "qwen3-1.7b", algorithm=Algorithm.GRPO))
    steps: dict[object, float] = {}
    generation, training = (priced.set_of(stage) for stage in ACTOR)
    for tp, pp, _, _ in generation.cuts:
        half = priced.keep(ACTOR[0], (generation.tp == tp) & (generation.pp == pp))
        for tp_2, pp_2, _, _ in training.cuts:
            plan = best_of(half.keep(ACTOR[1], (training.tp == tp_2) & (training.pp == pp_2)))
            if plan is not None:
                steps[plan.signature] = plan.step_s
    order = sorted(steps.values())
    found = runner_ups(priced, best, 5)
    assert [best.step_s, *(plan.step_s for plan in found)] == pytest.approx(order[:6])
    assert len({plan.signature for plan in (best, *found)}) == 6


def test_every_family_has_a_verdict_that_a_fixed_choice_confirms() -> None:
    asked = request("2x8xH100")
    priced, best = solved(asked)
    found = families(priced, best)
    assert {family.verdict for family in found} >= {Verdict.TOO_BIG, Verdict.SLOWER}
    chosen = {(stage, (best.of(stage).tp, best.of(stage).pp, 1, 1)) for stage in ACTOR}
    listed = {(item.model_stage, (item.tp, item.pp, item.ep, item.cp)) for item in found}
    assert listed | chosen == {(stage, cut) for stage in ACTOR for cut in priced.set_of(stage).cuts}
    for family in found[::3]:
        plan = best_plan(with_cuts(asked, {family.model_stage: (family.tp, family.pp)}))
        if family.verdict in (Verdict.TOO_BIG, Verdict.NO_ROOM):
            assert plan is None
        else:
            assert plan is not None
            assert family.step_s is not None
            if family.proven_best:
                assert plan.step_s == pytest.approx(family.step_s)
            else:
                assert plan.step_s >= family.step_s * (1 - 1e-9)


def test_too_big_names_the_term_that_breaks_the_limit() -> None:
    priced, best = solved(request("2x8xH100"))
    whole = next(f for f in families(priced, best) if f.model_stage is ACTOR[1] and (f.tp, f.pp) == (1, 1))
    assert whole.verdict is Verdict.TOO_BIG
    assert "moments" in whole.reason
    assert "GB" in whole.reason


@pytest.mark.parametrize(
    ("cluster", "fixed", "short", "remedy"),
    [
        (
            "1x8xH100",
            "actor.training.tp=1,actor.training.pp=1",
            "actor.training needs",
            "leaving actor.training",
        ),
        ("2x8xH100", "actor.training.recompute=none,micro_batch=256", "activations", "smaller micro-batch"),
        ("1x2xH100", "", "actor.training needs .* GB a GPU", "GPUs"),
        ("1x8xL40S", "", "together they need about .* GB a GPU", "16 GPUs"),
    ],
)
def test_infeasible_says_what_is_short_and_what_helps(
    cluster: str, fixed: str, short: str, remedy: str
) -> None:
    with pytest.raises(Infeasible, match=f"(?s){short}.*Remedy: .*{remedy}"):
        require_plan(Priced.of(request(cluster, fixed=fixed)))


def test_remedies_were_planned_with_and_grow_the_cluster_least() -> None:
    asked = request("1x8xL40S")
    assert best_plan(asked) is None
    found = remedies(asked)
    assert found
    for item in found:
        again = best_plan(item.request)
        assert again is not None
        assert again.step_s == item.plan.step_s
    grown = found[-1].request.cluster.pools[0].num_nodes
    assert grown > 1
    fewer = replace(
        found[-1].request,
        cluster=replace(
            found[-1].request.cluster,
            pools=(replace(found[-1].request.cluster.pools[0], num_nodes=grown - 1),),
        ),
    )
    assert best_plan(fewer) is None


def test_memory_of_each_gpu_is_within_what_the_search_allowed() -> None:
    for cluster in ("2x8xH100", "1x8xH100+1x8xA100-80"):
        plan = best_plan(request(cluster))
        assert plan is not None
        bound = {pool.gpu_kind: pool.used_bytes for pool in plan.pools}
        groups = occupancy(plan)
        assert {rank for group in groups for rank in group.ranks} == {
            rank for item in plan.assignments for rank in item.ranks
        }
        for group in groups:
            # Rounding down of each part.
            assert group.total_bytes <= bound[group.gpu_kind] + 16
            assert group.total_bytes <= group.usable_bytes


def test_best_plan_at_2k_stops_fitting_at_4k_and_another_takes_over() -> None:
    """The drift that makes a frozen plan fail: PPO of an 8B on 16 H100 that keep their activations."""
    asked = request("2x8xH100", batch=512, longest=2048, fixed="recompute=none")
    result = sweep(asked, (2048, 4096), with_response_length)
    early, late = result.segments
    assert early.step_s[1] is None
    assert late.step_s[1] is not None
    assert layouts_of(early.plan) != layouts_of(late.plan)


def test_sweep_marks_each_points_best_plan() -> None:
    result = sweep(request("2x8xH100"), (512, 1024, 2048, 4096), with_response_length)
    assert result.segments[0].first == 0
    for at, plan in enumerate(result.plans):
        assert plan is not None
        mine = [segment for segment in result.segments if segment.first <= at <= segment.last]
        assert [layouts_of(segment.plan) for segment in mine] == [layouts_of(plan)]
        assert mine[0].step_s[at] == pytest.approx(plan.step_s)
        assert all(
            segment.step_s[at] is None or segment.step_s[at] >= plan.step_s * (1 - 1e-9)
            for segment in result.segments
        )
