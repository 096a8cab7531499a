"""Generalized advantage estimation over the tokens that the policy produced.

Letters: b rows (responses), t response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereus.algorithms.aggregation import inside
from nereus.kernels.scan import gae_scan


@torch.no_grad()
def gae(
    rewards_bt: Tensor, values_bt: Tensor, mask_bt: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages, not whitened, and returns; both [b, t], zero where the mask is unset.

    Backward over set positions (Schulman et al. 2016, eq. 16): delta_t = r_t + gamma V_{t+1} - V_t and A_t =
    delta_t + gamma lam A_{t+1}, with t+1 the next *set* position; R_t = A_t + V_t. Unset positions (padding,
    and tool output inside a response) are stepped over: neither their reward nor their value has any
    influence. That is verl's and AReaL's definition; OpenRLHF and TRL bootstrap from the value inside a gap.
    A row ends as finished: nothing is bootstrapped after its last set position.

    Whiten the advantages of the whole batch afterwards with `aggregation.whiten`; the returns stay as they
    are.
    """
    set_bt = mask_bt.bool()
    advantages_bt = gae_scan(rewards_bt, values_bt, set_bt, gamma=gamma, lam=lam)
    return advantages_bt, inside(advantages_bt + values_bt, set_bt)
