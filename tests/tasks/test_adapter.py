"""What the controller of a live job remembers of moves that it proposed and that were not made."""

from __future__ import annotations

import pytest
import torch

from nereus.config.adaptation import AnyGainPolicy, Thresholds
from nereus.emu.cluster import PooledGpu
from nereus.planner.adapt import Controller, first
from nereus.planner.lengths import LengthDistribution
from nereus.planner.models import model_shape
from nereus.planner.policies.configured import policy_of
from nereus.planner.profile import ClusterProfile
from nereus.planner.request import PlanRequest
from nereus.planner.signals import Drift, Gpu, Signals
from nereus.planner.stage_gains import StageGains
from nereus.planner.transition_time import FixedCosts
from nereus.planner.workload import Algorithm, ModelShapes, Stage, Workload
from nereus.tasks.adapt import Adapter, signals_after


def signals(step: int, *, num_gpus: int = 8, mean: float = 500.0) -> Signals:
    return Signals(
        step=step,
        now_s=60.0 * step,
        response=LengthDistribution.from_mean_p95_max(mean, 2 * mean, 4 * mean),
        pool=tuple(Gpu(id=number, node=number // 8) for number in range(num_gpus)),
    )


@pytest.fixture
def adapter() -> Adapter:
    """GRPO of an 8B on one node of eight; a second node is to come."""
    algorithm = Algorithm.GRPO
    controller = Controller(
        request=PlanRequest(
            workload=Workload(
                algorithm=algorithm,
                models=ModelShapes.same(model_shape("llama-3.1-8b"), algorithm),
                num_prompts=512,
                prompt_tokens=512,
                response=LengthDistribution.from_mean_p95_max(512, 1024, 2048),
            ),
            cluster=ClusterProfile.parse("2x8xH100"),
        ),
        policy=policy_of(AnyGainPolicy()),
        thresholds=Thresholds(steps=1),
        costs=FixedCosts(transition_s=1.0, restart_s=300.0),
    )
    start = signals(0)
    seated, history = first(controller, start)
    return Adapter(controller=controller, seated=seated, history=history, gains=StageGains(), last=start)


def test_a_proposed_move_that_is_not_settled_takes_no_new_references(adapter: Adapter) -> None:
    references, usable, crossings = (
        adapter.history.references,
        adapter.history.usable,
        adapter.history.crossings,
    )
    plan = adapter.seated
    outcome = adapter.observe(signals(1, num_gpus=16, mean=900.0))
    assert outcome.moves
    # The transition is aborted: nobody calls `settle`.
    assert adapter.history.references == references
    assert adapter.history.usable == usable
    assert adapter.history.crossings == crossings
    assert adapter.seated is plan
    again = adapter.observe(signals(2, num_gpus=16, mean=900.0))
    assert again.moves, "the cause still stands, so the change is proposed again"
    assert again.trigger is not None
    assert outcome.trigger is not None
    assert again.trigger.cause == outcome.trigger.cause


def test_a_settled_move_takes_the_signals_of_its_planning_as_references(adapter: Adapter) -> None:
    outcome = adapter.observe(signals(1, num_gpus=16, mean=900.0))
    adapter.settle(outcome, 2.0)
    assert adapter.history.references[Drift.LENGTH]["mean"] == pytest.approx(900.0, rel=0.01)
    assert adapter.history.usable == frozenset(range(16))
    assert [switch.measured_s for switch in adapter.history.switches] == [2.0]
    assert adapter.seated is outcome.seated


def test_a_loss_of_gpus_in_use_counts_towards_the_rate_that_plans_are_rated_by(adapter: Adapter) -> None:
    everyone = tuple(PooledGpu(rank=rank, node=0) for rank in range(8))
    adapter.without(everyone, step=3)
    assert not adapter.history.losses, "nobody was lost"
    survivors = adapter.without(everyone[:4], step=4)
    assert [loss.step for loss in adapter.history.losses] == [4]
    assert adapter.history.loss_rate(8) == pytest.approx(1 / 8)
    assert survivors.in_use <= {0, 1, 2, 3}
    assert adapter.history.usable == frozenset(range(4))


@pytest.mark.parametrize(
    ("stage", "names"),
    [
        (Stage.INFERENCE, ("score reference", "score values")),
        (Stage.TRAINING, ("score policy", "score frozen", "learn actor.training", "learn critic.training")),
    ],
)
def test_all_work_that_the_cost_model_prices_in_a_stage_is_measured_as_its_time(
    adapter: Adapter, stage: Stage, names: tuple[str, ...]
) -> None:
    told = signals_after(
        adapter,
        step=1,
        lengths_b=torch.full((16,), 500.0),
        work_s=dict.fromkeys(names, 2.0),
        terms_s={},
        memory_bytes={},
        pool=tuple(PooledGpu(rank=rank, node=0) for rank in range(8)),
    )
    assert told.stage_s[str(stage)] == 2.0 * len(names)


def test_waiting_for_rows_or_a_boundary_is_no_time_of_a_stage(adapter: Adapter) -> None:
    """Generation that ran ahead and could not be measured leaves what is known of it as it is."""
    lengths_b = torch.full((16,), 500.0)
    pool = tuple(PooledGpu(rank=rank, node=0) for rank in range(8))
    trained_s = adapter.seated.plan.stage_s[Stage.TRAINING]

    def after(step: int, work_s: dict[str, float]) -> Signals:
        return signals_after(
            adapter,
            step=step,
            lengths_b=lengths_b,
            work_s=work_s,
            terms_s={},
            memory_bytes={},
            pool=pool,
        )

    before = after(1, {"generate": 40.0, "learn actor.training": trained_s})
    waits = {"wait for rows": 1e3, "wait for boundary": 1e3}
    now = after(2, {**waits, "learn actor.training": trained_s})
    assert now.stage_s == {"generation": 0.0, "inference": 0.0, "training": trained_s}
    assert now.efficiency == before.efficiency
    assert now.calibration.decode == before.calibration.decode
