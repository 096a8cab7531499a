"""A worker dies between two steps: before or after the decision of a transition, or in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import ray

from nereus.config import CampaignConfig
from nereus.emu.checkpoint.source import open_checkpoint
from nereus.flows.campaign import campaign
from nereus.flows.post_training import run_steps
from nereus.record.emergencies import read_emergencies
from nereus.record.metrics import read_records
from nereus.record.transitions import read_transitions
from nereus.tasks.job import open_job
from nereus.tasks.prepare import prepare_campaign
from tests.flows.striker import Striker

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
Make = Callable[..., CampaignConfig]

PARTS = {
    "cluster": {"gpus": 4, "device": "cpu", "timeout_s": 60},
    "plan": {"actor_training": {"tp": 2, "dp": 2}, "actor_generation": {"tp": 2}},
    "tracking": "step",
    "steps": 3,
    "checkpoint": {"every_steps": 2},
}
CHANGE = {"before_step": 1, "plan": {"actor_training": {"tp": 1, "dp": 4}, "actor_generation": {"tp": 2}}}


@pytest.mark.parametrize(
    ("stage", "step", "outcomes"),
    [
        pytest.param("move", 1, ["abort", "commit"], marks=pytest.mark.slow),
        pytest.param("rebuild", 1, ["commit", "commit"], marks=pytest.mark.slow),
        pytest.param("checkpoint", 2, ["commit", "commit"], marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_dies_between_two_steps_costs_no_step_and_no_sample(
    make_config: Make, stage: str, step: int, outcomes: list[str]
) -> None:
    still = read_records(campaign(make_config(name="still", **PARTS)).metrics)
    prepared = prepare_campaign(make_config(name="struck", changes=[CHANGE], **PARTS))
    victims = [0]  # it trains, generates and writes the checkpoint
    with open_job(prepared, resume=False) as job:

        def strike(at: int, name: str) -> None:
            if (at, name) == (step, stage) and victims:
                ray.kill(job.cluster._actors[victims.pop()])

        job.listener = Striker(strike)
        run_steps(job)
        assert not victims
        assert len(job.cluster.ranks) == 3
        assert job.checkpoint is not None
        control = open_checkpoint(job.checkpoint).control
    assert (control.step, control.optimizers["actor"].adam_steps) == (3, 3)
    assert [done.outcome for done in read_transitions(job.config.run_folder)][:2] == outcomes
    struck = read_records(job.log.path)
    assert [record.step for record in struck] == [0, 1, 2]
    assert [r.response_tokens for r in still] == [r.response_tokens for r in struck]
    # Another layout sums in another order; everything else is the same.
    assert [r.stats["loss/actor"] for r in still] == pytest.approx(
        [r.stats["loss/actor"] for r in struck], abs=1e-4
    )


@pytest.mark.slow
def test_a_reference_whose_only_unit_is_lost_is_read_again_and_nothing_goes_back(make_config: Make) -> None:
    parts = PARTS | {
        "algorithm": {"kind": "grpo", "kl": {"coefficient": 0.1}},
        "plan": {
            "actor_training": {"tp": 1, "dp": 2},
            "actor_generation": {"tp": 1, "dp": 2},
            "reference_inference": {"tp": 2, "gpus": [2, 3]},
        },
    }
    still = read_records(campaign(make_config(name="still", **parts)).metrics)
    victims = [2]
    with open_job(prepare_campaign(make_config(name="struck", **parts)), resume=False) as job:

        def strike(at: int, name: str) -> None:
            if (at, name) == (1, "generate") and victims:
                ray.kill(job.cluster._actors[victims.pop()])

        job.listener = Striker(strike)
        run_steps(job)
    struck = read_records(job.log.path)
    (emergency,) = read_emergencies(job.config.run_folder)
    assert (emergency.way, emergency.steps_redone) == ("transition", 0)
    assert [r.response_tokens for r in still] == [r.response_tokens for r in struck]
    assert [r.stats["kl/actor"] for r in struck] == pytest.approx(
        [r.stats["kl/actor"] for r in still], abs=1e-6
    )


@pytest.mark.slow
def test_a_second_death_inside_a_recovery_is_one_emergency_and_costs_no_sample(make_config: Make) -> None:
    still = read_records(campaign(make_config(name="still", **PARTS)).metrics)
    victims = {
        (1, "generate"): 0,
        (1, "rebuild"): 3,
    }  # the second dies while the first is being recovered from
    prepared = prepare_campaign(make_config(name="struck", **PARTS))
    with open_job(prepared, resume=False) as job:

        def strike(at: int, name: str) -> None:
            if (rank := victims.pop((at, name), None)) is not None:
                ray.kill(job.cluster._actors[rank])

        job.listener = Striker(strike)
        run_steps(job)
        assert not victims
        assert job.cluster.ranks == (1, 2)
    (emergency,) = read_emergencies(job.config.run_folder)
    assert emergency.attempts == 2
    assert (emergency.step, emergency.gone, emergency.steps_redone) == (1, [0, 3], 0)
    struck = read_records(job.log.path)
    assert [(r.step, r.version, r.position) for r in struck] == [
        (r.step, r.version, r.position) for r in still
    ]
    assert [r.response_tokens for r in still] == [r.response_tokens for r in struck]
    # Another layout sums in another order; everything else is the same.
    assert [r.stats["loss/actor"] for r in still] == pytest.approx(
        [r.stats["loss/actor"] for r in struck], abs=1e-4
    )
