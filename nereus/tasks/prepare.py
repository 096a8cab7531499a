"""Everything that can be known before an actor starts: models, layouts, prompts, and whether they fit.

`prepare_campaign` reads files and computes; it starts nothing. Whatever it does not refuse, the cluster can
build.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from nereus.config import CampaignConfig
from nereus.data.dataset import PromptDataset, load_prompts
from nereus.data.order import PromptOrder
from nereus.data.tokenizer import Tokenizer, load_tokenizer
from nereus.emu.decoder import DecoderConfig
from nereus.emu.stage import StageSpec
from nereus.errors import ConfigError, explain
from nereus.record.loggers import check_installed
from nereus.tasks.stages import TRAINING, StageModel, read_models, stages_under


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A campaign that was checked: its models, its prompts, its tokenizer."""

    config: CampaignConfig
    models: dict[str, StageModel]
    tokenizer: Tokenizer
    prompts: PromptDataset
    order: PromptOrder
    stop_token_ids: tuple[int, ...]
    held_out: PromptDataset | None = None
    """The prompts of evaluations."""

    @property
    def digest(self) -> str:
        """Names what a position in the data depends on: the prompts, their order, the seed."""
        key = (self.prompts.fingerprint, self.config.seed, self.config.prompts.shuffle)
        return hashlib.sha256(repr(key).encode()).hexdigest()

    @property
    def steps_per_epoch(self) -> float:
        """Steps that one pass over the prompts takes."""
        return self.prompts.num_prompts / self.config.batch.prompts

    def stages_at(self, step: int) -> dict[str, StageSpec]:
        """The model-stages under the plan that is in force in a step, in building order."""
        return stages_under(self.config, self.config.plan_at(step), self.models)

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
        if self.held_out is not None:
            told = f"{self.held_out.num_prompts} prompts, longest {self.held_out.longest} tokens"
            rows.append(("evaluation", told))
        if self.prompts.num_skipped or self.prompts.num_truncated:
            left_out = f"{self.prompts.num_skipped} skipped, {self.prompts.num_truncated} truncated"
            rows.append(("too long", left_out))
        for stage in self.stages_at(0).values():
            size = f"{stage.model.num_parameters:,} parameters, {stage.model.dtype}"
            if stage.model.lora is not None:
                size += f", {stage.trained.num_elements:,} of them trained"
            plan = "as the planner chooses" if config.adaptation else stage.text
            rows.append((stage.name, f"{plan} ({size})"))
        for change in self.config.changes:
            stages = self.stages_at(change.before_step).values()
            text = "; ".join(f"{stage.name} {stage.text}" for stage in stages)
            rows.append((f"before step {change.before_step}", text))
        return rows


def prepare_campaign(config: CampaignConfig) -> Prepared:
    """Read and check everything a campaign needs.

    Raises ModelError for a model folder, DataError for prompts or tokenizer, ConfigError for what does
    not fit together or is not installed.
    """
    check_installed(config.loggers)
    models = read_models(config)
    actor = models[TRAINING].model
    for plan in (config.plan, *(change.plan for change in config.changes)):
        stages_under(config, plan, models)
    tokenizer = load_tokenizer(Path(config.models.tokenizer or config.models.actor))
    prompts = load_prompts(config.prompts, tokenizer)
    _check_lengths(config, actor, prompts)
    held_out = _held_out(config, tokenizer)
    if held_out is not None:
        _check_lengths(config, actor, held_out)
    ends = () if config.sampling.ignore_eos else (*tokenizer.eos_token_ids, *actor.eos_token_ids)
    stop = {*ends, *config.sampling.stop_token_ids}
    return Prepared(
        config=config,
        models=models,
        tokenizer=tokenizer,
        prompts=prompts,
        order=prompts.order(seed=config.seed, shuffle=config.prompts.shuffle),
        stop_token_ids=tuple(sorted(stop)),
        held_out=held_out,
    )


def _held_out(config: CampaignConfig, tokenizer: Tokenizer) -> PromptDataset | None:
    """The prompts of evaluations, read as the campaign's own are."""
    if config.evaluation is None:
        return None
    return load_prompts(config.prompts.model_copy(update={"source": config.evaluation.source}), tokenizer)


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
