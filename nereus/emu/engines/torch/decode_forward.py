"""The forward passes of decoding through all stages of a unit: prompts when they enter, then a token a row.

Letters: b rows, u distinct prompts, s prompt width, n packed tokens, h hidden, v vocabulary.

    tokens --> stage 0 --x_nh--> ... --> last stage: logits, a token a row --broadcast--> every stage

Inside a stage every tensor-parallel rank gathers the same logits and so draws the same tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from nereus.emu.batch import TokenBatch
from nereus.emu.engines.torch.attention import CausalAttention
from nereus.emu.engines.torch.cached_attention import PromptAttention, StepAttention
from nereus.emu.engines.torch.forward import Stage
from nereus.emu.engines.torch.kv_cache import KVCache
from nereus.emu.engines.torch.model import embed, final_norm, full_logits, run_layers
from nereus.emu.engines.torch.packing import pack
from nereus.emu.unit_groups import UnitGroups


class DecodeForward:
    """This rank's part of the forward passes over one set of running rows, whose cache it holds.

    Collective over the unit. Logits are [b, v] on the last stage and None on the others.
    """

    def __init__(self, stage: Stage, groups: UnitGroups, *, prefill_tokens: int) -> None:
        self._stage, self._groups = stage, groups
        self._prefill_tokens = prefill_tokens
        self._place = groups.position.pp
        self._cache: KVCache | None = None
        self._sent: tuple[dist.Work, Tensor] | None = None  # the tensor lives until it has left

    @property
    def is_last(self) -> bool:
        """Whether logits come out here."""
        return self._stage.is_last

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._stage.weights.config.vocab_size

    @property
    def cache(self) -> KVCache:
        """The running rows' keys and values."""
        assert self._cache is not None, "prompts come first"
        return self._cache

    def prompts(self, tokens_bs: Tensor, lens_b: Tensor, capacity: int) -> Tensor | None:
        """Fill a new cache of `capacity` slots with right-padded prompts; logits of their first tokens."""
        weights, width = self._stage.weights, int(lens_b.max())
        self._cache = KVCache(
            num_layers=len(weights.layers),
            num_kv=weights.layers[0].num_kv,
            head_dim=weights.config.head_dim,
            pads_b=(width - lens_b).to(self._stage.table.device),
            capacity=capacity,
            dtype=self._stage.table.dtype,
        )
        self._cache.length = width
        return self._fill(tokens_bs, lens_b, torch.arange(len(lens_b)))

    def enter(self, tokens_ns: Tensor, lens_n: Tensor, rows_n: Tensor) -> Tensor | None:
        """Put other prompts into rows of the cache that are done; logits [n, v] of their first tokens.

        The rest of the cache stays, but for a shift where a prompt is longer than every row.
        """
        missing = int(lens_n.max()) - self.cache.length
        if missing > 0:
            self.cache.keep(None, self.cache.capacity + missing, lead=-missing)
        device = self._stage.table.device
        self.cache.replace(rows_n.to(device), lens_n.to(device))
        return self._fill(tokens_ns, lens_n, rows_n)

    def _fill(self, tokens_bs: Tensor, lens_b: Tensor, rows_b: Tensor) -> Tensor | None:
        """Prompts into rows `rows_b` of the cache. Equal prompts are computed once; at most `prefill_tokens`
        tokens, and at least one prompt, are computed at a time.
        """
        width, parts = int(lens_b.max()), []
        distinct, of_b = _distinct(tokens_bs[:, :width], lens_b)
        num_at_once = max(1, self._prefill_tokens // width)
        for first in range(0, distinct.num_rows, num_at_once):
            chosen = torch.arange(first, min(first + num_at_once, distinct.num_rows))
            own_b = ((of_b >= first) & (of_b < first + num_at_once)).nonzero()[:, 0]
            parts.append(
                self._prompt_chunk(distinct.select(chosen), width, rows_b[own_b], of_b[own_b] - first)
            )
        logits = [part for part in parts if part is not None]
        return torch.cat(logits).index_select(0, of_b.to(logits[0].device)) if logits else None

    def _prompt_chunk(
        self, prompts: TokenBatch, num_slots: int, rows_b: Tensor, prompts_b: Tensor
    ) -> Tensor | None:
        packed = pack(prompts.trimmed(), "last").to(self._stage.table.device)
        inner = packed.causal
        attend = PromptAttention(
            inner=inner,
            cache=self.cache,
            num_prompts=prompts.num_rows,
            num_slots=num_slots,
            slots_n=_slots(inner, packed.tokens_n.device, prompts.prompt_lens_b, num_slots),
            rows_b=rows_b.to(self._stage.table.device),
            prompts_b=prompts_b.to(self._stage.table.device),
        )
        x_nh = self._enter(packed.tokens_n)
        rotation = self._stage.table.at(packed.positions_n, inner.width)
        select_m = packed.select_m if self.is_last else None
        return self._leave(run_layers(x_nh, self._stage.weights, rotation, attend, select_m=select_m))

    def step(self, tokens_b: Tensor) -> Tensor | None:
        """Add one token to every row; logits of the next. The cache must have a free slot."""
        cache = self.cache
        x_bh = self._enter(tokens_b)
        rotation = self._stage.table.at(cache.positions, cache.length + 1)
        x_bh = run_layers(x_bh, self._stage.weights, rotation, StepAttention(cache))
        cache.length += 1
        return self._leave(x_bh)

    def agree(self, tokens_b: Tensor) -> Tensor:
        """The last stage's tokens on every stage; the others pass a tensor to receive into."""
        if self._groups.pp is not None:
            dist.broadcast(tokens_b, group=self._groups.pp, group_src=self._groups.layout.pp - 1)
        return tokens_b

    def _enter(self, tokens_n: Tensor) -> Tensor:
        weights = self._stage.weights
        if self._stage.is_first:
            return embed(tokens_n, weights)
        x_nh = torch.empty(
            len(tokens_n),
            weights.config.hidden_size,
            dtype=self._stage.table.dtype,
            device=self._stage.table.device,
        )
        dist.recv(x_nh, group=self._groups.pp, group_src=self._place - 1)
        return x_nh

    def _leave(self, x_nh: Tensor) -> Tensor | None:
        if self.is_last:
            return full_logits(final_norm(x_nh, self._stage.weights), self._stage.weights)
        self.finish()  # one message in flight: the next stage works on it while this one turns to other rows
        x_nh = x_nh.contiguous()
        work = dist.isend(x_nh, group=self._groups.pp, group_dst=self._place + 1)
        assert work is not None, "a member of the group always gets a handle"
        self._sent = (work, x_nh)
        return None

    def finish(self) -> None:
        """Wait until what was sent to the next stage has left."""
        if self._sent is not None:
            self._sent[0].wait()
            self._sent = None


def _distinct(tokens_bs: Tensor, lens_b: Tensor) -> tuple[TokenBatch, Tensor]:
    """The distinct prompts, and which of them each row has."""
    real_bs = torch.arange(tokens_bs.shape[1]) < lens_b[:, None]
    keys = torch.cat([lens_b[:, None], tokens_bs.masked_fill(~real_bs, 0)], dim=1)
    distinct, of_b = torch.unique(keys, dim=0, return_inverse=True)
    lens_u = distinct[:, 0].contiguous()
    batch = TokenBatch(
        tokens_bs=distinct[:, 1:].contiguous(), prompt_lens_b=lens_u, response_lens_b=torch.zeros_like(lens_u)
    )
    return batch, of_b


def _slots(attend: CausalAttention, device: torch.device, lens_u: Tensor, num_slots: int) -> Tensor | None:
    """Where each token goes in the flattened [u, num_slots] of prompts aligned at their ends, or one past it
    for the padding that is computed along.
    """
    width, places_n = attend.width, attend.places_n
    if bool((lens_u == num_slots).all()):
        return None
    lens_u = lens_u.to(device)
    if places_n is None:
        places_n = torch.arange(len(lens_u) * width, device=lens_u.device)
    rows_n, positions_n = places_n // width, places_n % width
    slots_n = rows_n * num_slots + num_slots - lens_u[rows_n] + positions_n
    return slots_n.where(positions_n < lens_u[rows_n], len(lens_u) * num_slots)
