"""The index arithmetic of one micro-batch: which tokens are computed, and where results go.

Letters: b rows, s tokens of a row, t response positions, n computed tokens, m tokens whose hidden state is
used.

The token at place p predicts the one at p + 1, so a response token is read off its predecessor: only those
hidden states reach the head, prompts and padding cost no logits, and a row's last token is not computed at
all. Where padding is more than a tenth, the tokens that count are packed together and only attention sees
rows, block by block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from nereus.emu.batch import TokenBatch
from nereus.emu.engines.torch.attention import CausalAttention, row_blocks
from nereus.emu.engines.torch.ring_attention import RingAttention, parts_of
from nereus.emu.engines.torch.token_share import TokenShare
from nereus.errors import DataError, explain

DENSE_ABOVE = 0.9  # share of real tokens above which moving rows about costs more than computing the padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One micro-batch as the trunk and the head read it.

    `tokens_n` and `positions_n` are the trunk's inputs, `attend` its attention. `select_m` are the tokens
    whose hidden state is used, `targets_m` the token each predicts, and `places_m` where its result goes in
    the flattened [b, t] output. `balance` weighs the loss that evens the load of experts.
    """

    tokens_n: Tensor
    positions_n: Tensor
    attend: CausalAttention | RingAttention
    select_m: Tensor
    targets_m: Tensor
    places_m: Tensor
    num_rows: int
    num_responses: int
    balance: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Computed tokens n."""
        return int(self.tokens_n.shape[0])

    @property
    def causal(self) -> CausalAttention:
        """The attention of whole rows: they are not divided along cp."""
        assert isinstance(self.attend, CausalAttention), "rows are divided along cp"
        return self.attend

    def to(self, device: torch.device) -> Packed:
        """The same micro-batch on another device."""
        if device == self.tokens_n.device:
            return self
        return replace(
            self,
            tokens_n=self.tokens_n.to(device),
            positions_n=self.positions_n.to(device),
            select_m=self.select_m.to(device),
            targets_m=self.targets_m.to(device),
            places_m=self.places_m.to(device),
            attend=self.attend.to(device),
        )


WHOLE = TokenShare()


def pack(
    batch: TokenBatch, read: Literal["response", "last"] = "response", share: TokenShare = WHOLE
) -> Packed:
    """Index a micro-batch; `read` chooses the predecessors of response tokens or each row's last token.

    Along cp the tokens are those of `share`, and results are zero where they are read off another rank's
    token. For "last" the output is [b, 1]. Raises DataError for a response without a prompt: nothing predicts
    its first token.
    """
    prompt_b, response_b = batch.prompt_lens_b, batch.response_lens_b
    if bool(((prompt_b < 1) & (response_b > 0)).any()):
        raise DataError(
            explain(
                "cannot score a response",
                values=f"prompt lengths {prompt_b.tolist()}",
                rule="every response needs at least one prompt token before it",
                remedy="begin the prompt with the tokenizer's bos token",
            )
        )
    if read == "last":
        lens_b = prompt_b + response_b
        first_b, count_b, num_columns = (lens_b - 1).clamp(min=0), (lens_b > 0).long(), 1
    else:
        lens_b = torch.where(response_b > 0, prompt_b + response_b - 1, 0)
        first_b, count_b, num_columns = prompt_b - 1, response_b, batch.max_response
    width = max(1, int(lens_b.max()))
    columns_t = torch.arange(num_columns)
    chosen_bt = columns_t < count_b[:, None]
    row_b1 = torch.arange(batch.num_rows)[:, None]
    select_m = (row_b1 * width + first_b[:, None] + columns_t)[chosen_bt]
    follower_bt = first_b[:, None] + columns_t + (read == "response")
    targets_m = batch.tokens_bs.gather(1, follower_bt.clamp(0, batch.tokens_bs.shape[1] - 1))[chosen_bt]
    places_m = chosen_bt.flatten().nonzero().squeeze(1)
    if share.cp > 1:
        part_n, attend = _part(lens_b.tolist(), width, share)
        packed_at = torch.full((batch.num_rows * width,), -1)
        packed_at[part_n] = torch.arange(len(part_n))
        mine_m = (packed_at[select_m] >= 0) & (not attend.has_spare)
        return Packed(
            tokens_n=batch.tokens_bs[:, :width].flatten()[part_n],
            positions_n=part_n % width,
            attend=attend,
            select_m=packed_at[select_m][mine_m],
            targets_m=targets_m[mine_m],
            places_m=places_m[mine_m],
            num_rows=batch.num_rows,
            num_responses=num_columns,
        )
    tokens_n, positions_n, places_n = _tokens(batch.tokens_bs[:, :width], lens_b)
    if places_n is not None:
        packed_at = torch.zeros(batch.num_rows * width, dtype=torch.long)
        packed_at[places_n] = torch.arange(len(places_n))
        select_m = packed_at[select_m]
    return Packed(
        tokens_n=tokens_n,
        positions_n=positions_n,
        attend=_attention(batch.num_rows, width, places_n),
        select_m=select_m,
        targets_m=targets_m,
        places_m=places_m,
        num_rows=batch.num_rows,
        num_responses=num_columns,
    )


def _part(lens: list[int], width: int, share: TokenShare) -> tuple[Tensor, RingAttention]:
    """Where this rank's tokens sit in the padded rows, and their attention."""
    parts = [[parts_of(num, share.cp, rank) for num in lens] for rank in range(share.cp)]
    spans = [
        torch.arange(row * width + lo, row * width + hi)
        for row, both in enumerate(parts[share.part])
        for lo, hi in both
    ]
    places_n = torch.cat(spans)
    has_spare = not len(places_n)
    attend = RingAttention(
        group=share.cp_group,
        here=share.part,
        parts=tuple(
            tuple((early[1] - early[0], late[1] - late[0]) for early, late in rows) for rows in parts
        ),
        width=width,
        has_spare=has_spare,
    )
    return torch.zeros(1, dtype=torch.long) if has_spare else places_n, attend


def _attention(num_rows: int, width: int, places_n: Tensor | None) -> CausalAttention:
    if places_n is None:
        return CausalAttention(num_rows=num_rows, width=width)
    lens = torch.bincount(places_n // width, minlength=num_rows).tolist()
    return CausalAttention(num_rows=num_rows, width=width, places_n=places_n, blocks=row_blocks(lens))


def _tokens(tokens_bs: Tensor, lens_b: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, positions and, where it pays, the places in the padded rows of the tokens that count."""
    num_rows, width = tokens_bs.shape
    positions_s = torch.arange(width)
    if int(lens_b.sum()) >= DENSE_ABOVE * num_rows * width:
        return tokens_bs.flatten(), positions_s.repeat(num_rows), None
    real_bs = positions_s < lens_b[:, None]
    real_bs[0, 0] = True  # a micro-batch of empty rows still runs, so that every rank joins every collective
    places_n = real_bs.flatten().nonzero().squeeze(1)
    return tokens_bs.flatten()[places_n], places_n % width, places_n
