"""How large a micro-batch of a campaign's model-stage may be, from its configuration and its plan."""

from __future__ import annotations

from nereus.config import CampaignConfig
from nereus.emu.stage import StageSpec
from nereus.tasks.micro_batches import Limit, limit_under

PADS = ("megatron", "deepspeed")  # engines that compute padding up to a micro-batch's longest row


def micro_batch_limit(config: CampaignConfig, spec: StageSpec, chosen_rows: int | None) -> Limit:
    """The limit of a model-stage; `chosen_rows` are its plan's, None where the plan leaves them open."""
    limit = configured_limit(config, pads=spec.engine in PADS)
    return limit_under(limit, chosen_rows, longest_tokens(config))


def configured_limit(config: CampaignConfig, *, pads: bool = False) -> Limit:
    """What the campaign asks for."""
    batch = config.batch
    return Limit(rows=batch.micro_batch_rows, tokens=batch.micro_batch_tokens, pads=pads)


def longest_tokens(config: CampaignConfig) -> int:
    """Tokens of the longest row there can be."""
    return config.prompts.max_tokens + config.sampling.max_new_tokens
