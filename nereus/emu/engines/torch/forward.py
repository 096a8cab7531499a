"""One micro-batch through one pipeline stage, and from the last stage's hidden states to scores.

Letters: b rows, t response positions, n computed tokens, m tokens whose hidden state is used, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.distributed import ProcessGroup

from nereus.emu.batch import Scores
from nereus.emu.engines.torch.model import embed, final_norm, run_layers, values
from nereus.emu.engines.torch.packing import Packed
from nereus.emu.engines.torch.rope import RopeTable
from nereus.emu.engines.torch.rows import put_rows
from nereus.emu.engines.torch.token_logprobs import token_logprobs
from nereus.emu.engines.torch.weights import StageWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage's weights and rotary table, and whether its backward pass runs the layers again. `balance` is
    the coefficient of the loss that evens the load of experts.
    """

    weights: StageWeights
    table: RopeTable
    recompute: bool = False
    balance: float = 0.0

    @property
    def is_first(self) -> bool:
        """Whether tokens enter here."""
        return self.weights.embed is not None

    @property
    def is_last(self) -> bool:
        """Whether scores leave here."""
        return self.weights.norm is not None


def through_stage(stage: Stage, packed: Packed, x_nh: Tensor | None) -> Tensor:
    """Hidden states that leave the stage: [n, h], or [m, h] from the last one.

    `x_nh` comes from the previous stage; None on the first, which embeds the tokens.
    """
    weights = stage.weights
    if packed.balance:
        weights = replace(weights, ep=replace(weights.ep, balance=packed.balance))
    if x_nh is None:
        x_nh = embed(packed.tokens_n, weights)
    rotation = stage.table.at(packed.positions_n, packed.attend.width)
    return run_layers(
        x_nh,
        weights,
        rotation,
        packed.attend,
        select_m=packed.select_m if stage.is_last else None,
        recompute=stage.recompute,
    )


def scores_of(stage: Stage, packed: Packed, x_mh: Tensor, *, temperature: float, entropy: bool) -> Scores:
    """Log-probabilities and entropy, or values, of the tokens that `packed` reads; [b, t] float32."""
    weights = stage.weights
    x_mh = final_norm(x_mh, weights)
    return head_scores(
        x_mh,
        packed,
        head=weights.head,
        score=weights.score,
        vocab_start=weights.vocab[0],
        group=weights.tp,
        temperature=temperature,
        entropy=entropy,
    )


def head_scores(
    x_mh: Tensor,
    packed: Packed,
    *,
    head: Tensor | None,
    score: Tensor | None,
    vocab_start: int,
    group: ProcessGroup | None,
    temperature: float,
    entropy: bool,
) -> Scores:
    """What a head makes of normed hidden states: `head` [v, h] without pad rows, or else the value head."""
    if head is None:
        assert score is not None, "only the last stage has a head"
        return Scores(values_bt=_rows(values(x_mh, score), packed))
    logprobs_m, entropy_m = token_logprobs(
        x_mh,
        head,
        packed.targets_m,
        vocab_start=vocab_start,
        temperature=temperature,
        entropy=entropy,
        group=group,
    )
    return Scores(
        logprobs_bt=_rows(logprobs_m, packed),
        entropy_bt=None if entropy_m is None else _rows(entropy_m, packed),
    )


def _rows(x_m: Tensor, packed: Packed) -> Tensor:
    num_rows, num_columns = packed.num_rows, packed.num_responses
    return put_rows(x_m, packed.places_m, num_rows * num_columns).view(num_rows, num_columns)
