"""Everything that can be known before an actor starts: models, layouts, prompts, and whether they fit
together.

`prepare_campaign` reads files and computes; it starts nothing. Whatever it does not refuse, the cluster
can build.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from nereus.config import CampaignConfig
from nereus.data.dataset import PromptDataset, load_prompts
from nereus.data.order import PromptOrder
from nereus.data.tokenizer import Tokenizer, load_tokenizer
from nereus.emu.decoder import DecoderConfig, Head, decoder_spec
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.hf_folder import HFSource
from nereus.emu.layout import Layout
from nereus.emu.stage import FromFolder, FromStage, Role, StageSpec
from nereus.errors import ConfigError, InvalidLayout, explain


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A campaign that was checked: its model-stages in building order, its prompts, its tokenizer."""

    config: CampaignConfig
    stages: tuple[StageSpec, ...]
    tokenizer: Tokenizer
    prompts: PromptDataset
    order: PromptOrder
    stop_token_ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Names what a position in the data depends on: the prompts, their order, the seed."""
        key = (self.prompts.fingerprint, self.config.seed, self.config.prompts.shuffle)
        return hashlib.sha256(repr(key).encode()).hexdigest()

    @property
    def steps_per_epoch(self) -> float:
        """Steps that one pass over the prompts takes."""
        return self.prompts.num_prompts / self.config.batch.prompts

    def summary(self) -> list[tuple[str, str]]:
        """What will run, as (label, text) rows for a table."""
        config = self.config
        batch = config.batch
        rows = [
            ("algorithm", config.algorithm.kind),
            ("steps", f"{config.steps} ({config.steps / self.steps_per_epoch:.2f} epochs)"),
            ("prompts", f"{self.prompts.num_prompts}, longest {self.prompts.longest} tokens"),
            ("batch", f"{batch.prompts} prompts x {batch.samples} samples = {config.rows} rows"),
        ]
        if self.prompts.num_skipped or self.prompts.num_truncated:
            left_out = f"{self.prompts.num_skipped} skipped, {self.prompts.num_truncated} truncated"
            rows.append(("too long", left_out))
        for stage in self.stages:
            size = f"{stage.model.num_parameters:,} parameters, {stage.model.dtype}"
            rows.append((stage.name, f"{stage.text} ({size})"))
        return rows


def prepare_campaign(config: CampaignConfig) -> Prepared:
    """Read and check everything a campaign needs.

    Raises ModelError for a model folder, DataError for prompts or tokenizer, ConfigError for what does
    not fit together.
    """
    stages = plan_stages(config)
    actor = stages[0].model
    tokenizer = load_tokenizer(Path(config.models.tokenizer or config.models.actor))
    prompts = load_prompts(config.prompts, tokenizer)
    _check_lengths(config, actor, prompts)
    ends = () if config.sampling.ignore_eos else (*tokenizer.eos_token_ids, *actor.eos_token_ids)
    stop = {*ends, *config.sampling.stop_token_ids}
    return Prepared(
        config=config,
        stages=stages,
        tokenizer=tokenizer,
        prompts=prompts,
        order=prompts.order(seed=config.seed, shuffle=config.prompts.shuffle),
        stop_token_ids=tuple(sorted(stop)),
    )


def plan_stages(config: CampaignConfig) -> tuple[StageSpec, ...]:
    """The model-stages in the order in which they are built: training first, since generation may share
    it.
    """
    models = config.models
    policy = _model(models.actor, config)
    training = _stage(config, "actor.training", "training", policy, Path(models.actor))
    out = [training, _generation(config, training)]
    if config.algorithm.kind == "ppo":
        folder = models.critic or models.actor
        critic = _model(folder, config, "value", config.seed)
        out.append(_stage(config, "critic.training", "training", critic, Path(folder)))
    if config.algorithm.kl is not None:
        folder = models.reference or models.actor
        reference = _model(folder, config)
        out.append(_stage(config, "reference.inference", "inference", reference, Path(folder)))
    if config.reward.kind == "model":
        reward = _model(config.reward.path, config, "value")
        out.append(_stage(config, "reward.inference", "inference", reward, Path(config.reward.path)))
    for stage in out[2:]:
        if stage.model.vocab_size < policy.vocab_size:
            raise ConfigError(
                explain(
                    f"cannot score responses with {stage.name}",
                    values=f"it has {stage.model.vocab_size} tokens, the actor {policy.vocab_size}",
                    rule="all models read the actor's token ids",
                    remedy="use models of one tokenizer family",
                )
            )
    return tuple(out)


def _model(folder: str, config: CampaignConfig, head: Head = "lm", seed: int | None = None) -> DecoderConfig:
    """The model of a folder whose tensors were checked by name and shape, in the campaign's precision."""
    source = HFSource(Path(folder), head=head, value_head_seed=seed)
    return source.config.with_dtype(config.models.precision.value)


def _stage(config: CampaignConfig, name: str, role: Role, model: DecoderConfig, folder: Path) -> StageSpec:
    optimizer = config.optimizer
    adam = AdamW(
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_gradient_norm=optimizer.max_gradient_norm,
    )
    return StageSpec(
        name=name,
        role=role,
        model=model,
        units=_units(config, name, model),
        origin=FromFolder(folder=folder, seed=config.seed),
        optimizer=adam if role == "training" else None,
        recompute=config.models.recompute,
    )


def _generation(config: CampaignConfig, training: StageSpec) -> StageSpec:
    """The actor's generation: it shares the weights where its units are those of training, else is synced."""
    units = _units(config, "actor.generation", training.model)
    return StageSpec(
        name="actor.generation",
        role="generation",
        model=training.model,
        units=units,
        origin=FromStage(stage=training.name),
        shares=training.name if units == training.units else None,
    )


def _units(config: CampaignConfig, name: str, model: DecoderConfig) -> tuple[Layout, ...]:
    plan = config.plan.stage(name)
    spec, size = decoder_spec(model), plan.tp * plan.pp
    try:
        return tuple(
            Layout.make(spec, tp=plan.tp, pp=plan.pp, ranks=plan.gpu_ids[at : at + size], layers=plan.layers)
            for at in range(0, plan.num_gpus, size)
        )
    except InvalidLayout as error:
        raise ConfigError(f"plan.{name.replace('.', '_')}: {error}") from error


def _check_lengths(config: CampaignConfig, actor: DecoderConfig, prompts: PromptDataset) -> None:
    longest = prompts.longest + config.sampling.max_new_tokens
    if longest > actor.max_positions:
        raise ConfigError(
            explain(
                "cannot generate responses of this length",
                values=f"longest prompt {prompts.longest} + sampling.max_new_tokens "
                f"{config.sampling.max_new_tokens} = {longest} tokens",
                rule=f"the model knows {actor.max_positions} positions",
                remedy=f"set sampling.max_new_tokens to at most {actor.max_positions - prompts.longest}, "
                "or lower prompts.max_tokens",
            )
        )
    if prompts.highest_token_id >= actor.vocab_size:
        raise ConfigError(
            explain(
                "cannot use this tokenizer with the actor",
                values=f"a prompt has token {prompts.highest_token_id}",
                rule=f"the model's vocabulary ends at {actor.vocab_size - 1}",
                remedy="set models.tokenizer to the model's own",
            )
        )
