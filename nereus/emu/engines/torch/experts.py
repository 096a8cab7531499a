"""A mixture of experts on one rank: which experts a token visits, and their outputs for it.

Letters: n tokens, e experts, k experts of a token, p visits (a token at an expert), h hidden, i this rank's
part of an expert's width.

    x_nh --router--> k experts of each token --visits by expert--> experts --back--> weighted sum of k

Expert parallelism gives every rank equally many experts. Where the ranks along ep have tokens of their own
(training, scoring) the visits travel by two all-to-alls, there and back. Where all have the same tokens
(decoding) each computes the visits at its own experts, and one all-reduce joins them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from nereus.emu.decoder import Experts
from nereus.emu.engines.torch.clock import span
from nereus.emu.engines.torch.collectives import reduce_from
from nereus.emu.engines.torch.product import product
from nereus.emu.engines.torch.rows import take_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The router [e, h] of all experts, and this rank's own ones: gate and up [e, i, h], down [e, h, i]."""

    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The ranks along ep; with `same_tokens` all of them have the same tokens. `balance` weighs the loss that
    evens the load of experts in this pass.
    """

    group: ProcessGroup | None
    same_tokens: bool = False
    balance: float = 0.0


NO_GROUP = ExpertGroup(None)


@dataclass(frozen=True, slots=True)
class Routed:
    """The experts of every token, int64 [n, k], likeliest first, their weights [n, k] in x's dtype, and the
    float32 probabilities of all experts [n, e].
    """

    experts_nk: Tensor
    weights_nk: Tensor
    probs_ne: Tensor


def route(x_nh: Tensor, router_eh: Tensor, shape: Experts) -> Routed:
    """Softmax over all experts in float32, the k likeliest of them (Qwen3-MoE, Mixtral)."""
    probs_ne = torch.nn.functional.linear(x_nh.float(), router_eh.float()).softmax(dim=-1)
    weights_nk, experts_nk = probs_ne.topk(shape.per_token, dim=-1)
    if shape.normalized:
        weights_nk = weights_nk / weights_nk.sum(dim=-1, keepdim=True)
    return Routed(experts_nk, weights_nk.to(x_nh.dtype), probs_ne)


def mixture(x_nh: Tensor, weights: ExpertWeights, shape: Experts, ep: ExpertGroup) -> Tensor:
    """The weighted sum of each token's experts, [n, h]: with tensor parallelism this rank's part of it.

    Collective over `ep`, forwards and backwards.
    """
    routed = route(x_nh, weights.router, shape)
    chosen_p = routed.experts_nk.flatten()
    order_p = chosen_p.argsort(stable=True)  # visits by expert, those of one expert by token
    counts_e = torch.bincount(chosen_p, minlength=shape.num)
    weights_nk = routed.weights_nk
    if ep.balance and torch.is_grad_enabled() and len(x_nh):
        weights_nk = _Balanced.apply(weights_nk, routed.probs_ne, counts_e, ep.balance)  # type: ignore[no-untyped-call]
    if ep.group is None:
        found_ph = _visit(x_nh, order_p, counts_e, weights, shape.per_token)
    elif ep.same_tokens:
        found_ph = _own_visits(x_nh, order_p, counts_e, weights, shape.per_token, ep.group)
    else:
        sent_ph = x_nh.index_select(0, order_p // shape.per_token)
        found_ph = _dispatched(sent_ph, counts_e, weights, ep.group)
    placed_ph = _unsorted(found_ph, order_p)
    out_nh = (placed_ph.view(-1, shape.per_token, x_nh.shape[1]) * weights_nk[..., None]).sum(dim=1)
    return reduce_from(out_nh, ep.group) if ep.same_tokens else out_nh


class _Balanced(torch.autograd.Function):
    """The weights as they are; backwards the gradient of `balance * E * sum over e of f_e * P_e` joins. f_e
    are the visits of expert e by a token, P_e is its mean probability (Fedus et al. 2021, eq. 4 to 6).
    """

    @staticmethod
    def forward(ctx: Any, weights_nk: Tensor, probs_ne: Tensor, counts_e: Tensor, balance: float) -> Tensor:
        ctx.save_for_backward(counts_e)
        ctx.num_tokens, ctx.balance = len(probs_ne), balance
        return weights_nk.view_as(weights_nk)

    @staticmethod
    def backward(ctx: Any, grad_nk: Tensor) -> tuple[Tensor | None, ...]:
        (counts_e,) = ctx.saved_tensors
        each_e = counts_e.float() * (ctx.balance * len(counts_e) / ctx.num_tokens**2)
        return grad_nk, each_e.expand(ctx.num_tokens, -1), None, None


def _unsorted(x_ph: Tensor, order_p: Tensor) -> Tensor:
    """Rows back in the order that `order_p` sorted: row i goes to place `order_p[i]`."""
    inverse_p = torch.empty_like(order_p)
    inverse_p[order_p] = torch.arange(len(order_p), device=order_p.device)
    return take_rows(x_ph, inverse_p)


def _visit(x_nh: Tensor, order_p: Tensor, counts_e: Tensor, weights: ExpertWeights, k: int) -> Tensor:
    return run_experts(x_nh.index_select(0, order_p // k), counts_e.tolist(), weights)


def _own_visits(
    x_nh: Tensor, order_p: Tensor, counts_e: Tensor, weights: ExpertWeights, k: int, group: ProcessGroup
) -> Tensor:
    """Outputs of the visits at this rank's experts, zeros for the others; no gradient is asked of them."""
    here, num_own = dist.get_rank(group), len(weights.gate)
    counts = counts_e.tolist()
    first = sum(counts[: here * num_own])
    own = counts[here * num_own : (here + 1) * num_own]
    found_ph = x_nh.new_zeros(len(order_p), x_nh.shape[1])
    mine_p = order_p[first : first + sum(own)] // k
    found_ph[first : first + sum(own)] = run_experts(x_nh.index_select(0, mine_p), own, weights)
    return found_ph


def _dispatched(sent_ph: Tensor, counts_e: Tensor, weights: ExpertWeights, group: ProcessGroup) -> Tensor:
    """Send each visit to the rank that has its expert, and fetch the outputs; [p, h] in the order sent."""
    num_ranks, num_own = dist.get_world_size(group), len(weights.gate)
    theirs_e = torch.empty_like(counts_e)  # [rank, own expert]: visits that each rank sends here
    with span("expert_parallel"):
        dist.all_to_all_single(theirs_e, counts_e, group=group)
    theirs = theirs_e.view(num_ranks, num_own)
    sends = counts_e.view(num_ranks, num_own).sum(dim=1).tolist()
    receives = theirs.sum(dim=1).tolist()
    came_ph = exchange(sent_ph, sends, receives, group)
    # They lie by rank, then by expert: bring the visits of one expert together.
    of_rank = torch.arange(num_own, device=theirs.device).repeat(num_ranks)
    order_p = of_rank.repeat_interleave(theirs.flatten()).argsort(stable=True)
    found_ph = run_experts(take_rows(came_ph, order_p), theirs.sum(dim=0).tolist(), weights)
    return exchange(_unsorted(found_ph, order_p), receives, sends, group)


def run_experts(x_ph: Tensor, counts: list[int], weights: ExpertWeights) -> Tensor:
    """Each expert on its own rows: `counts[e]` of them one after the other; [p, h]."""
    outs, at = [], 0
    experts = zip(weights.gate.unbind(), weights.up.unbind(), weights.down.unbind(), strict=True)
    for num, (gate_ih, up_ih, down_hi) in zip(counts, experts, strict=True):
        if num:
            rows = x_ph[at : at + num]
            gated = torch.nn.functional.silu(product(rows, gate_ih)) * product(rows, up_ih)
            outs.append(product(gated, down_hi))
            at += num
    # A rank that nobody visits still takes part in every collective of the backward pass.
    return torch.cat(outs) if outs else x_ph


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ph: Tensor, sends: list[int], receives: list[int], group: ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sends, receives), group
        return _all_to_all(x_ph, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, grad_ph: Tensor) -> tuple[Tensor | None, ...]:
        sends, receives = ctx.sizes
        return _all_to_all(grad_ph, receives, sends, ctx.group), None, None, None


def _all_to_all(x_ph: Tensor, sends: list[int], receives: list[int], group: ProcessGroup) -> Tensor:
    out_ph = x_ph.new_empty(sum(receives), *x_ph.shape[1:])
    with span("expert_parallel"):
        dist.all_to_all_single(out_ph, x_ph.contiguous(), receives, sends, group=group)
    return out_ph


def exchange(x_ph: Tensor, sends: list[int], receives: list[int], group: ProcessGroup) -> Tensor:
    """Give `sends[r]` rows to rank r of the group, in order, and take `receives[r]` of it."""
    if not torch.is_grad_enabled():
        return _all_to_all(x_ph, sends, receives, group)
    return _Exchange.apply(x_ph, sends, receives, group)  # type: ignore[no-any-return, no-untyped-call]
