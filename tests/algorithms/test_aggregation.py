"""One loss whatever the cut: global counts, zero-mask rows, NaN outside the mask, whitening."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from verl_golden import Golden

from nereus.algorithms.aggregation import (
    AGGREGATIONS,
    Aggregation,
    GlobalCounts,
    aggregate,
    token_mean,
    whiten,
)


def shares_of(num_rows: int, cuts: list[int]) -> Iterator[slice]:
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < num_rows}), num_rows]
    return (slice(a, b) for a, b in itertools.pairwise(edges))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=6),
    units=st.integers(1, 4),
    aggregation=st.sampled_from(AGGREGATIONS),
)
def test_sum_over_shares_is_the_loss_and_gradient_of_the_batch(
    lengths: list[int], cuts: list[int], units: int, aggregation: Aggregation
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths) + 7 * units)
    loss_bt = torch.randn(len(lengths), 60, generator=generator, dtype=torch.float64)
    mask_bt = torch.arange(60) < torch.tensor(lengths)[:, None]
    counts = GlobalCounts.from_mask(mask_bt)

    whole_bt = loss_bt.clone().requires_grad_()
    whole = aggregate(whole_bt, mask_bt, counts=counts, aggregation=aggregation)
    whole.backward()

    parts_bt = loss_bt.clone().requires_grad_()
    unit_losses = [torch.zeros((), dtype=torch.float64) for _ in range(units)]
    for number, share in enumerate(shares_of(len(lengths), cuts)):
        part = aggregate(parts_bt[share], mask_bt[share], counts=counts, aggregation=aggregation)
        part.backward()  # accumulates, as micro-batches do; units add the same way
        unit_losses[number % units] += part.detach()
    # float64: only the order of additions differs
    torch.testing.assert_close(sum(unit_losses), whole.detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(parts_bt.grad, whole_bt.grad, atol=1e-12, rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    row_tokens=st.sampled_from([1, 4, 10, 20, 50, 100]),
    order=st.randoms(use_true_random=False),
    cuts=st.lists(st.integers(1, 999), max_size=9),
    units=st.integers(1, 5),
)
def test_100_tokens_of_2_and_900_of_half_give_065_for_every_split(
    row_tokens: int, order: object, cuts: list[int], units: int
) -> None:
    values = [2.0] * (100 // row_tokens) + [0.5] * (900 // row_tokens)
    order.shuffle(values)  # type: ignore[attr-defined]
    loss_bt = torch.tensor(values)[:, None].expand(-1, row_tokens)
    mask_bt = torch.ones_like(loss_bt)
    counts = GlobalCounts(num_rows=len(values), num_tokens=1000)
    by_unit = [torch.zeros(()) for _ in range(units)]
    for number, share in enumerate(shares_of(len(values), cuts)):
        by_unit[number % units] += aggregate(
            loss_bt[share], mask_bt[share], counts=counts, aggregation="token-mean"
        )
    assert float(sum(by_unit)) == pytest.approx(0.65, abs=1e-6)  # float32 sums of 1000 terms


def test_local_means_would_not_give_065() -> None:
    """The error that global counts prevent: the mean of two shares' own means."""
    local_mean = (2.0 + 0.5) / 2
    assert local_mean != pytest.approx(0.65)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_all_masked_micro_batch_gives_zero_loss_and_zero_gradient(aggregation: Aggregation) -> None:
    loss_bt = torch.full((3, 5), math.nan, requires_grad=True)
    counts = GlobalCounts(num_rows=4, num_tokens=20, max_tokens=5)
    loss = aggregate(loss_bt, torch.zeros(3, 5), counts=counts, aggregation=aggregation)
    loss.backward()
    assert loss.item() == 0.0
    assert loss_bt.grad is not None
    assert torch.equal(loss_bt.grad, torch.zeros(3, 5))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_any_token_gives_zero_and_not_nan(aggregation: Aggregation) -> None:
    mask_bt = torch.zeros(2, 3)
    loss = aggregate(
        torch.ones(2, 3), mask_bt, counts=GlobalCounts.from_mask(mask_bt), aggregation=aggregation
    )
    assert loss.item() == 0.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_two_rows_on_four_units_padded_with_zero_mask_rows_give_the_same_gradient(
    aggregation: Aggregation,
) -> None:
    weight = torch.randn(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask_bt = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    inputs_bt = torch.arange(12, dtype=torch.float64).reshape(2, 6)

    def gradient(rows_of_units: list[tuple[Tensor, Tensor]], counts: GlobalCounts) -> Tensor:
        total = torch.zeros(6, dtype=torch.float64)
        for x_bt, m_bt in rows_of_units:
            w = weight.clone().requires_grad_()
            aggregate((x_bt * w).square(), m_bt, counts=counts, aggregation=aggregation).backward()
            assert w.grad is not None
            total += w.grad  # SUM over units
        return total

    counts = GlobalCounts.from_mask(mask_bt)
    padding = (torch.zeros(1, 6, dtype=torch.float64), torch.zeros(1, 6, dtype=torch.int64))
    on_four = [(inputs_bt[:1], mask_bt[:1]), (inputs_bt[1:], mask_bt[1:]), padding, padding]
    padded_mask_bt = torch.cat([m_bt for _, m_bt in on_four])
    assert GlobalCounts.from_mask(padded_mask_bt) == counts
    torch.testing.assert_close(gradient(on_four, counts), gradient([(inputs_bt, mask_bt)], counts))


def test_token_mean_equals_verl_on_the_whole_and_over_two_units(golden: Golden) -> None:
    case = golden["dp_invariance_token_mean"]
    loss_bt, mask_bt = torch.tensor(case["loss_mat"]), golden.mask_bt
    counts = GlobalCounts.from_mask(mask_bt)
    parts = [
        aggregate(loss_bt[rows], mask_bt[rows], counts=counts, aggregation="token-mean")
        for rows in (slice(0, 2), slice(2, 4))
    ]
    assert float(sum(parts)) == pytest.approx(case["full"], abs=1e-6)
    assert abs(float(sum(parts)) - case["mean_of_naive_local_means"]) > 1e-3


def test_an_engine_that_averages_gets_the_same_sum() -> None:
    loss_bt, mask_bt = torch.arange(8.0).reshape(4, 2), torch.ones(4, 2)
    counts = GlobalCounts.from_mask(mask_bt)
    averaged = replace(counts, num_averaged=2)
    whole = aggregate(loss_bt, mask_bt, counts=counts, aggregation="token-mean")
    parts = [
        aggregate(loss_bt[r], mask_bt[r], counts=averaged, aggregation="token-mean")
        for r in (slice(0, 1), slice(1, 4))
    ]
    assert float(sum(parts) / 2) == pytest.approx(float(whole))


def test_counts_add_up_over_parts_and_refuse_different_constants() -> None:
    mask_bt = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    whole = GlobalCounts.from_mask(mask_bt)
    assert (whole.num_rows, whole.num_tokens, whole.max_tokens) == (2, 3, 3)
    assert GlobalCounts.total(GlobalCounts.from_mask(mask_bt[r : r + 1]) for r in range(3)) == whole
    with pytest.raises(ValueError, match="different constants"):
        GlobalCounts.total([whole, replace(whole, max_tokens=9)])


def test_an_unknown_aggregation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="seq-mean-token-mean"):
        aggregate(
            torch.ones(1, 1),
            torch.ones(1, 1),
            counts=GlobalCounts(num_rows=1, num_tokens=1),
            aggregation="mean",  # type: ignore[arg-type]
        )


def test_statistics_add_up_to_the_mean_over_tokens() -> None:
    x_bt = torch.tensor([[1.0, math.nan], [3.0, 5.0]])
    mask_bt = torch.tensor([[1, 0], [1, 1]])
    counts = GlobalCounts.from_mask(mask_bt)
    parts = [token_mean(x_bt[r : r + 1], mask_bt[r : r + 1], counts) for r in range(2)]
    assert float(sum(parts)) == pytest.approx(3.0)


def test_whitened_values_have_mean_0_and_variance_1_over_set_positions_only() -> None:
    x_bt = torch.randn(5, 9, generator=torch.Generator().manual_seed(3))
    mask_bt = torch.rand(5, 9, generator=torch.Generator().manual_seed(4)) > 0.4
    x_bt[~mask_bt] = math.nan
    white_bt = whiten(x_bt, mask_bt)
    kept = white_bt[mask_bt]
    assert kept.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert kept.var().item() == pytest.approx(1.0, abs=1e-5)  # unbiased, as verl
    assert torch.equal(white_bt[~mask_bt], torch.zeros(int((~mask_bt).sum())))


@pytest.mark.parametrize("num_set", [0, 1])
def test_whitening_below_two_tokens_gives_zeros(num_set: int) -> None:
    mask_bt = (torch.arange(4) < num_set)[None]
    assert torch.equal(whiten(torch.full((1, 4), 7.0), mask_bt), torch.zeros(1, 4))
