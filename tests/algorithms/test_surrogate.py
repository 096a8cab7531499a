"""The policy's loss against verl and TRL number by number, and what it does not depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from verl_golden import Golden

from nereus.algorithms.aggregation import AGGREGATIONS, Aggregation, GlobalCounts
from nereus.algorithms.cispo import ClippedWeightSurrogate
from nereus.algorithms.correction import Correction
from nereus.algorithms.gspo import SequenceSurrogate
from nereus.algorithms.ppo import ClippedSurrogate
from nereus.algorithms.surrogate import Surrogate, policy_loss

CLIP = ClippedSurrogate(clip_low=0.2, clip_high=0.2)
DUAL = ClippedSurrogate(clip_low=0.2, clip_high=0.2, dual_clip=3.0)
GSPO = SequenceSurrogate(clip_low=0.2, clip_high=0.2)
CISPO = ClippedWeightSurrogate(clip_low=0.2, clip_high=0.2)
SURROGATES: tuple[Surrogate, ...] = (CLIP, DUAL, GSPO, CISPO)


def loss_and_gradient(
    golden: Golden, surrogate: Surrogate, aggregation: Aggregation, weights_bt: Tensor | None = None
) -> tuple[float, Tensor]:
    logprobs_bt = golden.input("log_prob").requires_grad_()
    loss, _ = policy_loss(
        surrogate,
        logprobs_bt,
        golden.input("old_log_prob"),
        torch.tensor(golden["grpo_stdTrue"]),
        golden.mask_bt,
        counts=GlobalCounts.from_mask(golden.mask_bt),
        aggregation=aggregation,
        weights_bt=weights_bt,
    )
    loss.backward()
    assert logprobs_bt.grad is not None
    return loss.item(), logprobs_bt.grad


def assert_is(found: tuple[float, Tensor], expected: dict[str, Any]) -> None:
    """Equal within 1e-6: both are float32 sums of 15 terms below 1."""
    assert found[0] == pytest.approx(expected["loss"], abs=1e-6)
    torch.testing.assert_close(found[1], torch.tensor(expected["grad"]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("key", "surrogate", "aggregation"),
    [("gspo", GSPO, "seq-mean-token-mean"), ("cispo", CISPO, "token-mean")],
)
def test_loss_and_gradient_equal_verl(
    golden: Golden, key: str, surrogate: Surrogate, aggregation: Aggregation
) -> None:
    assert_is(loss_and_gradient(golden, surrogate, aggregation), golden[key])


def test_weighted_loss_and_gradient_equal_verls_decoupled_form(golden: Golden) -> None:
    expected = golden["decoupled_ppo_token_tis1.1"]
    weights_bt = torch.tensor(expected["weights"])
    assert_is(loss_and_gradient(golden, DUAL, "token-mean", weights_bt), expected)


@pytest.mark.parametrize(
    ("key", "surrogate", "aggregation"),
    [
        ("grpo", CLIP, "seq-mean-token-mean"),
        ("bnpo", CLIP, "token-mean"),
        ("dapo", CLIP, "token-mean"),
        ("dr_grpo", CLIP, "seq-mean-token-sum-norm"),
        ("grpo_sequence(GSPO)", GSPO, "seq-mean-token-mean"),
        ("luspo", GSPO, "seq-mean-token-sum"),
    ],
)
def test_loss_and_gradient_equal_trl(
    golden: Golden, trl: dict[str, Any], key: str, surrogate: Surrogate, aggregation: Aggregation
) -> None:
    assert_is(loss_and_gradient(golden, surrogate, aggregation), trl[key])


def test_trls_cispo_is_another_loss_and_its_bounds_reproduce_it(golden: Golden, trl: dict[str, Any]) -> None:
    """TRL's cap is `epsilon_high` itself, here .2, and it has no lower bound: 1 + (.2 - 1), 1 - 1."""
    same_numbers, _ = loss_and_gradient(golden, CISPO, "token-mean")
    assert abs(same_numbers - trl["cispo"]["loss"]) > 0.05
    as_trl = ClippedWeightSurrogate(clip_low=1.0, clip_high=0.2 - 1.0)
    assert_is(loss_and_gradient(golden, as_trl, "token-mean"), trl["cispo"])


def random_case(lengths: list[int], width: int, seed: int) -> tuple[Tensor, ...]:
    """Log-probabilities, old ones, behaviour's, advantages (float64) and mask, rows left-aligned."""
    draw = torch.Generator().manual_seed(seed)
    shape = (len(lengths), width)
    logprobs_bt, old_bt, behaviour_bt, advantages_bt = (
        torch.randn(shape, generator=draw, dtype=torch.float64) * scale for scale in (0.5, 0.5, 0.5, 1.0)
    )
    mask_bt = torch.arange(width) < torch.tensor(lengths)[:, None]
    return logprobs_bt, old_bt, behaviour_bt, advantages_bt, mask_bt


CASES = {
    "lengths": st.lists(st.integers(0, 9), min_size=1, max_size=6),
    "seed": st.integers(0, 999),
    "surrogate": st.sampled_from(SURROGATES),
    "aggregation": st.sampled_from(AGGREGATIONS),
    "correction": st.sampled_from(
        [None, Correction(high=1.5), Correction(weight="sequence", high=3.0, beyond="drop")]
    ),
}


def graded(
    case: tuple[Tensor, ...],
    surrogate: Surrogate,
    aggregation: Aggregation,
    correction: Correction | None,
    counts: GlobalCounts,
) -> tuple[Tensor, Tensor]:
    logprobs_bt, old_bt, behaviour_bt, advantages_bt, mask_bt = case
    logprobs_bt = logprobs_bt.clone().requires_grad_()
    weights_bt = None
    if correction is not None:
        weights_bt = correction.weights(logprobs_bt, old_bt, behaviour_bt, advantages_bt, mask_bt)
    loss, _ = policy_loss(
        surrogate,
        logprobs_bt,
        old_bt,
        advantages_bt,
        mask_bt,
        counts=counts,
        aggregation=aggregation,
        weights_bt=weights_bt,
    )
    loss.backward()
    assert logprobs_bt.grad is not None
    return loss.detach(), logprobs_bt.grad


@settings(max_examples=60, deadline=None)
@given(shift=st.integers(0, 5), **CASES)
def test_padding_on_the_left_gives_the_loss_and_gradient_of_padding_on_the_right(
    shift: int,
    lengths: list[int],
    seed: int,
    surrogate: Surrogate,
    aggregation: Aggregation,
    correction: Correction | None,
) -> None:
    case = random_case(lengths, 9, seed)
    counts = GlobalCounts.from_mask(case[-1])
    loss, gradient_bt = graded(case, surrogate, aggregation, correction, counts)
    width = 9 + shift
    # Each row's tokens end at the last column; what was there before is NaN and outside the mask.
    moved = tuple(torch.full((len(lengths), width), torch.nan, dtype=torch.float64) for _ in range(4))
    mask_bt = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for to, source in zip(moved, case[:4], strict=True):
            to[row, width - length :] = source[row, :length]
        mask_bt[row, width - length :] = True
    other_loss, other_bt = graded((*moved, mask_bt), surrogate, aggregation, correction, counts)
    # float64: only the order of additions differs
    torch.testing.assert_close(other_loss, loss, atol=1e-12, rtol=1e-12)
    for row, length in enumerate(lengths):
        expected = gradient_bt[row, :length]
        torch.testing.assert_close(other_bt[row, width - length :], expected, atol=1e-12, rtol=1e-12)
        assert not other_bt[row, : width - length].any()


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(1, 5), max_size=4), data=st.data(), **CASES)
def test_loss_and_gradient_add_up_over_any_cut_into_micro_batches(
    cuts: list[int],
    data: st.DataObject,
    lengths: list[int],
    seed: int,
    surrogate: Surrogate,
    aggregation: Aggregation,
    correction: Correction | None,
) -> None:
    case = random_case(lengths, 9, seed)
    counts = GlobalCounts.from_mask(case[-1])
    loss, gradient_bt = graded(case, surrogate, aggregation, correction, counts)
    order = torch.tensor(data.draw(st.permutations(range(len(lengths)))))
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.tensor_split(order, sorted(cuts)):
        part = tuple(x_bt[rows] for x_bt in case)
        share, share_bt = graded(part, surrogate, aggregation, correction, counts)
        total += share
        torch.testing.assert_close(share_bt, gradient_bt[rows], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(total, loss, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("surrogate", SURROGATES, ids=["clip", "dual-clip", "gspo", "cispo"])
def test_on_policy_every_surrogate_has_the_gradient_of_reinforce(surrogate: Surrogate) -> None:
    logprobs_bt, _, _, _, mask_bt = random_case([4, 2, 0], 4, 1)
    row_advantages_bt = torch.tensor([[1.0], [-2.0], [3.0]], dtype=torch.float64).expand(3, 4)
    case = (logprobs_bt, logprobs_bt, logprobs_bt, row_advantages_bt, mask_bt)
    counts = GlobalCounts.from_mask(mask_bt)
    _, gradient_bt = graded(case, surrogate, "token-mean", None, counts)
    torch.testing.assert_close(gradient_bt, -row_advantages_bt * mask_bt / 6)
