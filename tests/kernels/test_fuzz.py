"""Kernels against their twins over random shapes, dtypes, strides and contents, within their tolerances."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nereus.kernels.adamw import adamw_
from nereus.kernels.dispatch import VARIABLE
from nereus.kernels.language import HAS_TRITON
from nereus.kernels.regions import copy_regions
from nereus.kernels.scan import discounted_returns, gae_scan
from nereus.kernels.vocabulary import logit_gradient_, part_numbers
from nereus.kernels.whiten import masked_whiten
from tests.kernels.conftest import DEVICE

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: pip install triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),  # to infinity, as torch casts
]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SEEDS = st.integers(0, 2**31)
# The interpreter takes a second for some examples, so a failure is shown as it was found and not shrunk.
fuzz = settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


def both(call: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """The twin's result and the kernel's."""
    patch, found = pytest.MonkeyPatch(), []
    for form in ("torch", "triton"):
        patch.setenv(VARIABLE, form)
        found.append(call())
    patch.undo()
    return found[0], found[1]


def strided(x: Tensor, way: str) -> Tensor:
    """The same numbers as a view of another storage."""
    if way == "columns":
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 1, dtype=x.dtype, device=x.device)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if way == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if way == "offset":
        flat = torch.zeros(x.numel() + 3, dtype=x.dtype, device=x.device)
        flat[3:] = x.reshape(-1)
        return flat[3:].view(x.shape)
    return x


WAYS = st.sampled_from(["plain", "columns", "transposed", "offset"])


@fuzz
@given(
    m=st.integers(1, 70), h=st.integers(1, 80), v=st.integers(1, 300), dtype=st.sampled_from(FLOATS),
    way=WAYS, temperature=st.floats(0.2, 3.0), start=st.integers(0, 50), entropy=st.booleans(), seed=SEEDS,
)  # fmt: skip
def test_part_numbers(
    m: int, h: int, v: int, dtype: torch.dtype, way: str, temperature: float, start: int, entropy: bool,
    seed: int,
) -> None:  # fmt: skip
    make = torch.Generator().manual_seed(seed)
    x_mh, weight_vh = (
        strided((torch.randn(*shape, generator=make) * h**-0.25).to(dtype).to(DEVICE), way)
        for shape in ((m, h), (v, h))
    )
    targets_m = torch.randint(0, v + 60, (m,), generator=make).to(DEVICE)
    twin, kernel = both(
        lambda: part_numbers(
            x_mh, weight_vh, targets_m, start=start, temperature=temperature, entropy=entropy
        )
    )
    torch.testing.assert_close(kernel, twin, rtol=1e-5, atol=5e-5)


@fuzz
@given(
    m=st.integers(1, 20), v=st.integers(1, 2100), temperature=st.floats(0.2, 3.0), entropy=st.booleans(),
    seed=SEEDS,
)  # fmt: skip
def test_logit_gradient(m: int, v: int, temperature: float, entropy: bool, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    z_mv = torch.randn(m, v, generator=make).to(DEVICE) * 3
    targets_m = torch.randint(0, v + 5, (m,), generator=make).to(DEVICE)
    grad_m, grad_entropy_m, entropy_m = torch.randn(3, m, generator=make).to(DEVICE).unbind()
    twin, kernel = both(
        lambda: logit_gradient_(
            z_mv.clone(), z_mv.logsumexp(dim=1), targets_m, grad_m,
            entropy_m if entropy else None, grad_entropy_m if entropy else None,
            start=2, temperature=temperature,
        )
    )  # fmt: skip
    torch.testing.assert_close(kernel, twin, rtol=1e-5, atol=1e-6 / min(temperature, 1.0))


@fuzz
@given(
    b=st.integers(1, 3), t=st.integers(1, 90), density=st.floats(0.0, 1.0), dtype=st.sampled_from(FLOATS),
    way=WAYS, gamma=st.floats(0.0, 1.0), lam=st.floats(0.0, 1.0), seed=SEEDS,
)  # fmt: skip
def test_scans(
    b: int, t: int, density: float, dtype: torch.dtype, way: str, gamma: float, lam: float, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    rewards_bt, values_bt = (
        strided(torch.randn(b, t, generator=make).to(dtype).to(DEVICE), way) for _ in range(2)
    )
    set_bt = strided((torch.rand(b, t, generator=make) < density).to(DEVICE), way)
    for call in (
        lambda: gae_scan(rewards_bt, values_bt, set_bt, gamma=gamma, lam=lam),
        lambda: discounted_returns(rewards_bt, set_bt, gamma=gamma),
    ):
        twin, kernel = both(call)
        # 1e-5 of the largest value of a row, which is some ten here.
        torch.testing.assert_close(kernel, twin, rtol=1e-5, atol=1e-4)


@fuzz
@given(
    b=st.integers(1, 6), t=st.integers(1, 3000), density=st.floats(0.0, 1.0), way=WAYS, seed=SEEDS
)  # fmt: skip
def test_whitening(b: int, t: int, density: float, way: str, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    x_bt = strided(torch.randn(b, t, generator=make).to(DEVICE), way)
    set_bt = strided((torch.rand(b, t, generator=make) < density).to(DEVICE), way)
    twin, kernel = both(lambda: masked_whiten(x_bt, set_bt))
    torch.testing.assert_close(kernel, twin, rtol=1e-5, atol=1e-5)


@fuzz
@given(
    size=st.integers(1, 3000), dtype=st.sampled_from([None, *FLOATS]), step_count=st.integers(1, 500),
    rate=st.floats(1e-6, 1e-1), decay=st.floats(0.0, 0.3), tiny=st.booleans(), seed=SEEDS,
)  # fmt: skip
def test_adamw_is_bitwise(
    size: int, dtype: torch.dtype | None, step_count: int, rate: float, decay: float, tiny: bool, seed: int
) -> None:
    def step() -> Tensor:
        make = torch.Generator().manual_seed(seed)
        scale = 1e-20 if tiny else 1.0
        state = [torch.randn(size, generator=make).to(DEVICE) for _ in range(2)]
        state.append((torch.randn(size, generator=make).abs() * scale).to(DEVICE))
        grad = (torch.randn(size, generator=make) * scale).to(DEVICE)
        copy = None if dtype is None else torch.zeros(size, dtype=dtype, device=DEVICE)
        adamw_(
            state[0], grad, state[1], state[2], copy, learning_rate=rate, betas=(0.9, 0.95), eps=1e-8,
            weight_decay=decay, step_count=step_count,
        )  # fmt: skip
        return torch.cat([*state, *([] if copy is None else [copy.float()])])

    twin, kernel = both(step)
    assert torch.equal(kernel, twin)


@fuzz
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 200), st.integers(0, 40), WAYS, WAYS),
        min_size=1,
        max_size=6,
    ),
    source_dtype=st.sampled_from(FLOATS),
    target_dtype=st.sampled_from(FLOATS),
    seed=SEEDS,
)
def test_regions_are_bitwise(
    shapes: list[tuple[int, int, int, str, str]],
    source_dtype: torch.dtype,
    target_dtype: torch.dtype,
    seed: int,
) -> None:
    def copied() -> Tensor:
        make = torch.Generator().manual_seed(seed)
        pairs, storages = [], []
        for rows, columns, cut, source_way, target_way in shapes:
            lo = min(cut, columns)
            source = strided(
                torch.randn(rows, columns, generator=make).to(source_dtype).to(DEVICE), source_way
            )
            target = strided(torch.zeros(rows, columns, dtype=target_dtype, device=DEVICE), target_way)
            pairs.append((source[:, lo:], target[:, lo:]))
            storages.append(target._base if target._base is not None else target)
        copy_regions(pairs)
        return torch.cat([one.reshape(-1) for one in storages])

    twin, kernel = both(copied)
    assert torch.equal(kernel.view(torch.uint8), twin.view(torch.uint8))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3.4e38, 1e-45, -0.0])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_casts_of_edge_values_are_torchs(value: float, target: torch.dtype) -> None:
    source = torch.tensor([value, 1.0], device=DEVICE)

    def copied() -> Tensor:
        out = torch.zeros(2, dtype=target, device=DEVICE)
        copy_regions([(source, out)])
        return out

    twin, kernel = both(copied)
    assert torch.equal(kernel.isnan(), twin.isnan())
    assert torch.equal(kernel.nan_to_num(), twin.nan_to_num())
