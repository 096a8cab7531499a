"""Scans over ragged rows: Triton form, twin, and the sum that defines both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.kernels.scan import TILE, discounted_returns, gae_scan
from tests.kernels.conftest import DEVICE

Use = Callable[[str], None]


def ragged(b: int, t: int, seed: int, density: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    rewards_bt, values_bt = torch.randn(2, b, t, generator=make).unbind()
    set_bt = torch.rand(b, t, generator=make) < density
    return rewards_bt.to(DEVICE), values_bt.to(DEVICE), set_bt.to(DEVICE)


@pytest.mark.parametrize("t", [1, 2, 31, TILE, TILE + 1, 2 * TILE + 77])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.9, 1.0])
def test_the_kernel_is_the_twin_over_widths_and_gaps(use: Use, t: int, density: float) -> None:
    rewards_bt, values_bt, set_bt = ragged(3, t, t, density)
    found = []
    for form in ("torch", "triton"):
        use(form)
        found.append(gae_scan(rewards_bt, values_bt, set_bt, gamma=0.99, lam=0.95))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)  # |A| is up to some 20 here


def by_the_sum(
    rewards_bt: torch.Tensor, values_bt: torch.Tensor, set_bt: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """A_i = sum over j >= i of (gamma lam)^(j - i) delta_j, over the set positions of each row in float64."""
    out_bt = torch.zeros_like(values_bt)
    for row in range(len(set_bt)):
        at = set_bt[row].nonzero().flatten()
        r, v = rewards_bt[row, at].double(), values_bt[row, at].double()
        after = torch.cat((v[1:], v.new_zeros(1)))[: len(v)]
        delta = r + gamma * after - v
        for i in range(len(at)):
            decays = (gamma * lam) ** torch.arange(len(at) - i, device=v.device, dtype=torch.float64)
            out_bt[row, at[i]] = (decays * delta[i:]).sum().float()
    return out_bt


@settings(max_examples=25, deadline=None)
@given(
    b=st.integers(1, 4),
    t=st.integers(1, 40),
    seed=st.integers(0, 10_000),
    gamma=st.floats(0.0, 1.0),
    lam=st.floats(0.0, 1.0),
)
def test_both_forms_are_the_sum_that_defines_them(
    b: int, t: int, seed: int, gamma: float, lam: float
) -> None:
    rewards_bt, values_bt, set_bt = ragged(b, t, seed, 0.6)
    expected_bt = by_the_sum(rewards_bt, values_bt, set_bt, gamma, lam)
    patch = pytest.MonkeyPatch()
    for form in ("torch", "triton"):
        patch.setenv("NEREUS_KERNELS", form)
        torch.testing.assert_close(
            gae_scan(rewards_bt, values_bt, set_bt, gamma=gamma, lam=lam), expected_bt, rtol=1e-5, atol=1e-5
        )
    patch.undo()


@pytest.mark.parametrize("form", ["torch", "triton"])
def test_a_discounted_return_skips_what_is_unset(use: Use, form: str) -> None:
    use(form)
    rewards_bt = torch.tensor([[1.0, 100.0, 2.0, 4.0]], device=DEVICE)
    set_bt = torch.tensor([[True, False, True, True]], device=DEVICE)
    returns_bt = discounted_returns(rewards_bt, set_bt, gamma=0.5)
    torch.testing.assert_close(returns_bt.cpu(), torch.tensor([[3.0, 0.0, 4.0, 4.0]]))
