"""Corrections for samples of another policy: golden weights, bounds, rejection, denominators."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from verl_golden import Golden

from nereus.algorithms.aggregation import GlobalCounts
from nereus.algorithms.correction import (
    REJECT_LEVELS,
    Correction,
    Rejection,
    RejectLevel,
    importance_weights,
    keeps_negative,
)
from nereus.algorithms.ppo import ClippedSurrogate
from nereus.algorithms.surrogate import policy_loss


def golden_weights(golden: Golden, correction: Correction) -> Tensor:
    return correction.weights(
        golden.input("log_prob"),
        golden.input("old_log_prob"),
        golden.input("rollout_log_prob"),
        torch.tensor(golden["grpo_stdTrue"]),
        golden.mask_bt,
    )


@pytest.mark.parametrize(
    ("key", "correction"),
    [
        ("tis_weights_token_1.1", Correction(high=1.1)),
        ("tis_weights_sequence_1.1", Correction(weight="sequence", high=1.1)),
        ("icepop_weights_0.9_1.1", Correction(low=0.9, high=1.1, beyond="drop")),
    ],
)
def test_weights_equal_verl(golden: Golden, key: str, correction: Correction) -> None:
    expected_bt = torch.tensor(golden[key])
    torch.testing.assert_close(golden_weights(golden, correction), expected_bt, atol=1e-6, rtol=0)


def test_decoupled_loss_and_gradient_equal_verl(golden: Golden) -> None:
    expected = golden["decoupled_ppo_token_tis1.1"]
    logprobs_bt = golden.input("log_prob").requires_grad_()
    loss, _ = policy_loss(
        ClippedSurrogate(clip_low=0.2, clip_high=0.2, dual_clip=3.0),
        logprobs_bt,
        golden.input("old_log_prob"),
        torch.tensor(golden["grpo_stdTrue"]),
        golden.mask_bt,
        counts=GlobalCounts.from_mask(golden.mask_bt),
        aggregation="token-mean",
        weights_bt=golden_weights(golden, Correction(high=1.1)),
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    torch.testing.assert_close(logprobs_bt.grad, torch.tensor(expected["grad"]), atol=1e-6, rtol=0)


def test_rows_of_negative_advantage_that_drifted_are_dropped_as_in_trl(
    golden: Golden, trl: dict[str, Any]
) -> None:
    expected_b1 = torch.tensor(trl["off_policy_seq_mask_delta0.05"]).bool()
    keeps_bt = keeps_negative(
        golden.input("log_prob"),
        golden.input("old_log_prob"),
        torch.tensor(golden["grpo_stdTrue"]),
        golden.mask_bt,
        0.05,
    )
    set_bt = golden.mask_bt.bool()
    assert torch.equal(keeps_bt[set_bt], expected_b1.expand(set_bt.shape)[set_bt])


def test_without_bounds_the_weight_is_the_plain_ratio() -> None:
    proximal_bt, behaviour_bt = torch.tensor([[0.0, -1.0, 50.0]]), torch.tensor([[-2.0, 0.0, 0.0]])
    ones_bt = torch.ones(1, 3)
    got_bt = Correction().weights(proximal_bt, proximal_bt, behaviour_bt, ones_bt, ones_bt)
    assert got_bt[0].tolist() == pytest.approx([math.exp(2), math.exp(-1), math.exp(20)], rel=1e-5)
    row_bt = importance_weights(proximal_bt[:, :2], behaviour_bt[:, :2], ones_bt[:, :2], "sequence")
    assert row_bt[0].tolist() == pytest.approx([math.exp(1)] * 2)


LOG_W = torch.tensor([[0.1, -0.4, 0.0], [1.0, 0.2, torch.nan]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize(
    ("rejection", "kept"),
    [
        (Rejection(low=0.7, high=1.2), [1, 0, 1, 0, 0]),
        (Rejection(measure="k2", high=0.07), [1, 0, 1, 0, 1]),
        (Rejection(measure="k3", high=0.06), [1, 0, 1, 0, 1]),
        (Rejection(level="sequence-sum", low=0.5, high=2.0), [1, 1, 1, 0, 0]),
        (Rejection(level="sequence-mean", low=0.5, high=2.0), [1, 1, 1, 1, 1]),
        (Rejection(level="sequence-mean", low=0.95, high=2.0), [0, 0, 0, 1, 1]),
        (Rejection(measure="k2", level="sequence-max", high=0.1), [1, 1, 1, 0, 0]),
        (Rejection(measure="k3", level="sequence-sum", high=0.5), [1, 1, 1, 0, 0]),
    ],
)
def test_what_lies_out_of_bounds_is_dropped(rejection: Rejection, kept: list[int]) -> None:
    zeros_bt = torch.zeros(2, 3)
    correction = Correction(weight="none", rejection=rejection)
    weights_bt = correction.weights(zeros_bt, LOG_W, zeros_bt, zeros_bt, MASK)
    assert weights_bt[MASK.bool()].tolist() == kept
    assert weights_bt[1, 2].item() == 0.0


def test_dropped_tokens_stay_in_the_denominator() -> None:
    """Four tokens, one dropped: the others' loss is divided by four, as before anything was dropped."""
    logprobs_bt, ones_bt = torch.zeros(1, 4, requires_grad=True), torch.ones(1, 4)
    weights_bt = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    loss, _ = policy_loss(
        ClippedSurrogate(clip_low=0.2, clip_high=0.2),
        logprobs_bt,
        torch.zeros(1, 4),
        ones_bt,
        ones_bt,
        counts=GlobalCounts.from_mask(ones_bt),
        aggregation="token-mean",
        weights_bt=weights_bt,
    )
    loss.backward()
    assert loss.item() == pytest.approx(-0.75)
    assert logprobs_bt.grad is not None
    assert logprobs_bt.grad[0].tolist() == pytest.approx([-0.25, -0.25, -0.25, 0.0])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    level=st.sampled_from(REJECT_LEVELS),
    low=st.floats(0.1, 1.0),
    high=st.floats(1.0, 3.0),
)
def test_the_same_policy_is_weighted_by_one_and_nothing_is_dropped(
    seed: int, level: RejectLevel, low: float, high: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logprobs_bt = torch.randn(3, 5, generator=draw)
    mask_bt = torch.rand(3, 5, generator=draw) > 0.3
    rejection = Rejection(level=level, low=low, high=high)
    for beyond in ("cap", "drop"):
        correction = Correction(low=low, high=high, beyond=beyond, rejection=rejection, negative_limit=0.0)
        got_bt = correction.weights(
            logprobs_bt, logprobs_bt, logprobs_bt, torch.randn(3, 5, generator=draw), mask_bt
        )
        assert torch.equal(got_bt, mask_bt.float())
