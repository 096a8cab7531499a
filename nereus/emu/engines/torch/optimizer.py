"""AdamW over flat arenas (Loshchilov and Hutter 2019, algorithm 2), one call a step whatever the model.

The update is elementwise over contiguous tensors, so its bits do not depend on how a model is cut. Weight
decay applies to every weight, as in torch and verl. Half-precision weights are rounded copies of a float32
master. On a GPU one kernel makes the whole pass, rounded copy included; on a CPU torch's fused form is the
faster one. The two agree to float32 rounding (tests/emu/engines/test_optimizer.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from nereus.emu.arena import ShardState
from nereus.kernels.adamw import adamw_
from nereus.kernels.dispatch import runs_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Settings of the optimizer. `max_gradient_norm` clips by the global norm; None does not clip."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_gradient_norm: float | None = 1.0


def clip(grad: Tensor, norm: float, max_norm: float | None) -> None:
    """Scale `grad` in place so that its global norm, given as `norm`, is at most `max_norm`."""
    if max_norm is not None and norm > max_norm:
        grad.mul_(max_norm / (norm + 1e-6))  # torch's clip_grad_norm_ adds the same constant


def step(state: ShardState, grad: Tensor, settings: AdamW, *, learning_rate: float, step_count: int) -> None:
    """Step number `step_count` (from 1): moments, then weights, in place; `grad` is a flat float32 arena."""
    weights = state["master"] if "master" in state.arenas else state["theta"]
    if runs_triton(weights.flat):
        adamw_(
            weights.flat,
            grad,
            state["exp_avg"].flat,
            state["exp_avg_sq"].flat,
            None if weights is state["theta"] else state["theta"].flat,
            learning_rate=learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            step_count=step_count,
        )
        return
    adamw(
        [weights.flat],
        [grad],
        [state["exp_avg"].flat],
        [state["exp_avg_sq"].flat],
        [],
        # torch counts steps on the weights' device and adds one itself.
        [torch.tensor(float(step_count - 1), device=weights.flat.device)],
        foreach=False,
        fused=True,
        amsgrad=False,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        lr=learning_rate,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        maximize=False,
    )
    if weights is not state["theta"]:
        state["theta"].flat.copy_(weights.flat)
