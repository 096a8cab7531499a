"""The two ways of attending that decoding needs: over whole prompts, and of one new token over the cache.

Letters: b rows, u distinct prompts, s slots of a prompt, n packed tokens, q query heads and k key-value heads
of this rank, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from nereus.emu.engines.torch.attention import CausalAttention
from nereus.emu.engines.torch.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAttention:
    """Causal attention over distinct prompts that leaves their keys and values in the cache's newest slots.

    `slots_n` is where each token goes in the flattened [u, s] of prompts aligned at their ends, u * s for a
    token to drop; None when they fill it. Row `rows_b[i]` of the cache holds prompt `prompts_b[i]`, so the
    samples of one prompt share its computation.
    """

    inner: CausalAttention
    cache: KVCache
    num_prompts: int
    num_slots: int
    slots_n: Tensor | None
    rows_b: Tensor
    prompts_b: Tensor

    def __call__(self, layer: int, q_nqd: Tensor, k_nkd: Tensor, v_nkd: Tensor) -> Tensor:
        """Heads' outputs side by side, [n, q * d]."""
        self._store(self.cache.keys_lbkcd[layer], k_nkd)
        self._store(self.cache.values_lbkcd[layer], v_nkd)
        return self.inner(layer, q_nqd, k_nkd, v_nkd)

    def _store(self, target_bkcd: Tensor, x_nkd: Tensor) -> None:
        if self.slots_n is not None:
            size = self.num_prompts * self.num_slots
            empty = x_nkd.new_zeros(size + 1, *x_nkd.shape[1:])
            x_nkd = empty.index_copy_(0, self.slots_n, x_nkd)[:size]
        x_ukcd = x_nkd.reshape(self.num_prompts, self.num_slots, *x_nkd.shape[1:]).transpose(1, 2)
        end = self.cache.length
        target_bkcd[:, :, end - self.num_slots : end].index_copy_(
            0, self.rows_b, x_ukcd.index_select(0, self.prompts_b)
        )


class StepAttention:
    """Attention of one new token a row over the cache and itself; made anew for every step.

    The views of all layers are cut in one go, for cutting them layer by layer costs as much as a small matrix
    product.
    """

    def __init__(self, cache: KVCache) -> None:
        at = cache.length
        self._num_kv, self._head_dim = cache.keys_lbkcd.shape[2], cache.keys_lbkcd.shape[4]
        self._new_keys = cache.keys_lbkcd[:, :, :, at].unbind(0)
        self._new_values = cache.values_lbkcd[:, :, :, at].unbind(0)
        self._keys = cache.keys_lbkcd[:, :, :, : at + 1].unbind(0)
        self._values = cache.values_lbkcd[:, :, :, : at + 1].unbind(0)
        self._mask = None if cache.mask is None else cache.mask[..., : at + 1]

    def __call__(self, layer: int, q_nqd: Tensor, k_nkd: Tensor, v_nkd: Tensor) -> Tensor:
        """Heads' outputs side by side, [b, q * d]."""
        self._new_keys[layer].copy_(k_nkd)
        self._new_values[layer].copy_(v_nkd)
        num_rows = len(q_nqd)
        # The query heads of a kv head are the queries of one attention: grouped heads need no copy of keys.
        out_bkgd = F.scaled_dot_product_attention(
            q_nqd.view(num_rows, self._num_kv, -1, self._head_dim),
            self._keys[layer],
            self._values[layer],
            attn_mask=self._mask,
        )
        return out_bkgd.reshape(num_rows, -1)
