"""A verl job (Hydra YAML of `ppo_trainer`, with command-line overrides) read into a campaign.

python -m verl.trainer.main_ppo data.train_files=... actor_rollout_ref.model.path=... ...
  ─▶ settings ─▶ rules below ─▶ algorithm, batch, plan from keys that only make sense together
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nereus.errors import ConfigError, explain
from nereus.integrations.adoption import (
    Adoption,
    Entry,
    Fate,
    Rule,
    Tree,
    adopt,
    flatten,
    place,
    place_adapters,
)

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp",
}
KL_KINDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
TOGETHER = "read together with others"

SCHEDULE = Rule(
    to="optimizer.schedule",
    only=("constant", "cosine", "linear"),
    otherwise="schedules are constant, cosine, linear",
)
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
PRECISION = Rule(
    to="models.precision",
    read=PRECISIONS.__getitem__,
    only=(*PRECISIONS, None),
    otherwise=f"weights are one of {', '.join(PRECISIONS)}",
)
RULES: Mapping[str, Rule] = {
    "data.train_files": Rule(to="prompts.source.path", read=lambda value: _one_file(value)),
    "data.prompt_key": Rule(to="prompts.source.prompt"),
    "data.max_prompt_length": Rule(to="prompts.max_tokens"),
    "data.max_response_length": Rule(to="sampling.max_new_tokens"),
    "data.train_batch_size": Rule(to="batch.prompts"),
    "data.shuffle": Rule(to="prompts.shuffle"),
    "data.seed": Rule(to="seed"),
    "data.train_max_samples": Rule(to="prompts.source.limit", read=lambda n: None if n == -1 else n),
    "data.truncation": Rule(
        to="prompts.too_long",
        read=lambda word: "truncate_left" if word == "left" else "skip",
        only=("left", "error"),
        otherwise="a prompt is skipped, or keeps its end",
    ),
    "data.filter_overlong_prompts": Rule(note="prompts that are too long are always skipped and counted"),
    "data.return_raw_chat": Rule(note="prompts that are messages take the chat template"),
    "actor_rollout_ref.model.path": Rule(to="models.actor"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Rule(to="models.recompute"),
    "actor_rollout_ref.model.lora_rank": Rule(note=TOGETHER),
    "actor_rollout_ref.model.lora_alpha": Rule(note=TOGETHER),
    "actor_rollout_ref.model.target_modules": Rule(note=TOGETHER),
    f"{ACTOR}strategy": Rule(
        to="engines.training",
        read=lambda word: "megatron" if word == "megatron" else "torch",
        note="FSDP's sharding has its counterpart in optimizer.zero1 and the plan",
        only=("fsdp", "fsdp2", "megatron"),
        otherwise="engines are torch, megatron, deepspeed",
    ),
    f"{ACTOR}dtype": PRECISION,
    f"{ACTOR}fsdp_config.dtype": PRECISION,
    f"{ACTOR}ppo_epochs": Rule(to="batch.epochs"),
    f"{ACTOR}ppo_mini_batch_size": Rule(note=TOGETHER),
    f"{ACTOR}ppo_micro_batch_size_per_gpu": Rule(to="batch.micro_batch_rows"),
    f"{ACTOR}use_dynamic_bsz": Rule(note=TOGETHER),
    f"{ACTOR}ppo_max_token_len_per_gpu": Rule(note=TOGETHER),
    f"{ACTOR}grad_clip": Rule(to="optimizer.max_gradient_norm"),
    f"{ACTOR}clip_ratio": Rule(note=TOGETHER),
    f"{ACTOR}clip_ratio_low": Rule(note=TOGETHER),
    f"{ACTOR}clip_ratio_high": Rule(note=TOGETHER),
    f"{ACTOR}clip_ratio_c": Rule(note=TOGETHER),
    f"{ACTOR}loss_agg_mode": Rule(to="algorithm.aggregation"),
    f"{ACTOR}entropy_coeff": Rule(to="algorithm.entropy"),
    f"{ACTOR}use_kl_loss": Rule(note=TOGETHER),
    f"{ACTOR}kl_loss_coef": Rule(note=TOGETHER),
    f"{ACTOR}kl_loss_type": Rule(note=TOGETHER),
    f"{ACTOR}policy_loss.loss_mode": Rule(
        note=TOGETHER, only=("vanilla", "gspo", "cispo"), otherwise="losses are vanilla, gspo, cispo"
    ),
    f"{ACTOR}optim.lr": Rule(to="optimizer.learning_rate"),
    f"{ACTOR}optim.lr_warmup_steps": Rule(to="optimizer.warmup_steps", read=lambda n: max(0, n)),
    f"{ACTOR}optim.weight_decay": Rule(to="optimizer.weight_decay"),
    f"{ACTOR}optim.betas": Rule(note=TOGETHER),
    f"{ACTOR}optim.lr_scheduler_type": SCHEDULE,
    f"{ACTOR}optim.warmup_style": SCHEDULE,
    f"{ACTOR}megatron.tensor_model_parallel_size": Rule(note=TOGETHER),
    f"{ACTOR}megatron.pipeline_model_parallel_size": Rule(note=TOGETHER),
    f"{ACTOR}ulysses_sequence_parallel_size": Rule(note=TOGETHER),
    f"{ROLLOUT}name": Rule(
        to="engines.generation",
        read=lambda word: "vllm" if word == "vllm" else "torch",
        only=("vllm", "hf"),
        otherwise="generation engines are torch and vllm",
    ),
    f"{ROLLOUT}n": Rule(to="batch.samples"),
    f"{ROLLOUT}temperature": Rule(to="sampling.temperature"),
    f"{ROLLOUT}top_p": Rule(to="sampling.top_p"),
    f"{ROLLOUT}top_k": Rule(to="sampling.top_k", read=lambda k: None if k in (-1, 0) else k),
    f"{ROLLOUT}ignore_eos": Rule(to="sampling.ignore_eos"),
    f"{ROLLOUT}tensor_model_parallel_size": Rule(note=TOGETHER),
    f"{ROLLOUT}multi_turn.enable": Rule(note=TOGETHER),
    f"{ROLLOUT}multi_turn.max_assistant_turns": Rule(note=TOGETHER),
    f"{ROLLOUT}mode": Rule(note="how verl calls its engine; a step learns from its own responses either way"),
    f"{REF}model.path": Rule(to="models.reference"),
    "critic.model.path": Rule(to="models.critic"),
    "critic.optim.lr": Rule(to="algorithm.critic_learning_rate"),
    "critic.cliprange_value": Rule(to="algorithm.value_clip"),
    "algorithm.adv_estimator": Rule(
        note=TOGETHER, only=tuple(ESTIMATORS), otherwise=f"estimators are {', '.join(ESTIMATORS)}"
    ),
    "algorithm.gamma": Rule(to="algorithm.gamma"),
    "algorithm.lam": Rule(to="algorithm.lam"),
    "algorithm.norm_adv_by_std_in_grpo": Rule(to="algorithm.normalize_std"),
    "algorithm.use_kl_in_reward": Rule(note=TOGETHER),
    "algorithm.kl_penalty": Rule(note=TOGETHER),
    "algorithm.kl_ctrl.type": Rule(note=TOGETHER),
    "algorithm.kl_ctrl.kl_coef": Rule(note=TOGETHER),
    "algorithm.kl_ctrl.target_kl": Rule(note=TOGETHER),
    "algorithm.kl_ctrl.horizon": Rule(note=TOGETHER),
    "algorithm.filter_groups.enable": Rule(note=TOGETHER),
    "algorithm.filter_groups.max_num_gen_batches": Rule(note=TOGETHER),
    "custom_reward_function.path": Rule(note=TOGETHER),
    "custom_reward_function.name": Rule(note=TOGETHER),
    "reward_model.enable": Rule(note=TOGETHER),
    "reward_model.model.path": Rule(note=TOGETHER),
    "trainer.experiment_name": Rule(to="name", read=lambda name: _name(str(name))),
    "trainer.default_local_dir": Rule(to="output", read=lambda path: str(Path(path).parent)),
    "trainer.total_training_steps": Rule(to="steps"),
    "trainer.total_epochs": Rule(note=TOGETHER),
    "trainer.save_freq": Rule(to="checkpoint.every_steps", read=lambda n: max(0, n)),
    "trainer.max_actor_ckpt_to_keep": Rule(to="checkpoint.keep_last"),
    "trainer.critic_warmup": Rule(to="algorithm.critic_warmup_steps"),
    "trainer.nnodes": Rule(note=TOGETHER),
    "trainer.n_gpus_per_node": Rule(note=TOGETHER),
}
# Settings of verl's own machinery: memory tricks, engines' buffers, loggers, validation while training.
NOT_NEEDED = (
    "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.model.trust_remote_code",
    "actor_rollout_ref.model.override_config",
    f"{ACTOR}shuffle",
    f"{ACTOR}use_torch_compile",
    f"{ACTOR}fsdp_config",
    f"{ACTOR}checkpoint",
    f"{ROLLOUT}gpu_memory_utilization",
    f"{ROLLOUT}enforce_eager",
    f"{ROLLOUT}free_cache_engine",
    f"{ROLLOUT}load_format",
    f"{ROLLOUT}dtype",
    f"{ROLLOUT}max_num_batched_tokens",
    f"{ROLLOUT}max_num_seqs",
    f"{ROLLOUT}max_model_len",
    f"{ROLLOUT}enable_chunked_prefill",
    f"{ROLLOUT}disable_log_stats",
    f"{ROLLOUT}do_sample",
    f"{ROLLOUT}val_kwargs",
    f"{ROLLOUT}multi_turn",
    f"{ROLLOUT}agent",
    f"{ROLLOUT}log_prob_micro_batch_size_per_gpu",
    f"{ROLLOUT}log_prob_micro_batch_size",
    f"{REF}fsdp_config",
    f"{REF}log_prob_micro_batch_size_per_gpu",
    f"{REF}log_prob_micro_batch_size",
    "critic.model.fsdp_config",
    "critic.model.enable_gradient_checkpointing",
    "critic.model.use_remove_padding",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.ppo_mini_batch_size",
    "critic.strategy",
    "data.val_files",
    "data.val_batch_size",
    "data.reward_fn_key",
    "data.dataloader_num_workers",
    "reward_model.reward_manager",
    "reward_model.launch_reward_fn_async",
    "trainer.project_name",
    "trainer.logger",
    "trainer.val_before_train",
    "trainer.test_freq",
    "trainer.resume_mode",
    "trainer.balance_batch",
    "trainer.device",
    "ray_kwargs",
    "ray_init",
    "hydra",
    "defaults",
)


def read_verl(path: Path | None, overrides: Sequence[str] = ()) -> Adoption:
    """Read a job from its YAML file, its command-line overrides, or both.

    Raises ConfigError when the file is no mapping or an override cannot be read.
    """
    settings: dict[str, Any] = {}
    if path is not None:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(tree, Mapping):
            raise ConfigError(
                explain(
                    f"cannot read {path}",
                    values=type(tree).__name__,
                    rule="a verl job is a YAML mapping of data, actor_rollout_ref, algorithm, trainer",
                )
            )
        settings.update(flatten(tree))
    settings.update(_override(text) for text in overrides)
    return adopt_verl(settings)


def adopt_verl(settings: Mapping[str, Any]) -> Adoption:
    """The campaign that does what a verl job with these (flat) settings does."""
    tree, entries = adopt(settings, RULES, NOT_NEEDED)
    settings = {key: value for key, value in settings.items() if value is not None}  # null: not set
    missing: list[str] = []
    place(tree, "prompts.source.kind", "file")
    place(tree, "prompts.chat_template", True)
    _algorithm(settings, tree, entries)
    _batch(settings, tree, missing)
    _reward(settings, tree, missing)
    _tools(settings, tree, missing)
    _cluster(settings, tree)
    rank, targets = (
        settings.get(f"actor_rollout_ref.model.{key}") for key in ("lora_rank", "target_modules")
    )
    alpha = settings.get("actor_rollout_ref.model.lora_alpha", 16)
    place_adapters(tree, rank or 0, alpha, targets)
    tree.setdefault("models", {}).setdefault("precision", "bf16")
    if "steps" not in tree:
        missing.append(
            f"steps: verl would make trainer.total_epochs={settings.get('trainer.total_epochs', 1)} passes; "
            "give the number of steps"
        )
    folder = str(settings.get("trainer.default_local_dir") or "")
    return Adoption(tree=tree, entries=tuple(entries), missing=tuple(missing), checkpoints=folder)


def _override(text: str) -> tuple[str, Any]:
    key, sign, value = text.lstrip("+").partition("=")
    if not sign or not key:
        raise ConfigError(explain(f"cannot read the override {text!r}", rule="write key=value, as for verl"))
    return key, yaml.safe_load(value)


def _algorithm(settings: Mapping[str, Any], tree: Tree, entries: list[Entry]) -> None:
    part: Tree = tree.setdefault("algorithm", {})
    estimator = settings.get("algorithm.adv_estimator", "gae")
    part["kind"] = ESTIMATORS.get(estimator, "grpo")
    loss = settings.get(f"{ACTOR}policy_loss.loss_mode", "vanilla")
    if loss in ("gspo", "cispo") and part["kind"] == "grpo":
        part["kind"] = loss
    if settings.get("algorithm.filter_groups.enable"):
        part["kind"] = "dapo"
        if batches := settings.get("algorithm.filter_groups.max_num_gen_batches"):
            part["max_batches"] = batches
        part["overlong_share"] = None
    if estimator == "reinforce_plus_plus_baseline":
        part["group_baseline"] = True
    both = settings.get(f"{ACTOR}clip_ratio")
    for side in ("low", "high"):
        if (clip := settings.get(f"{ACTOR}clip_ratio_{side}", both)) is not None:
            part[f"clip_{side}"] = clip
    if (bound := settings.get(f"{ACTOR}clip_ratio_c")) is not None:
        part["dual_clip"] = bound
    if (kl := _kl(settings)) is not None:
        part["kl"] = kl
    _drop_foreign_keys(part, entries)


def _drop_foreign_keys(part: Tree, entries: list[Entry]) -> None:
    """verl has one set of keys for all algorithms; those that the chosen one lacks do nothing there."""
    from nereus.config.keys import known_keys

    own = {key.path[1] for key in known_keys() if key.path[0] == "algorithm" and key.kind == part["kind"]}
    for name in [name for name in part if name not in own and name != "kind"]:
        del part[name]
        for at, entry in enumerate(entries):
            if entry.target == f"algorithm.{name}":
                note = f"{part['kind']} does not use it"
                entries[at] = Entry(key=entry.key, value=entry.value, fate=Fate.NOT_NEEDED, note=note)


def _kl(settings: Mapping[str, Any]) -> Tree | None:
    if settings.get("algorithm.use_kl_in_reward"):
        estimator = KL_KINDS.get(settings.get("algorithm.kl_penalty", "kl"), "k1")
        part: Tree = {
            "where": "reward",
            "coefficient": settings.get("algorithm.kl_ctrl.kl_coef", 0.001),
            "estimator": estimator,
        }
        if settings.get("algorithm.kl_ctrl.type") == "adaptive":
            part["adaptive"] = {
                "target": settings.get("algorithm.kl_ctrl.target_kl", 0.1),
                "horizon_rows": settings.get("algorithm.kl_ctrl.horizon", 10_000),
            }
        return part
    if settings.get(f"{ACTOR}use_kl_loss"):
        word = settings.get(f"{ACTOR}kl_loss_type", "low_var_kl")
        return {
            "where": "loss",
            "coefficient": settings.get(f"{ACTOR}kl_loss_coef", 0.001),
            "estimator": KL_KINDS.get(word.rstrip("+"), "k3"),
        }
    return None


def _batch(settings: Mapping[str, Any], tree: Tree, missing: list[str]) -> None:
    """verl's mini-batch counts prompts; ours is a number of optimizer steps in one pass."""
    prompts, mini = settings.get("data.train_batch_size"), settings.get(f"{ACTOR}ppo_mini_batch_size")
    if prompts is None:
        missing.append("batch.prompts: data.train_batch_size is not set")
    elif mini:
        place(tree, "batch.mini_batches", max(1, round(prompts / mini)))
    place(tree, "batch.samples", settings.get(f"{ROLLOUT}n", 1))
    if settings.get(f"{ACTOR}use_dynamic_bsz"):
        place(tree, "batch.micro_batch_tokens", settings.get(f"{ACTOR}ppo_max_token_len_per_gpu", 16_384))
    if betas := settings.get(f"{ACTOR}optim.betas"):
        place(tree, "optimizer.beta1", betas[0])
        place(tree, "optimizer.beta2", betas[1])


def _tools(settings: Mapping[str, Any], tree: Tree, missing: list[str]) -> None:
    """verl's tools are classes that a file lists; ours are one function."""
    turns = f"{ROLLOUT}multi_turn."
    if not settings.get(f"{turns}enable"):
        return
    tree["tools"] = {}
    if most := settings.get(f"{turns}max_assistant_turns"):
        tree["tools"]["max_turns"] = max(2, most)
    length = settings.get(f"{turns}max_tool_response_length")
    cut = (
        "" if length is None else f"; verl cuts answers at {length} characters, tools.max_observation_tokens"
    )
    missing.append(f"tools.function: a function that answers a turn, for the classes of verl's tools{cut}")


def _reward(settings: Mapping[str, Any], tree: Tree, missing: list[str]) -> None:
    if settings.get("reward_model.enable"):
        tree["reward"] = {"kind": "model", "path": settings.get("reward_model.model.path")}
    elif path := settings.get("custom_reward_function.path"):
        name = settings.get("custom_reward_function.name", "compute_score")
        tree["reward"] = {"kind": "python", "function": f"{path}:{name}"}
    else:
        missing.append(
            "reward.function: verl picks a score by the data source from its own package; give the function, "
            "e.g. reward.function=verl.utils.reward_score:default_compute_score, whose arguments are known"
        )
        tree["reward"] = {"kind": "python"}


def _cluster(settings: Mapping[str, Any], tree: Tree) -> None:
    gpus = settings.get("trainer.nnodes", 1) * settings.get("trainer.n_gpus_per_node", 8)
    tree["cluster"] = {"gpus": gpus, "device": "cuda"}
    tp = settings.get(f"{ACTOR}megatron.tensor_model_parallel_size", 1)
    pp = settings.get(f"{ACTOR}megatron.pipeline_model_parallel_size", 1)
    cp = settings.get(f"{ACTOR}ulysses_sequence_parallel_size") or 1
    generation_tp = settings.get(f"{ROLLOUT}tensor_model_parallel_size", 1)
    tree["plan"] = {
        "actor_training": {"tp": tp, "pp": pp, "dp": max(1, gpus // (tp * pp * cp))}
        | ({"cp": cp} if cp > 1 else {}),
        "actor_generation": {"tp": generation_tp, "dp": max(1, gpus // generation_tp)},
    }


def _one_file(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _name(text: str) -> str:
    kept = "".join(c if c.isalnum() or c in "._-" else "-" for c in text).lstrip("._-")
    return kept or "campaign"
