"""A verl job becomes a campaign that does the same, and no setting is left out in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.errors import ConfigError
from nereus.integrations.adoption import Fate
from nereus.integrations.verl import RULES, adopt_verl, read_verl

# As in verl's example script for GRPO on GSM8K.
GRPO = [
    "",
    "algorithm.adv_estimator=grpo",
    "data.train_files=$HOME/data/gsm8k/train.parquet",
    "data.val_files=$HOME/data/gsm8k/test.parquet",
    "data.train_batch_size=1024",
    "data.max_prompt_length=512",
    "data.max_response_length=1024",
    "data.filter_overlong_prompts=True",
    "data.truncation=error",
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    "actor_rollout_ref.rollout.n=5",
    "algorithm.use_kl_in_reward=False",
    "trainer.critic_warmup=0",
    'trainer.logger=["console","wandb"]',
    "trainer.project_name=verl_grpo_example_gsm8k",
    "trainer.experiment_name=qwen3_8b_function_rm",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
    "trainer.save_freq=20",
    "trainer.total_epochs=15",
    "",
][1:-1]


def grpo(**changes: Any) -> dict[str, Any]:
    settings = dict(line.partition("=")[::2] for line in GRPO)
    return {key: yaml.safe_load(value) for key, value in settings.items()} | changes


def test_verls_grpo_example_is_this_campaign_once_the_open_questions_are_answered() -> None:
    found = read_verl(None, GRPO)
    assert found.of(Fate.UNKNOWN) == ()
    assert found.of(Fate.UNSUPPORTED) == ()
    assert [line.partition(":")[0] for line in found.missing] == ["reward.function", "steps"]
    found.tree["reward"]["function"] = "rewards.py:score"
    found.tree["steps"] = 105
    config = found.config()
    assert config.algorithm.kind == "grpo"
    assert config.algorithm.kl is not None
    assert (config.algorithm.kl.where, config.algorithm.kl.estimator) == ("loss", "k3")
    assert (config.batch.prompts, config.batch.samples, config.batch.mini_batches) == (1024, 5, 4)
    assert config.sampling.max_new_tokens == 1024
    assert config.optimizer.learning_rate == 1e-6
    assert config.engines.generation == "vllm"
    generation = config.plan.stage("actor.generation")
    assert (generation.tp, generation.dp, config.cluster.gpus) == (2, 4, 8)
    assert config.models.recompute
    assert config.name == "qwen3_8b_function_rm"


def test_dynamic_batches_become_a_limit_in_tokens() -> None:
    dynamic, limit = (
        "actor_rollout_ref.actor.use_dynamic_bsz",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    )
    found = adopt_verl(grpo(**{dynamic: True, limit: 24_000}))
    assert found.tree["batch"]["micro_batch_tokens"] == 24_000
    assert not [entry for entry in found.of(Fate.UNSUPPORTED) if "dynamic" in entry.key]
    # verl's own default where the limit is not set, and no limit where the switch is off
    assert adopt_verl(grpo(**{dynamic: True})).tree["batch"]["micro_batch_tokens"] == 16_384
    assert "micro_batch_tokens" not in adopt_verl(grpo(**{dynamic: False, limit: 24_000})).tree["batch"]


def test_sequences_that_verl_cuts_over_gpus_are_cut_along_cp() -> None:
    found = adopt_verl(grpo(**{"actor_rollout_ref.actor.ulysses_sequence_parallel_size": 4}))
    assert found.tree["plan"]["actor_training"] == {"tp": 1, "pp": 1, "cp": 4, "dp": 2}
    assert "cp" not in adopt_verl(grpo()).tree["plan"]["actor_training"]


def test_a_yaml_tree_and_overrides_are_read_as_one_with_the_later_winning(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("data: {train_batch_size: 64}\nalgorithm: {adv_estimator: gae, gamma: 0.99}\n")
    found = read_verl(path, ["+data.train_batch_size=32"])
    assert found.tree["batch"]["prompts"] == 32
    assert found.tree["algorithm"] == {"kind": "ppo", "gamma": 0.99}


@pytest.mark.parametrize(
    ("estimator", "loss", "kind"),
    [
        ("gae", "vanilla", "ppo"),
        ("grpo", "gspo", "gspo"),
        ("grpo", "cispo", "cispo"),
        ("rloo", "vanilla", "rloo"),
        ("remax", "vanilla", "remax"),
        ("reinforce_plus_plus_baseline", "vanilla", "reinforce_pp"),
    ],
)
def test_estimator_and_loss_name_the_algorithm(estimator: str, loss: str, kind: str) -> None:
    changes = {
        "algorithm.adv_estimator": estimator,
        "actor_rollout_ref.actor.policy_loss.loss_mode": loss,
        "custom_reward_function.path": "/r.py",
        "trainer.total_training_steps": 10,
        "actor_rollout_ref.rollout.n": 4,
    }
    config = adopt_verl(grpo(**changes)).config()
    assert config.algorithm.kind == kind
    assert config.reward.kind == "python"


def test_filtering_groups_is_dapo_with_verls_bound() -> None:
    tree = adopt_verl(
        {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 7}
        | {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.clip_ratio_high": 0.28}
    ).tree
    assert tree["algorithm"] == {
        "kind": "dapo",
        "max_batches": 7,
        "overlong_share": None,
        "clip_high": 0.28,
    }


@pytest.mark.parametrize(
    ("targets", "kept"), [("all-linear", {}), (["q_proj", "v_proj"], {"targets": ["q_proj", "v_proj"]})]
)
def test_adapters_are_read_with_verls_names(targets: object, kept: dict[str, object]) -> None:
    model = "actor_rollout_ref.model."
    found = adopt_verl({f"{model}lora_rank": 32, f"{model}target_modules": targets})
    assert found.tree["models"]["lora"] == {"rank": 32, "alpha": 16.0} | kept
    assert not found.of(Fate.UNSUPPORTED)
    assert "lora" not in adopt_verl({f"{model}lora_rank": 0}).tree["models"]


def test_turns_are_read_and_the_function_that_answers_them_is_asked_for() -> None:
    turns = "actor_rollout_ref.rollout.multi_turn."
    off = adopt_verl({f"{turns}enable": False, f"{turns}max_tool_response_length": 256})
    assert "tools" not in off.tree
    found = adopt_verl(
        {
            f"{turns}enable": True,
            f"{turns}max_assistant_turns": 6,
            f"{turns}max_tool_response_length": 256,
            f"{turns}tool_config_path": "tools.yaml",
        }
    )
    assert found.tree["tools"] == {"max_turns": 6}
    (asked,) = [text for text in found.missing if text.startswith("tools.function")]
    assert "256 characters" in asked
    assert not found.of(Fate.UNSUPPORTED)


def test_what_cannot_be_honoured_is_said_with_the_reason() -> None:
    found = adopt_verl(
        {
            "actor_rollout_ref.actor.optim.lr_scheduler_type": "step",
            "some.new.key": 1,
        }
    )
    assert {entry.key: bool(entry.note) for entry in found.of(Fate.UNSUPPORTED)} == {
        "actor_rollout_ref.actor.optim.lr_scheduler_type": True,
    }
    assert [entry.key for entry in found.of(Fate.UNKNOWN)] == ["some.new.key"]


def test_a_file_that_is_no_mapping_and_an_override_without_a_value_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="YAML mapping"):
        read_verl(path)
    with pytest.raises(ConfigError, match="key=value"):
        read_verl(None, ["data.train_batch_size"])


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(RULES)) | st.text(min_size=1, max_size=9), st.none(), max_size=30)
)
def test_every_setting_has_exactly_one_fate(job: dict[str, None]) -> None:
    found = adopt_verl(job)
    assert sorted(entry.key for entry in found.entries) == sorted(job)


@pytest.mark.parametrize("key", ["dtype", "fsdp_config.dtype"])
def test_the_dtype_of_weights_is_the_precision(key: str) -> None:
    def adopted(**changes: Any) -> Any:
        return adopt_verl(grpo(**changes))

    assert adopted().tree["models"]["precision"] == "bf16"
    name = f"actor_rollout_ref.actor.{key}"
    assert adopted(**{name: "float16"}).tree["models"]["precision"] == "fp16"
    (refused,) = adopted(**{name: "float8"}).of(Fate.UNSUPPORTED)
    assert refused.key == name
