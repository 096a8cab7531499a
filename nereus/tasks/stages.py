"""The model-stages of a campaign under a plan: which model, which units, filled from where. Reads model
folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nereus.config import CampaignConfig, PlanConfig
from nereus.emu.decoder import DecoderConfig, Head, decoder_spec
from nereus.emu.engine_limits import EngineName, check_layout
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.hf_folder import HFSource
from nereus.emu.layout import Layout
from nereus.emu.lora import Lora
from nereus.emu.peft_folder import PeftSource, sorted_targets
from nereus.emu.serving import DEFAULT_SERVING, Serving
from nereus.emu.stage import FromFolder, FromStage, Role, StageSpec
from nereus.errors import ConfigError, InvalidLayout, explain
from nereus.planner.workload import Engines
from nereus.tasks.device import device
from nereus.tasks.planned_cluster import cache_limit

TRAINING, GENERATION, CRITIC = "actor.training", "actor.generation", "critic.training"
REFERENCE, REWARD = "reference.inference", "reward.inference"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """The model of a model-stage, its role, and the folders of its first weights and of its first adapter."""

    role: Role
    model: DecoderConfig
    folder: Path
    adapter: Path | None = None


def read_models(config: CampaignConfig) -> dict[str, StageModel]:
    """The models by model-stage, training first; their tensors are checked by name and shape.

    Raises ModelError for a folder that is not a model, ConfigError when vocabularies do not fit together.
    """
    models = config.models
    actor = _read(models.actor, "training", config)
    # Generation gets weights with the adapters added.
    out = {TRAINING: actor, GENERATION: StageModel(role="generation", model=actor.model, folder=actor.folder)}
    if CRITIC in config.model_stages:
        out[CRITIC] = _read(models.critic or models.actor, "training", config, "value", config.seed)
    if (settings := models.lora) is not None:
        lora = Lora(rank=settings.rank, alpha=settings.alpha, targets=sorted_targets(settings.targets))
        for name in (TRAINING, CRITIC):
            if name in out:
                out[name] = replace(out[name], model=out[name].model.with_lora(lora))
        if settings.adapter is not None:
            out[TRAINING] = _with_adapter(out[TRAINING], Path(settings.adapter), lora)
    if REFERENCE in config.model_stages:
        out[REFERENCE] = _read(models.reference or models.actor, "inference", config)
    if config.reward.kind == "model":
        out[REWARD] = _read(config.reward.path, "inference", config, "value")
    for name, stage in out.items():
        if stage.model.vocab_size < actor.model.vocab_size:
            raise ConfigError(
                explain(
                    f"cannot score responses with {name}",
                    values=f"it has {stage.model.vocab_size} tokens, the actor {actor.model.vocab_size}",
                    rule="all models read the actor's token ids",
                    remedy="use models of one tokenizer family",
                )
            )
    return out


def _with_adapter(actor: StageModel, folder: Path, lora: Lora) -> StageModel:
    PeftSource(folder, decoder_spec(actor.model), lora)  # checks names and shapes
    return replace(actor, adapter=folder)


def _read(
    folder: str, role: Role, config: CampaignConfig, head: Head = "lm", seed: int | None = None
) -> StageModel:
    source = HFSource(Path(folder), head=head, value_head_seed=seed)
    model = source.config.with_dtype(config.models.precision.value)
    return StageModel(role=role, model=model, folder=Path(folder))


def stages_under(
    config: CampaignConfig, plan: PlanConfig, models: dict[str, StageModel]
) -> dict[str, StageSpec]:
    """The model-stages under a plan, in the order in which they are built.

    Generation shares the training units' weights where its units are theirs, else it is synced from them.
    Raises ConfigError when a model cannot be cut as planned, by its engine or at all.
    """
    optimizer = config.optimizer
    adam = AdamW(
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_gradient_norm=optimizer.max_gradient_norm,
    )
    units = {
        name: _units(config, plan, name, stage.model, engine_of(config, stage.role))
        for name, stage in models.items()
    }
    specs = {
        name: StageSpec(
            name=name,
            role=stage.role,
            model=stage.model,
            units=units[name],
            origin=FromStage(stage=TRAINING)
            if name == GENERATION
            else FromFolder(folder=stage.folder, seed=config.seed, adapter=stage.adapter),
            engine=engine_of(config, stage.role),
            optimizer=adam if stage.role == "training" else None,
            recompute=config.models.recompute,
            router_balance=config.models.router_balance if stage.role == "training" else 0.0,
            zero1=optimizer.zero1 and stage.role == "training",
            serving=serving_of(config, stage.model)
            if engine_of(config, stage.role) == "vllm"
            else DEFAULT_SERVING,
        )
        for name, stage in models.items()
    }
    return with_sharing(specs)


def serving_of(config: CampaignConfig, model: DecoderConfig) -> Serving:
    """What a generation engine is made for: the longest prompt that is taken with the longest response.

    With `adaptation` its cache is what plans count on.
    """
    settings = config.engines.vllm
    limit = None if settings.kv_cache_gb is None else int(settings.kv_cache_gb * 1e9)
    if limit is None and config.adaptation is not None:
        limit = cache_limit(config)
    return Serving(
        longest_tokens=min(model.max_positions, config.prompts.max_tokens + config.sampling.max_new_tokens),
        rows=settings.max_sequences,
        kv_cache_bytes=limit,
        eager=settings.eager,
    )


def engine_of(config: CampaignConfig, role: Role) -> EngineName:
    """The engine of a model-stage. Inference runs on the engine that trains: its numbers must agree."""
    return config.engines.generation if role == "generation" else config.engines.training


def with_sharing(stages: Mapping[str, StageSpec]) -> dict[str, StageSpec]:
    """The model-stages with generation on the arenas that training writes, where it can read them: the units
    are the same, both engines store weights alike, and no adapters are to be added to them.
    """
    training, generation = stages[TRAINING], stages[GENERATION]
    engines = Engines(training=training.engine, generation=generation.engine)
    alike = engines.share_weights and training.model.lora is None
    shares = TRAINING if alike and generation.units == training.units else None
    return {**stages, GENERATION: replace(generation, shares=shares)}


def _units(
    config: CampaignConfig, plan: PlanConfig, name: str, model: DecoderConfig, engine: EngineName
) -> tuple[Layout, ...]:
    stage = plan.stage(name)
    spec, size = decoder_spec(model), stage.num_gpus // stage.dp
    try:
        units = tuple(
            Layout.make(
                spec,
                tp=stage.tp,
                pp=stage.pp,
                ep=stage.ep,
                cp=stage.cp,
                ranks=stage.gpu_ids[at : at + size],
                layers=stage.layers,
            )
            for at in range(0, stage.num_gpus, size)
        )
        check_layout(
            engine,
            model,
            units[0],
            on_cpu=device(config) == "cpu",
            generates=name == GENERATION,
        )
        return units
    except InvalidLayout as error:
        raise ConfigError(f"plan.{name.replace('.', '_')}: {error}") from error
