"""Plans for generation that runs ahead of training: apart from it, and moved at what that costs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from nereus.config.adaptation import Thresholds
from nereus.errors import Infeasible
from nereus.planner.adapt import Controller, first, on_survivors, review
from nereus.planner.lengths import LengthDistribution
from nereus.planner.plan import Plan
from nereus.planner.policies.any_gain import AnyGain
from nereus.planner.seating import Seated
from nereus.planner.signals import Gpu, Signals, Switch
from nereus.planner.standstill import Way, standstill
from nereus.planner.transition_time import FixedCosts, TransitionCost
from nereus.planner.workload import Algorithm, ModelShapes, ModelStage, Schedule, Stage
from tests.planner.plan_requests import request

COSTS = FixedCosts(transition_s=1.0, restart_s=300.0)
JOB = request("2x8xH100", "qwen3-0.6b", batch=64, algorithm=Algorithm.GRPO, schedule=Schedule.ONE_STEP_OFF)
GENERATION = ModelStage.ACTOR_GENERATION


def controller(**changes: object) -> Controller:
    """GRPO of a 0.6B that is one step off, any gain."""
    made = Controller(request=JOB, policy=AnyGain(), thresholds=Thresholds(steps=1), costs=COSTS)
    return replace(made, **changes)  # type: ignore[arg-type]


def signals(step: int, gpus: tuple[Gpu, ...], mean: float = 500.0) -> Signals:
    return Signals(
        step=step,
        now_s=60.0 * step,
        response=LengthDistribution.from_mean_p95_max(mean, 2 * mean, 4 * mean),
        pool=gpus,
    )


def pool(*sizes: int) -> tuple[Gpu, ...]:
    """Nodes with so many GPUs each, at most eight."""
    return tuple(Gpu(id=8 * node + at, node=node) for node, size in enumerate(sizes) for at in range(size))


def apart(seated: Seated) -> bool:
    """Whether generation has its GPUs for itself."""
    own = {gpu for unit in seated.units(seated.plan.of(GENERATION)) for gpu in unit}
    others = (item for item in seated.plan.assignments if item.model_stage is not GENERATION)
    return all(own.isdisjoint(gpu for unit in seated.units(item) for gpu in unit) for item in others)


@pytest.mark.parametrize(
    ("algorithm", "schedule"), [(Algorithm.GRPO, Schedule.ASYNC), (Algorithm.PPO, Schedule.ONE_STEP_OFF)]
)
def test_i17_every_plan_of_a_job_that_runs_ahead_keeps_generation_apart(
    algorithm: Algorithm, schedule: Schedule
) -> None:
    rng = random.Random(f"{algorithm} {schedule}")
    asked = request("2x8xH100", "qwen3-0.6b", batch=64, algorithm=algorithm, schedule=schedule)
    made = controller(request=asked)
    num_models = len({item.model for item in asked.workload.model_stages})
    sizes = [rng.randint(num_models, 8) for _ in range(2)]
    seated, history = first(made, signals(0, pool(*sizes)))
    assert apart(seated)
    for step in range(1, 4):
        sizes = [rng.randint(num_models, 8) for _ in range(rng.randint(1, 2))]
        now = signals(step, pool(*sizes), mean=rng.uniform(100, 1500))
        outcome = review(made, seated, now, history)
        seated, history = outcome.seated, outcome.history
        assert apart(seated)
        assert seated.in_use <= now.ids
    survivors, _ = on_survivors(made, seated, replace(now, pool=now.pool[:num_models]), history)
    assert apart(survivors)


def test_one_gpu_is_too_few_to_run_ahead_and_the_error_says_so() -> None:
    actor_alone = ModelShapes(actor=JOB.workload.models.actor)
    made = controller(request=replace(JOB, workload=replace(JOB.workload, models=actor_alone)))
    with pytest.raises(Infeasible, match="on 1 GPUs of its own at least, and training needs 1"):
        first(made, signals(0, pool(1)))


def test_a_plan_that_runs_ahead_is_as_long_as_its_longer_side() -> None:
    seated, _ = first(controller(), signals(0, pool(8)))
    plan = seated.plan
    consumer_s = plan.stage_s[Stage.INFERENCE] + plan.stage_s[Stage.TRAINING]
    assert plan.step_s == pytest.approx(max(plan.stage_s[Stage.GENERATION], consumer_s) + plan.publish_s)
    assert plan.step_s < plan.stage_s[Stage.GENERATION] + consumer_s


def test_the_gain_of_a_change_is_that_of_overlapped_steps() -> None:
    made = controller()
    seated, history = first(made, signals(0, pool(4)))
    outcome = review(made, seated, signals(1, pool(8)), history)
    assert outcome.decision is not None
    change = outcome.decision.change
    assert change.old_step_s == pytest.approx(seated.plan.step_s)
    assert change.new_step_s == pytest.approx(outcome.seated.plan.step_s)
    assert outcome.decision.numbers["gain_s"] == pytest.approx(
        seated.plan.step_s - outcome.seated.plan.step_s
    )


def cost(*, moving_s: float, fixed_s: float = 1.0) -> TransitionCost:
    return TransitionCost(moving_s=moving_s, fixed_s=fixed_s, num_operations=3)


def plan_of(generation_s: float, training_s: float, schedule: Schedule) -> Plan:
    plan = first(controller(), signals(0, pool(4)))[0].plan
    stage_s = {Stage.GENERATION: generation_s, Stage.INFERENCE: 0.0, Stage.TRAINING: training_s}
    return replace(plan, stage_s=stage_s, schedule=schedule)


def test_stages_that_take_turns_stand_still_for_all_of_a_move() -> None:
    turns = plan_of(60.0, 30.0, Schedule.SYNC)
    for moves in (False, True):
        still = standstill(cost(moving_s=5.0), turns, moves_generation=moves, in_segments=False)
        assert (still.seconds, still.way) == (6.0, Way.AT_ONCE)


def test_generation_that_moves_rests_for_all_of_it() -> None:
    ahead = plan_of(60.0, 30.0, Schedule.ONE_STEP_OFF)
    still = standstill(cost(moving_s=5.0), ahead, moves_generation=True, in_segments=False)
    assert (still.seconds, still.way) == (6.0, Way.AT_SYNC)
    near = standstill(cost(moving_s=5.0), ahead, moves_generation=True, in_segments=True)
    assert (near.seconds, near.way) == (6.0, Way.AT_ONCE)


@pytest.mark.parametrize(
    ("generation_s", "training_s", "expected_s"),
    [(60.0, 40.0, 1.0), (44.0, 40.0, 2.0), (40.0, 60.0, 6.0)],  # 20 s, 4 s, none in which training waits
)
def test_with_segments_a_move_of_training_hides_where_training_would_wait_for_rows(
    generation_s: float, training_s: float, expected_s: float
) -> None:
    ahead = plan_of(generation_s, training_s, Schedule.ASYNC)
    still = standstill(cost(moving_s=5.0), ahead, moves_generation=False, in_segments=True)
    assert (still.seconds, still.way) == (expected_s, Way.BESIDE)


@pytest.mark.parametrize(("generation_s", "training_s"), [(60.0, 40.0), (40.0, 60.0), (50.0, 50.0)])
@pytest.mark.parametrize("moving_s", [5.0, 100.0])
def test_without_segments_a_move_of_training_takes_the_cheaper_way(
    generation_s: float, training_s: float, moving_s: float
) -> None:
    """Beside a batch the next step has nothing beside it; at rest all stand still. By simulation."""
    ahead = plan_of(generation_s, training_s, Schedule.ONE_STEP_OFF)
    still = standstill(cost(moving_s=moving_s), ahead, moves_generation=False, in_segments=False)
    step_s = max(generation_s, training_s)
    at_rest_s = moving_s + 1.0 + step_s
    beside_s = max(moving_s, generation_s) + 1.0 + training_s
    assert still.seconds == pytest.approx(min(at_rest_s, beside_s) - step_s)
    assert still.way is (Way.AT_SYNC if at_rest_s <= beside_s else Way.BESIDE)


def test_a_move_of_the_trainer_alone_is_judged_by_what_stands_still() -> None:
    """Of the whole price, corrected by the transitions that were measured, what is hidden is taken off."""
    made = controller(in_segments=True)
    seated, history = first(made, signals(0, pool(4)))
    history = history.with_transition(Switch(step=1, predicted_s=1.0, measured_s=2.0))
    outcome = review(made, seated, signals(2, pool(4, 4)), history)
    assert outcome.moves
    assert outcome.decision is not None
    assert outcome.cost is not None
    change, numbers = outcome.decision.change, outcome.decision.numbers
    moves = seated.units(seated.plan.of(GENERATION)) != outcome.seated.units(
        outcome.seated.plan.of(GENERATION)
    )
    still = standstill(outcome.cost.times(2.0), seated.plan, moves_generation=moves, in_segments=True)
    assert change.predicted_s == outcome.cost.seconds
    assert numbers["transition_s"] == pytest.approx(still.seconds)
    assert change.hidden_s == pytest.approx(2 * outcome.cost.seconds - still.seconds)


def test_a_forced_move_waits_for_no_later_sync() -> None:
    made = controller()
    seated, history = first(made, signals(0, pool(4, 4)))
    outcome = review(made, seated, signals(1, pool(4)), history)
    assert outcome.moves
    assert outcome.way is not Way.AT_SYNC
    start, then = first(made, signals(0, pool(4)))
    free = review(made, start, signals(1, pool(4, 4)), then)
    assert free.moves
    assert free.way is Way.AT_SYNC
