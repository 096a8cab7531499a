"""An OpenRLHF command becomes a campaign that does the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from nereus.cli.app import build_app
from nereus.errors import ConfigError
from nereus.integrations.adoption import Fate
from nereus.integrations.openrlhf import adopt_openrlhf, options, read_openrlhf, words_of

SCRIPT = r"""
set -x
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \
   --actor_num_nodes 1 \
   --actor_num_gpus_per_node 8 \
   --vllm_num_engines 4 \
   --vllm_tensor_parallel_size 2 \
   --colocate_all_models \
   --init_kl_coef 1e-3 \
   --gamma 1.0 \
   --use_kl_loss \
   --kl_estimator k3 \
   --advantage_estimator group_norm \
   --pretrain Qwen/Qwen3-4B \
   --reward_pretrain OpenRLHF/Llama-3-8b-rm-700k \
   --save_path /runs/qwen3-4b \
   --micro_train_batch_size 8 \
   --train_batch_size 128 \
   --rollout_batch_size 128 \
   --n_samples_per_prompt 8 \
   --max_epochs 1 \
   --prompt_max_len 1024 \
   --generate_max_len 1024 \
   --zero_stage 3 \
   --bf16 \
   --actor_learning_rate 5e-7 \
   --critic_learning_rate 9e-6 \
   --prompt_data prompts.jsonl \
   --input_key context_messages \
   --apply_chat_template \
   --gradient_checkpointing \
   --packing_samples \
   --adam_betas 0.9 0.95 \
   --made_up_flag
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    return path


def test_a_script_is_this_campaign_once_the_steps_are_given(script: Path) -> None:
    found = read_openrlhf(words_of(script))
    assert [entry.key for entry in found.of(Fate.UNKNOWN)] == ["made_up_flag"]
    found.tree["steps"] = 50
    config = found.config()
    assert config.algorithm.kind == "grpo"
    assert config.algorithm.kl is not None
    assert (config.algorithm.kl.where, config.algorithm.kl.coefficient) == ("loss", 1e-3)
    assert (config.batch.prompts, config.batch.samples, config.batch.mini_batches) == (128, 8, 8)
    assert (config.optimizer.beta1, config.optimizer.beta2, config.optimizer.zero1) == (0.9, 0.95, True)
    assert config.models.precision == "bf16"
    assert config.reward.kind == "model"
    assert config.cluster.gpus == 8
    generation = config.plan.stage("actor.generation")
    assert (generation.tp, generation.dp, generation.gpu_ids) == (2, 4, tuple(range(8)))
    assert config.name == "qwen3-4b"


def test_a_job_that_trains_asynchronously_runs_ahead_on_gpus_of_its_own(script: Path) -> None:
    found = read_openrlhf(
        [*words_of(script), "--async_train", "--async_queue_size", "2", "--partial_rollout"]
    )
    assert [entry.key for entry in found.of(Fate.UNSUPPORTED)] == ["partial_rollout"]
    config = found.config()
    assert config.staleness == 2
    # The engines are not among the models that are put together.
    assert config.cluster.gpus == 16
    assert config.plan.stage("actor.generation").gpu_ids == tuple(range(8, 16))
    found.tree["adaptation"] = {}
    assert found.config().runs_ahead


def test_dynamic_batches_become_a_limit_in_tokens() -> None:
    words = ["--use_dynamic_batch", "--train_max_tokens_per_gpu", "8192"]
    assert read_openrlhf(words).tree["batch"]["micro_batch_tokens"] == 8192
    assert read_openrlhf(words[:1]).tree["batch"]["micro_batch_tokens"] == 16_192
    assert "micro_batch_tokens" not in read_openrlhf(words[1:]).tree["batch"]


def test_separate_engines_take_gpus_of_their_own() -> None:
    words = ["--actor_num_gpus_per_node", "4", "--vllm_num_engines", "2", "--vllm_tensor_parallel_size", "2"]
    tree = read_openrlhf(words).tree
    assert tree["cluster"]["gpus"] == 8
    assert tree["plan"]["actor_generation"]["gpus"] == [4, 5, 6, 7]


def test_adapters_are_read_with_openrlhfs_names() -> None:
    words = ["--lora_rank", "8", "--lora_alpha", "32", "--target_modules", "q_proj", "v_proj"]
    found = adopt_openrlhf(options(words))
    assert found.tree["models"]["lora"] == {"rank": 8, "alpha": 32.0, "targets": ["q_proj", "v_proj"]}
    one = adopt_openrlhf(options(["--lora_rank", "8", "--target_modules", "all-linear"]))
    assert one.tree["models"]["lora"] == {"rank": 8, "alpha": 16.0}


def test_options_are_read_with_their_values() -> None:
    words = ["train", "--a", "1", "2.5", "--b=x", "--flag", "--c-d", "1e-3", "--e.f", "null"]
    assert options(words) == {"a": [1, 2.5], "b": "x", "flag": True, "c_d": 1e-3, "e.f": None}


GROUPED = r"""
python3 -m openrlhf.cli.train_ppo_ray \
   --ref.num_nodes 1 --ref.num_gpus_per_node 4 --actor.num_nodes 1 --actor.num_gpus_per_node 8 \
   --critic.num_nodes 1 --critic.num_gpus_per_node 2 \
   --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.colocate_all \
   --actor.model_name_or_path Qwen/Qwen3-4B --critic.model_name_or_path critic/folder \
   --reward.remote_url reward.py --ckpt.path /runs/ckpt --ckpt.output_dir /runs/qwen3-4b \
   --rollout.batch_size 128 --train.batch_size 256 --rollout.n_samples_per_prompt 8 \
   --rollout.micro_batch_size 16 --train.micro_batch_size 4 \
   --rollout.max_tokens_per_gpu 32768 --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384 \
   --rollout.max_new_tokens 1024 --eval.temperature 0.6 --rollout.temperature 0.9 \
   --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 --actor.adam.betas 0.9 0.95 --actor.max_norm 0.5 \
   --critic.max_norm 2.0 --algo.advantage.estimator gae --algo.advantage.lambd 0.95 \
   --algo.kl.init_coef 1e-3 --ds.zero_stage 3 --ds.param_dtype bf16 --ds.lora.rank 0 \
   --data.prompt_dataset prompts.jsonl --logger.wandb.key KEY
"""


def test_grouped_options_that_end_alike_are_told_apart(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(GROUPED)
    found = read_openrlhf(words_of(script))
    assert [entry.key for entry in found.of(Fate.UNKNOWN)] == ["critic.max_norm"]
    found.tree["steps"] = 50
    found.tree["reward"] = {"kind": "python", "function": "rewards.py:score"}
    config = found.config()
    assert (config.models.actor, config.models.critic) == ("Qwen/Qwen3-4B", "critic/folder")
    assert (config.batch.prompts, config.batch.samples, config.batch.mini_batches) == (128, 8, 4)
    assert config.batch.micro_batch_tokens == 16_384
    assert (config.cluster.gpus, config.sampling.temperature) == (8, 0.9)
    assert (config.optimizer.learning_rate, config.optimizer.max_gradient_norm) == (5e-7, 0.5)
    assert config.algorithm.kind == "ppo"
    assert config.algorithm.critic_learning_rate == 9e-6
    assert (config.name, found.checkpoints) == ("qwen3-4b", "/runs/ckpt")


def test_a_command_without_options_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--pretrain MODEL"):
        read_openrlhf(["python", "train.py"])


def test_the_command_writes_the_campaign_and_lists_what_it_does_not_know(
    script: Path, tmp_path: Path
) -> None:
    out = tmp_path / "campaign.yaml"
    app = build_app(chosen="adopt")
    result = CliRunner().invoke(app, ["adopt", "openrlhf", str(script), "-o", str(out)])
    assert result.exit_code == 0
    assert yaml.safe_load(out.read_text())["models"]["actor"] == "Qwen/Qwen3-4B"
    assert "made_up_flag" in result.stderr
    assert "still open: steps" in result.stderr


def test_an_absent_job_is_refused_with_both_forms(tmp_path: Path) -> None:
    result = CliRunner().invoke(build_app(chosen="adopt"), ["adopt", "verl", str(tmp_path / "none.yaml")])
    assert isinstance(result.exception, ConfigError)
    assert "nereus adopt openrlhf -- --pretrain" in str(result.exception)
