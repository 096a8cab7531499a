"""The kinds of scoring that a step's responses may need, each the forward passes of one model-stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nereus.config import CampaignConfig
from nereus.emu.batch import TokenBatch, join_rows
from nereus.emu.cluster import Call
from nereus.tasks.batch_limit import micro_batch_limit
from nereus.tasks.job import Job
from nereus.tasks.micro_batches import Limit
from nereus.tasks.stages import CRITIC, REFERENCE, REWARD, TRAINING


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """One kind: its name as a kind of work, the model-stage, the worker's method, and whether adapters are
    left out.
    """

    what: str
    stage: str
    method: Literal["score", "rewards"] = "score"
    frozen: bool = False

    def limit(self, job: Job) -> Limit:
        """The largest micro-batch of its units."""
        spec = job.stages[self.stage]
        return micro_batch_limit(job.config, spec, spec.score_rows)

    def call(self, job: Job, batch: TokenBatch, *, aside: bool = False) -> Call:
        """The call with which a unit scores these rows."""
        limit = self.limit(job)
        if self.method == "rewards":
            return Call("rewards", (self.stage, batch, limit.rows, limit.tokens), aside)
        temperature = job.config.sampling.temperature
        arguments = (self.stage, batch, limit.rows, temperature, limit.tokens, self.frozen)
        return Call("score", arguments, aside)


OF_REFERENCE = Scoring(what="score reference", stage=REFERENCE)
OF_FROZEN = Scoring(what="score frozen", stage=TRAINING, frozen=True)
OF_POLICY = Scoring(what="score policy", stage=TRAINING)
OF_VALUES = Scoring(what="score values", stage=CRITIC)
OF_REWARDS = Scoring(what="score rewards", stage=REWARD, method="rewards")


def reference_scoring(config: CampaignConfig) -> Scoring:
    """By a model of its own, or by the actor without its adapters."""
    return OF_FROZEN if config.scores_reference_frozen else OF_REFERENCE


def scorings_of(config: CampaignConfig) -> tuple[Scoring, ...]:
    """All that a step of the campaign needs."""
    needed = (
        (config.reward.kind == "model", OF_REWARDS),
        (config.algorithm.kl is not None, reference_scoring(config)),
        (config.rescores, OF_POLICY),
        (config.algorithm.kind == "ppo", OF_VALUES),
    )
    return tuple(scoring for is_needed, scoring in needed if is_needed)


def early_name(what: str) -> str:
    """The name in a step's statistics of the share of rows that was scored early by this kind of work."""
    return f"early/{what.removeprefix('score ')}"


def by_length(batch: TokenBatch) -> Tensor:
    """Rows longest first, so that units and micro-batches get rows of like length."""
    return torch.argsort(batch.prompt_lens_b + batch.response_lens_b, descending=True, stable=True)


def joined(parts: Sequence[Any], order: Tensor) -> Any:
    """What units found for their rows, as one: `Scores`, or a tensor of rewards."""
    return torch.cat(list(parts))[order] if isinstance(parts[0], Tensor) else join_rows(parts, order)
