"""Sums that run backwards over the set positions of ragged rows: GAE and discounted returns.

Letters: b rows, t positions.

Both are linear recurrences, A_t = c_t A_{t+1} + d_t with c_t = 1, d_t = 0 at unset positions. The Triton form
takes a row a program, in tiles from the end, and within a tile an associative scan (Blelloch 1990) of pairs
(c, d); its twin's loop launches a handful of kernels a position.

Tolerance of the Triton form: 1e-5 relative to the largest |A| of the row, for the sums run in another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nereus.kernels.dispatch import runs_triton
from nereus.kernels.language import jit, power_of_2, tl

TILE = 512


@torch.no_grad()
def gae_scan(rewards_bt: Tensor, values_bt: Tensor, set_bt: Tensor, *, gamma: float, lam: float) -> Tensor:
    """GAE advantages before whitening, float32 [b, t], zero at unset positions.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, with t+1 the next *set*
    position and nothing bootstrapped after the last (Schulman et al. 2016, eq. 16).
    """
    if runs_triton(values_bt):
        return _scan_triton(rewards_bt, values_bt, set_bt, gamma, gamma * lam)
    rewards_bt, values_bt = rewards_bt.float(), values_bt.float()
    advantages_bt = torch.zeros_like(values_bt)
    next_value_b = torch.zeros_like(values_bt[:, 0])
    next_advantage_b = torch.zeros_like(next_value_b)
    for t in reversed(range(values_bt.shape[1])):
        delta_b = rewards_bt[:, t] + gamma * next_value_b - values_bt[:, t]
        advantage_b = delta_b + gamma * lam * next_advantage_b
        next_value_b = torch.where(set_bt[:, t], values_bt[:, t], next_value_b)
        next_advantage_b = torch.where(set_bt[:, t], advantage_b, next_advantage_b)
        advantages_bt[:, t] = next_advantage_b
    return advantages_bt.masked_fill(~set_bt, 0.0)


@torch.no_grad()
def discounted_returns(rewards_bt: Tensor, set_bt: Tensor, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over set positions, float32 [b, t], zero at unset ones."""
    return gae_scan(rewards_bt, torch.zeros_like(rewards_bt), set_bt, gamma=gamma, lam=1.0)


@jit
def _later(value_l, found_l, value_r, found_r):
    """Of two spans in scan order the later one's nearest set value, else the earlier one's."""
    return tl.where(found_r > 0, value_r, value_l), tl.maximum(found_l, found_r)


@jit
def _compose(c_l, d_l, c_r, d_r):
    """Apply the earlier map of the scan, then the later one: A -> c_r (c_l A + d_l) + d_r."""
    return c_r * c_l, c_r * d_l + d_r


@jit
def _gae_kernel(rewards_ptr, values_ptr, set_ptr, out_ptr, width, gamma, decay, TILE: tl.constexpr) -> Any:
    row = tl.program_id(0).to(tl.int64) * width
    offsets = tl.arange(0, TILE)
    value_after = 0.0  # of the nearest set position after the tile
    advantage_after = 0.0
    for tile in range(0, tl.cdiv(width, TILE)):
        at = width - 1 - tile * TILE - offsets  # scan order: from the end of the row
        ok = at >= 0
        is_set = (tl.load(set_ptr + row + at, mask=ok, other=0) != 0) & ok
        value = tl.where(is_set, tl.load(values_ptr + row + at, mask=ok, other=0.0), 0.0)
        reward = tl.where(is_set, tl.load(rewards_ptr + row + at, mask=ok, other=0.0), 0.0)
        # The neighbour one position later, within the tile; its nearest set value is what t+1 means.
        later_ok = (offsets > 0) & (at + 1 < width)
        later_set = (tl.load(set_ptr + row + at + 1, mask=later_ok, other=0) != 0) & later_ok
        later = tl.where(later_set, tl.load(values_ptr + row + at + 1, mask=later_ok, other=0.0), 0.0)
        next_value, found = tl.associative_scan((later, later_set.to(tl.int32)), 0, _later)
        next_value = tl.where(found > 0, next_value, value_after)
        delta = tl.where(is_set, reward + gamma * next_value - value, 0.0)
        c, d = tl.associative_scan((tl.where(is_set, decay, 1.0), delta), 0, _compose)
        advantage = c * advantage_after + d
        tl.store(out_ptr + row + at, tl.where(is_set, advantage, 0.0), mask=ok)
        is_last = offsets == TILE - 1
        advantage_after = tl.sum(tl.where(is_last, advantage, 0.0), axis=0)
        last_value = tl.sum(tl.where(is_last & is_set, value, 0.0), axis=0)
        last_next = tl.sum(tl.where(is_last, next_value, 0.0), axis=0)
        last_set = tl.sum(tl.where(is_last & is_set, 1, 0), axis=0)
        value_after = tl.where(last_set > 0, last_value, last_next)


def _scan_triton(rewards_bt: Tensor, values_bt: Tensor, set_bt: Tensor, gamma: float, decay: float) -> Tensor:
    num_rows, width = values_bt.shape
    out_bt = torch.zeros(num_rows, width, dtype=torch.float32, device=values_bt.device)
    if num_rows and width:
        _gae_kernel[(num_rows,)](
            rewards_bt.float().contiguous(),
            values_bt.float().contiguous(),
            set_bt.to(torch.uint8).contiguous(),
            out_bt,
            width,
            gamma,
            decay,
            TILE=min(TILE, power_of_2(width)),
        )
    return out_bt
