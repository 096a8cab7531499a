"""The controller: a plan in force, signals and history in; stay or move out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereus.config.adaptation import PaybackPolicy, Thresholds
from nereus.errors import Infeasible
from nereus.planner.adapt import Controller, first, forced_way, outlook_of, review, same_units
from nereus.planner.calibration import NEUTRAL
from nereus.planner.choose import best_plan
from nereus.planner.held import best, held, leaner, scaled, sizes_of, with_layouts
from nereus.planner.layouts import Space
from nereus.planner.lengths import LengthDistribution
from nereus.planner.policies.any_gain import AnyGain
from nereus.planner.policies.configured import policy_of
from nereus.planner.policies.never import Never
from nereus.planner.profile import ClusterProfile
from nereus.planner.seating import seat, shapes_of
from nereus.planner.signals import Gpu, Signals, Switch
from nereus.planner.transition_time import FixedCosts, lost_unchanged, state_bytes, transition_cost
from nereus.planner.triggers import Cause
from nereus.planner.workload import Algorithm, ModelStage, Stage
from tests.planner.plan_requests import request

JOB = request("2x8xH100", batch=512, algorithm=Algorithm.GRPO)
COSTS = FixedCosts(transition_s=1.0, restart_s=300.0)


def controller(**changes: object) -> Controller:
    """GRPO of an 8B, payback."""
    made = Controller(request=JOB, policy=policy_of(PaybackPolicy()), thresholds=Thresholds(), costs=COSTS)
    return replace(made, **changes)  # type: ignore[arg-type]


def pool(*nodes: int, drain_s: dict[int, float] | None = None) -> tuple[Gpu, ...]:
    """Nodes of eight GPUs."""
    return tuple(
        Gpu(id=8 * node + at, node=node, drain_s=(drain_s or {}).get(node))
        for node in nodes
        for at in range(8)
    )


def ids_of(gpus: tuple[Gpu, ...]) -> frozenset[int]:
    """Their ids."""
    return frozenset(gpu.id for gpu in gpus)


def signals(step: int, mean: float = 500.0, gpus: tuple[Gpu, ...] = pool(0, 1)) -> Signals:
    """A minute a step."""
    return Signals(
        step=step,
        now_s=60.0 * step,
        response=LengthDistribution.from_mean_p95_max(mean, 2 * mean, 4 * mean),
        pool=gpus,
    )


def test_without_drift_the_job_stays_and_the_plan_is_held() -> None:
    made = controller()
    seated, history = first(made, signals(0))
    outcome = review(made, seated, signals(1), history)
    assert not outcome.moves
    assert outcome.trigger is None
    assert outcome.decision is None
    assert same_units(seated, outcome.seated)
    assert outcome.seated.plan.step_s == pytest.approx(seated.plan.step_s)


def test_a_held_plan_keeps_ranks_and_costs_what_the_search_would_say() -> None:
    made = controller()
    seated, _ = first(made, signals(0))
    grown = scaled(JOB, 1.5)
    plan = held(seated, grown)
    assert plan is not None
    assert plan.step_s > seated.plan.step_s
    assert sizes_of(plan) == sizes_of(seated.plan)
    assert [item.ranks for item in plan.assignments] == [item.ranks for item in seated.plan.assignments]


@pytest.mark.parametrize("space", [Space.POW2, Space.GENERAL])
@pytest.mark.parametrize("nodes", [2, 3])
def test_candidates_priced_on_the_largest_cluster_give_the_same_plan(space: Space, nodes: int) -> None:
    asked = request(f"{nodes}x8xH100", batch=128, longest=1900, space=space)  # no whole wave of tokens
    alone, shared = best_plan(asked), best(asked, ClusterProfile.parse("5x8xH100"))
    assert alone is not None
    assert shared is not None
    # Of layouts that are equally fast, either may be taken. The largest pricing rounds lengths to six digits.
    assert shared.step_s == pytest.approx(alone.step_s, rel=1e-3)
    again = with_layouts(asked, sizes_of(shared))
    assert again is not None
    assert again.step_s == pytest.approx(alone.step_s, rel=1e-3)


def test_lost_gpus_force_a_move_even_under_never() -> None:
    made = controller(policy=Never())
    seated, history = first(made, signals(0))
    outcome = review(made, seated, signals(1, gpus=pool(1)), history)
    assert outcome.moves
    assert outcome.trigger is not None
    assert outcome.trigger.cause is Cause.LOST
    assert outcome.seated.in_use <= {gpu.id for gpu in pool(1)}
    assert outcome.decision is not None
    assert outcome.decision.change.old_step_s is None


@pytest.mark.parametrize("read_bytes_per_s", [1e7, 2e9, 1e15])
@pytest.mark.parametrize("lost", range(4))
def test_a_forced_move_takes_the_plan_that_costs_least_with_the_way_there(
    read_bytes_per_s: float, lost: int
) -> None:
    """Beside the plan with the shortest step, as who does not look ahead takes it."""
    job = request("4x8xH100", batch=512, algorithm=Algorithm.GRPO)
    costs = replace(COSTS, read_bytes_per_s=read_bytes_per_s)
    made = controller(request=job, costs=costs)
    seated, history = first(made, signals(0, gpus=pool(0, 1, 2, 3)))
    for step in (1, 2, 3, 4):  # the pool changes before every step, so no plan lasts
        history = history.with_crossing(Cause.POOL, step)
    left = signals(5, gpus=pool(*(node for node in range(4) if node != lost)))
    lost_now = history.with_loss(5).with_crossing(Cause.LOST, 5)
    way, outlook = forced_way(made, seated, left, lost_now), outlook_of(made, lost_now, 5)
    assert way is not None
    assert way.steps == (10 + 5) / (1 + 5)  # as if one plan of ten steps had gone before
    totals = []
    for policy in (made.policy, Never()):
        outcome = review(replace(made, policy=policy), seated, left, history)
        assert outcome.moves
        assert outcome.cost is not None
        risk_s = outlook.risk_s(outcome.seated.plan, outcome.seated.cluster)
        totals.append(outcome.seated.plan.step_s + risk_s + outcome.cost.seconds)
    assert totals[0] <= totals[1] + 1e-9


def test_where_all_copies_of_a_reference_are_lost_one_is_read_and_not_as_many_as_there_were() -> None:
    job = request("4x8xH100", batch=512, algorithm=Algorithm.PPO)
    made = controller(request=job)
    seated, history = first(made, signals(0, gpus=pool(0, 1, 2, 3)))
    lost = next(
        node
        for node in range(4)
        if lost_unchanged(seated, ids_of(pool(*({0, 1, 2, 3} - {node})))) == {ModelStage.REFERENCE_INFERENCE}
    )
    left = signals(5, gpus=pool(*sorted({0, 1, 2, 3} - {lost})))
    costs = {}
    for policy in (made.policy, Never()):
        outcome = review(replace(made, policy=policy), seated, left, history.with_crossing(Cause.POOL, 4))
        assert outcome.cost is not None
        items = outcome.seated.plan.assignments
        units = next(item.dp for item in items if item.model_stage is ModelStage.REFERENCE_INFERENCE)
        costs[policy.name] = (units, outcome.cost.reading_s)
    assert costs["payback"][0] == 1 < costs["never"][0]
    assert costs["payback"][1] == pytest.approx(costs["never"][1] / costs["never"][0])


def test_new_gpus_are_refused_by_never_and_taken_by_payback() -> None:
    for made, moves in ((controller(policy=Never()), False), (controller(), True)):
        seated, history = first(made, signals(0, gpus=pool(0)))
        outcome = review(made, seated, signals(1, gpus=pool(0, 1)), history)
        assert outcome.trigger is not None
        assert outcome.trigger.cause is Cause.POOL
        assert outcome.moves is moves
        assert outcome.history.crossings == {"pool": (1,)}


def test_a_draining_node_is_left_before_its_deadline_and_used_until_then() -> None:
    made = controller(policy=AnyGain())
    seated, history = first(made, signals(0))
    far = review(made, seated, signals(1, gpus=pool(0, 1, drain_s={1: 1e5})), history)
    assert not far.moves
    assert far.seated.in_use & {gpu.id for gpu in pool(1)}
    near = review(made, seated, signals(1, gpus=pool(0, 1, drain_s={1: 65.0})), history)
    assert near.moves
    assert not near.seated.in_use & {gpu.id for gpu in pool(1)}
    assert near.cost is not None
    assert near.cost.from_checkpoint is None


def test_lengths_that_would_not_fit_force_a_move_before_memory_runs_out() -> None:
    made = controller(policy=Never(), request=replace(JOB, fixed=request(fixed="recompute=none").fixed))
    seated, history = first(made, signals(0))
    mean, outcome = 500.0, None
    for step in range(1, 80):
        mean *= 1.05
        outcome = review(made, seated, signals(step, mean), history)
        if outcome.moves:
            break
        seated, history = outcome.seated, outcome.history
    assert outcome is not None
    assert outcome.trigger is not None
    assert outcome.trigger.cause is Cause.VIOLATION
    now = replace(made.request, workload=made.request.workload.with_response(signals(0, mean).response))
    assert held(seated, now) is not None  # the old plan still fits the lengths that were seen
    assert held(outcome.seated, scaled(now, 1 + made.thresholds.headroom)) is not None


def test_a_refused_change_waits_and_is_decided_again() -> None:
    made = controller(costs=replace(COSTS, transition_s=1e5), policy=policy_of(PaybackPolicy()))
    seated, history = first(made, signals(0, gpus=pool(0)))
    gpus = pool(0, 1)
    outcome = review(made, seated, signals(1, gpus=gpus), history)
    assert not outcome.moves
    assert outcome.history.waiting_for == "pool"
    again = review(made, outcome.seated, signals(2, gpus=gpus), outcome.history)
    assert again.decision is not None
    assert again.history.waited_s > outcome.history.waited_s > 0
    assert again.history.crossings == {"pool": (1,)}  # waiting is no crossing
    moved = again.history.with_transition(Switch(step=3, predicted_s=1.0, measured_s=1.0))
    assert moved.waiting_for is None


def test_nothing_that_fits_is_infeasible_and_says_what_is_short() -> None:
    made = controller(request=request("2x8xH100", "llama-3.1-70b"))
    with pytest.raises(Infeasible, match="no plan fits"):
        first(made, signals(0, gpus=pool(0)[:1]))
    with pytest.raises(Infeasible, match="pool"):
        first(made, signals(0, gpus=()))


def test_leaner_options_keep_fixed_layouts() -> None:
    asked = leaner(request(fixed="actor.training.tp=2,recompute=none,micro_batch=8"))
    assert [str(fix) for fix in asked.fixed] == ["actor.training.tp=2"]
    assert 1 in asked.options.train_micro_batches


def test_uneven_nodes_are_cut_into_equal_ones() -> None:
    gpus = (*pool(0), *pool(1)[:3])
    widths = {
        shape.cluster.pools[0].gpus_per_node: len(shape.nodes) for shape in shapes_of(gpus, JOB.cluster)
    }
    assert widths == {8: 1, 3: 3, 2: 5}
    for shape in shapes_of(gpus, JOB.cluster):
        ids = [gpu for node in shape.nodes for gpu in node]
        assert len(set(ids)) == len(ids)
        assert set(ids) <= {gpu.id for gpu in gpus}
        assert all(len({gpu // 8 for gpu in node}) == 1 for node in shape.nodes)


def test_seating_keeps_a_plan_where_it_is_when_nodes_are_listed_otherwise() -> None:
    made = controller()
    seated, _ = first(made, signals(0))
    sizes = state_bytes(JOB.workload.models, "bfloat16")
    shape = shapes_of(pool(0, 1), JOB.cluster)[0]
    turned = replace(shape, nodes=shape.nodes[::-1])
    assert same_units(seat(seated.plan, turned, seated, sizes), seated)


def test_a_transition_costs_nothing_to_itself_and_a_restart_without_a_source() -> None:
    made = controller()
    seated, _ = first(made, signals(0))
    models = JOB.workload.models
    still = transition_cost(seated, seated, pool(0, 1), models, "bfloat16", COSTS)
    assert still.seconds == 0
    assert still.num_operations == 0
    other, _ = first(made, signals(0, gpus=pool(2, 3)))
    gone = transition_cost(seated, other, pool(2, 3), models, "bfloat16", COSTS)
    assert gone.from_checkpoint is not None
    assert gone.seconds == 300.0
    moved = transition_cost(seated, other, pool(0, 1, 2, 3), models, "bfloat16", COSTS)
    assert moved.from_checkpoint is None
    assert moved.moving_s > 0
    assert moved.fixed_s == 1.0


def test_an_engine_that_is_dear_to_make_is_charged_where_a_unit_of_generation_is_made() -> None:
    made, models = controller(), JOB.workload.models
    seated, _ = first(made, signals(0))
    dear = replace(COSTS, generation_s=6.0)
    other, _ = first(made, signals(0, gpus=pool(2, 3)))
    gpus = pool(0, 1, 2, 3)
    assert transition_cost(seated, other, gpus, models, "bfloat16", dear).fixed_s == 7.0
    fewer = tuple(
        replace(item, dp=1, ranks=item.units[0]) if item.model_stage.stage is Stage.INFERENCE else item
        for item in seated.plan.assignments
    )
    shrunk = replace(seated, plan=replace(seated.plan, assignments=fewer))
    elsewhere = transition_cost(seated, shrunk, gpus, models, "bfloat16", dear)
    assert elsewhere.num_operations > 0
    assert elsewhere.fixed_s == 1.0


def test_a_slower_network_reaches_the_plan_through_the_calibration() -> None:
    made = controller()
    seated, history = first(made, signals(0))
    slow = replace(signals(1), calibration=replace(NEUTRAL, scale_out=20.0))
    outcome = review(made, seated, slow, history)
    assert outcome.seated.plan.step_s >= seated.plan.step_s
