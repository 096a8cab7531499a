"""An OpenRLHF job (the command line of `openrlhf.cli.train_ppo_ray`) read into a campaign."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nereus.errors import ConfigError, explain
from nereus.integrations.adoption import Adoption, Rule, Tree, adopt, place, place_adapters
from nereus.integrations.openrlhf_names import OLD_NAMES

TOGETHER = "read together with others"
ESTIMATORS = {
    "gae": "ppo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
KL_KINDS = {"k1": "k1", "k2": "k2", "k3": "k3"}

RULES: Mapping[str, Rule] = {
    "pretrain": Rule(to="models.actor"),
    "critic_pretrain": Rule(to="models.critic"),
    "ref_pretrain": Rule(to="models.reference"),
    "reward_pretrain": Rule(note=TOGETHER),
    "remote_rm_url": Rule(note=TOGETHER),
    "prompt_data": Rule(to="prompts.source.path"),
    "input_key": Rule(to="prompts.source.prompt"),
    "label_key": Rule(to="prompts.source.answer"),
    "apply_chat_template": Rule(to="prompts.chat_template"),
    "max_samples": Rule(to="prompts.source.limit"),
    "prompt_max_len": Rule(to="prompts.max_tokens"),
    "generate_max_len": Rule(to="sampling.max_new_tokens"),
    "temperature": Rule(to="sampling.temperature"),
    "top_p": Rule(to="sampling.top_p"),
    "rollout_batch_size": Rule(to="batch.prompts"),
    "n_samples_per_prompt": Rule(to="batch.samples"),
    "train_batch_size": Rule(note=TOGETHER),
    "micro_train_batch_size": Rule(to="batch.micro_batch_rows"),
    "use_dynamic_batch": Rule(note=TOGETHER),
    "train_max_tokens_per_gpu": Rule(note=TOGETHER),
    "max_epochs": Rule(to="batch.epochs"),
    "num_episodes": Rule(note=TOGETHER),
    "actor_learning_rate": Rule(to="optimizer.learning_rate"),
    "critic_learning_rate": Rule(to="algorithm.critic_learning_rate"),
    "optim": Rule(only=("adam", None), otherwise="the optimizer is AdamW"),
    "adam_betas": Rule(note=TOGETHER),
    "adam_eps": Rule(to="optimizer.eps"),
    "l2": Rule(to="optimizer.weight_decay"),
    "max_norm": Rule(to="optimizer.max_gradient_norm"),
    "lr_scheduler": Rule(
        to="optimizer.schedule",
        read=lambda word: "cosine" if str(word).startswith("cosine") else word,
        only=("constant", "cosine", "linear", "cosine_with_min_lr"),
        otherwise="schedules are constant, linear, and cosine down to zero",
    ),
    "advantage_estimator": Rule(
        note=TOGETHER, only=tuple(ESTIMATORS), otherwise=f"estimators are {', '.join(ESTIMATORS)}"
    ),
    "gamma": Rule(to="algorithm.gamma"),
    "lambd": Rule(to="algorithm.lam"),
    "eps_clip": Rule(note=TOGETHER),
    "eps_clip_low_high": Rule(note=TOGETHER),
    "dual_clip": Rule(to="algorithm.dual_clip"),
    "policy_loss_type": Rule(only=("ppo", None), otherwise="choose it by algorithm.kind"),
    "value_clip": Rule(to="algorithm.value_clip"),
    "init_kl_coef": Rule(note=TOGETHER),
    "use_kl_loss": Rule(note=TOGETHER),
    "kl_estimator": Rule(note=TOGETHER),
    "kl_target": Rule(note=TOGETHER),
    "kl_horizon": Rule(note=TOGETHER),
    "entropy_loss_coef": Rule(to="algorithm.entropy"),
    "dynamic_filtering": Rule(note=TOGETHER),
    "seed": Rule(to="seed"),
    "param_dtype": Rule(
        to="models.precision", only=("bf16", "fp16", "fp32"), otherwise="weights are bf16, fp16 or fp32"
    ),
    "bf16": Rule(to="models.precision", read=lambda on: "bf16" if on else "fp32"),
    "gradient_checkpointing": Rule(to="models.recompute"),
    "zero_stage": Rule(note=TOGETHER),
    "ds_tensor_parallel_size": Rule(note=TOGETHER),
    "vllm_num_engines": Rule(note=TOGETHER),
    "vllm_tensor_parallel_size": Rule(note=TOGETHER),
    "actor_num_nodes": Rule(note=TOGETHER),
    "actor_num_gpus_per_node": Rule(note=TOGETHER),
    "colocate_all_models": Rule(note=TOGETHER),
    "save_steps": Rule(to="checkpoint.every_steps", read=lambda n: max(0, n)),
    "max_ckpt_num": Rule(to="checkpoint.keep_last"),
    "save_path": Rule(note=TOGETHER),
    "freezing_actor_steps": Rule(to="algorithm.critic_warmup_steps", read=lambda n: max(0, n)),
    "async_train": Rule(note=TOGETHER),
    "async_queue_size": Rule(note=TOGETHER),
    "partial_rollout": Rule(
        only=(False, None), otherwise="give asynchrony.segment_tokens: how many tokens until a sync may come"
    ),
    "agent_func_path": Rule(only=(None,), otherwise="give tools.function, a function that answers a turn"),
    "lora_rank": Rule(note=TOGETHER),
    "lora_alpha": Rule(note=TOGETHER),
    "target_modules": Rule(note=TOGETHER),
    "lora_dropout": Rule(only=(0, 0.0, None), otherwise="adapters have no dropout"),
    "ring_attn_size": Rule(only=(1, None), otherwise="sequences are not cut over GPUs"),
    "packing_samples": Rule(note="prompts and responses are packed always"),
}
NOT_NEEDED = (
    "ref_num_nodes", "ref_num_gpus_per_node", "reward_num_nodes", "reward_num_gpus_per_node",
    "critic_num_nodes", "critic_num_gpus_per_node", "colocate_actor_ref", "colocate_critic_reward",
    "micro_rollout_batch_size", "vllm_gpu_memory_utilization", "vllm_enable_sleep", "vllm_sync_backend",
    "vllm_sync_with_ray", "enforce_eager", "enable_prefix_caching", "deepspeed_enable_sleep",
    "adam_offload", "overlap_comm", "flash_attn", "attn_implementation", "use_wandb", "wandb_run_name",
    "wandb_project", "use_tensorboard", "logging_steps", "eval_steps", "eval_dataset", "eval_split",
    "prompt_split", "ckpt_path", "load_checkpoint", "save_hf_ckpt", "disable_ds_ckpt",
    "normalize_reward", "grad_accum_dtype", "gradient_checkpointing_use_reentrant", "input_template",
    "disable_fast_tokenizer", "vllm_generate_batch_size", "max_len", "rollout_max_tokens_per_gpu",
    "logger", "eval", "ds.use_liger_kernel", "ds.deepcompile", "ds.zpg", "ref.offload", "reward.offload",
)  # fmt: skip


def read_openrlhf(command: Sequence[str]) -> Adoption:
    """Read a job from the words of its command line; what comes before the first option is left out.

    Raises ConfigError when there is no option at all.
    """
    settings = options(command)
    if not settings:
        raise ConfigError(
            explain(
                "cannot read the OpenRLHF command",
                values=shlex.join(command)[:80],
                rule="its settings are options such as --pretrain MODEL",
                remedy="give the whole command, or a shell script that holds it",
            )
        )
    return adopt_openrlhf(settings)


def words_of(path: Path) -> list[str]:
    """The options of the command in a shell script, from the word that names openrlhf on."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if "openrlhf" in line and "--" in line:
            words = shlex.split(line, comments=True)
            return words[next(at for at, word in enumerate(words) if "openrlhf" in word) + 1 :]
    return []


def options(words: Sequence[str]) -> dict[str, Any]:
    """`--name value value`, `--name=value` and `--flag`, with values as YAML reads them; an option in a group
    (`--group.name`) comes by its old name where it had one.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            name = name.replace("-", "_")
            name = OLD_NAMES.get(name, name)
            found[name] = [value] if sign else []
        elif name:
            found[name].append(word)
    return {key: _value(values) for key, values in found.items()}


def _value(values: Sequence[str]) -> Any:
    read = [_number(value) for value in values]
    return True if not read else read[0] if len(read) == 1 else read


def _number(text: str) -> Any:
    try:
        return float(text) if "e" in text.lower() else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return text


def adopt_openrlhf(settings: Mapping[str, Any]) -> Adoption:
    """The campaign that does what an OpenRLHF job with these options does."""
    tree, entries = adopt(settings, RULES, NOT_NEEDED)
    settings = {key: value for key, value in settings.items() if value is not None}  # null: not set
    missing: list[str] = []
    place(tree, "prompts.source.kind", "file")
    _algorithm(settings, tree)
    _batch(settings, tree)
    _reward(settings, tree, missing)
    _cluster(settings, tree)
    rank, alpha = settings.get("lora_rank", 0), settings.get("lora_alpha", 16)
    place_adapters(tree, rank, alpha, settings.get("target_modules"))
    if "save_path" in settings:
        tree["name"] = Path(str(settings["save_path"])).name
    missing.append(
        f"steps: OpenRLHF would make {settings.get('num_episodes', 1)} passes over the prompts; say how many"
    )
    folder = str(settings.get("ckpt_path", "./ckpt/checkpoints_ppo_ray"))
    return Adoption(tree=tree, entries=tuple(entries), missing=tuple(missing), checkpoints=folder)


def _algorithm(settings: Mapping[str, Any], tree: Tree) -> None:
    part: Tree = tree.setdefault("algorithm", {})
    estimator = settings.get("advantage_estimator", "gae")
    part["kind"] = "dapo" if settings.get("dynamic_filtering") else ESTIMATORS.get(estimator, "ppo")
    if part["kind"] == "dapo":
        part["overlong_share"] = None
    if estimator == "reinforce_baseline":
        part["group_baseline"] = True
    low, high = settings.get("eps_clip_low_high") or [settings.get("eps_clip", 0.2)] * 2
    part |= {"clip_low": low, "clip_high": high, "dual_clip": part.get("dual_clip")}
    if coefficient := settings.get("init_kl_coef", 0.01):
        where = "loss" if settings.get("use_kl_loss") else "reward"
        default = "k2" if where == "loss" else "k1"
        part["kl"] = {
            "where": where,
            "coefficient": coefficient,
            "estimator": KL_KINDS.get(settings.get("kl_estimator", default), default),
        }
        if (target := settings.get("kl_target")) is not None:
            part["kl"]["adaptive"] = {"target": target, "horizon_rows": settings.get("kl_horizon", 10_000)}
    if part["kind"] != "ppo":
        for name in ("critic_learning_rate", "value_clip", "lam", "critic_warmup_steps"):
            part.pop(name, None)
    if part["kind"] not in ("ppo", "reinforce_pp"):
        part.pop("gamma", None)


def _batch(settings: Mapping[str, Any], tree: Tree) -> None:
    """OpenRLHF's training batch counts rows; ours is a number of optimizer steps in one pass."""
    rows = settings.get("rollout_batch_size", 1024) * settings.get("n_samples_per_prompt", 1)
    place(tree, "batch.prompts", settings.get("rollout_batch_size", 1024))
    place(tree, "batch.samples", settings.get("n_samples_per_prompt", 1))
    place(tree, "batch.mini_batches", max(1, round(rows / settings.get("train_batch_size", 128))))
    if betas := settings.get("adam_betas"):
        place(tree, "optimizer.beta1", betas[0])
        place(tree, "optimizer.beta2", betas[1])
    if settings.get("use_dynamic_batch"):
        place(tree, "batch.micro_batch_tokens", settings.get("train_max_tokens_per_gpu", 16_192))
    if settings.get("zero_stage", 2) >= 1:
        place(tree, "optimizer.zero1", True)


def _reward(settings: Mapping[str, Any], tree: Tree, missing: list[str]) -> None:
    url = settings.get("remote_rm_url")
    if path := settings.get("reward_pretrain"):
        tree["reward"] = {"kind": "model", "path": path}
    elif isinstance(url, str) and url.endswith(".py"):
        tree["reward"] = {"kind": "python", "function": f"{url}:reward_func"}
        missing.append(
            f"{url}: OpenRLHF calls reward_func(queries, prompts, labels); "
            "write score(response, ground_truth)"
        )
    else:
        tree["reward"] = {"kind": "python"}
        missing.append(f"reward.function: a remote reward ({url}) is not called; give a function")


def _cluster(settings: Mapping[str, Any], tree: Tree) -> None:
    actor = settings.get("actor_num_nodes", 1) * settings.get("actor_num_gpus_per_node", 8)
    engines, engine_tp = settings.get("vllm_num_engines", 0), settings.get("vllm_tensor_parallel_size", 1)
    tp = settings.get("ds_tensor_parallel_size", 1)
    ahead = bool(settings.get("async_train"))
    # Beside async_train, colocate_all_models puts together what trains, and leaves the engines apart.
    shared = bool(settings.get("colocate_all_models")) and not ahead
    if ahead:
        tree["asynchrony"] = {"staleness": settings.get("async_queue_size", 1)}
    own = 0 if shared else engines * engine_tp
    tree["cluster"] = {"gpus": actor + own, "device": "cuda"}
    plan: Tree = {"actor_training": {"tp": tp, "dp": max(1, actor // tp)}}
    if engines:
        first = 0 if shared else actor
        gpus = list(range(first, first + engines * engine_tp))
        plan["actor_generation"] = {"tp": engine_tp, "dp": engines, "gpus": gpus}
        tree["engines"] = {"training": "torch", "generation": "vllm"}
    tree["plan"] = plan
