"""A workload knows which model-stages take part and how much they have to do."""

from __future__ import annotations

import pytest

from nereus.emu.decoder import DecoderConfig
from nereus.errors import ConfigError
from nereus.planner.lengths import LengthDistribution
from nereus.planner.models import model_shape
from nereus.planner.workload import Algorithm, Model, ModelShapes, ModelStage, Recompute, Stage, Workload

SHAPE: DecoderConfig = model_shape("llama-3.1-8b")


def workload(algorithm: Algorithm, **changes: object) -> Workload:
    given = {
        "algorithm": algorithm,
        "models": ModelShapes.same(SHAPE, algorithm),
        "num_prompts": 128,
        "num_samples": 4,
        "prompt_tokens": 256,
        "response": LengthDistribution.from_mean_p95_max(1000, 2000, 4096),
    }
    return Workload(**(given | changes))  # type: ignore[arg-type]


def test_ppo_trains_two_models_and_scores_three() -> None:
    assert workload(Algorithm.PPO).model_stages == tuple(ModelStage)


@pytest.mark.parametrize("algorithm", [Algorithm.GRPO, Algorithm.REMAX])
def test_algorithms_without_a_critic_leave_it_out(algorithm: Algorithm) -> None:
    stages = workload(algorithm).model_stages
    assert not any(stage.model is Model.CRITIC for stage in stages)
    assert ModelStage.ACTOR_TRAINING in stages


def test_rule_reward_needs_no_reward_stage() -> None:
    models = ModelShapes.same(SHAPE, Algorithm.GRPO, reward=False)
    assert ModelStage.REWARD_INFERENCE not in workload(Algorithm.GRPO, models=models).model_stages


def test_remax_generates_a_baseline_for_every_prompt() -> None:
    assert workload(Algorithm.REMAX).num_generated == 128 * 5
    assert workload(Algorithm.REMAX).num_sequences == 128 * 4
    assert workload(Algorithm.GRPO).num_generated == 128 * 4


def test_scored_models_have_a_scalar_head() -> None:
    models = ModelShapes.same(SHAPE, Algorithm.PPO)
    assert models.critic is not None
    assert models.reward is not None
    assert models.critic.head == models.reward.head == "value"
    assert models.actor.head == "lm"


def test_model_stage_names_split_at_the_dot() -> None:
    assert ModelStage("critic.inference").model is Model.CRITIC
    assert ModelStage("critic.inference").stage is Stage.INFERENCE


def test_options_change_only_what_is_given() -> None:
    before = workload(Algorithm.GRPO, micro_batch=4)
    after = before.with_options(recompute=Recompute.NONE)
    assert after.recompute is Recompute.NONE
    assert after.micro_batch == 4
    assert before.recompute is Recompute.FULL


@pytest.mark.parametrize(
    "changes", [{"num_prompts": 0}, {"micro_batch": 0}, {"max_resident": 0}, {"dtype": "int8"}]
)
def test_senseless_workloads_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        workload(Algorithm.GRPO, **changes)


def test_ppo_without_a_critic_is_refused() -> None:
    with pytest.raises(ConfigError, match="critic"):
        workload(Algorithm.PPO, models=ModelShapes(actor=SHAPE))


def test_missing_model_has_no_shape() -> None:
    with pytest.raises(ConfigError, match="no shape"):
        workload(Algorithm.GRPO).shape(ModelStage.CRITIC_TRAINING)
