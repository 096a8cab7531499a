"""Kernels over flat memory: whitening, AdamW, copies of regions; and the choice of their form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim.adamw import adamw

from nereus.errors import ConfigError
from nereus.kernels import dispatch
from nereus.kernels.adamw import adamw_
from nereus.kernels.regions import TILE, copy_regions, copy_rows
from nereus.kernels.whiten import masked_whiten
from tests.kernels.conftest import DEVICE

Use = Callable[[str], None]


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (7, 1301), (3, 5000)])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_whitening_is_the_twins_and_its_definition(use: Use, shape: tuple[int, int], offset: float) -> None:
    make = torch.Generator().manual_seed(shape[1])
    x_bt = (torch.randn(*shape, generator=make) + offset).to(DEVICE)
    set_bt = (torch.rand(*shape, generator=make) < 0.7).to(DEVICE)
    found = []
    for form in ("torch", "triton"):
        use(form)
        found.append(masked_whiten(x_bt, set_bt))
    # One unit in the last place of 1000 is 6e-5, so values around it carry that much before any sum.
    atol = 1e-5 if offset == 0 else 5e-4
    torch.testing.assert_close(*found, rtol=1e-5, atol=atol)
    if int(set_bt.sum()) > 1:
        x = x_bt[set_bt].double()
        expected = (x - x.mean()) / (x.var() + 1e-8).sqrt()
        torch.testing.assert_close(found[0][set_bt], expected.float(), rtol=1e-5, atol=atol)
    assert not found[0][~set_bt].any()


@pytest.mark.parametrize("size", [1, 1000, 5003])
@pytest.mark.parametrize("copy_dtype", [None, torch.bfloat16, torch.float16])
def test_adamw_is_bitwise_its_twin_and_near_torchs(
    use: Use, size: int, copy_dtype: torch.dtype | None
) -> None:
    results = []
    for form in ("torch", "triton", "optim"):
        make = torch.Generator().manual_seed(size)
        weights, exp_avg, exp_avg_sq = (torch.randn(size, generator=make).to(DEVICE) for _ in range(3))
        exp_avg_sq.abs_()
        copy = None if copy_dtype is None else weights.to(copy_dtype)
        for step_count in (3, 4):
            grad = torch.randn(size, generator=make).to(DEVICE)
            if form == "optim":
                adamw(
                    [weights], [grad], [exp_avg], [exp_avg_sq], [], [torch.tensor(step_count - 1.0)],
                    foreach=False, amsgrad=False, beta1=0.9, beta2=0.95, lr=1e-2, weight_decay=0.1,
                    eps=1e-8, maximize=False,
                )  # fmt: skip
                continue
            use(form)
            adamw_(
                weights, grad, exp_avg, exp_avg_sq, copy,
                learning_rate=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step_count=step_count,
            )  # fmt: skip
        results.append((weights, exp_avg, exp_avg_sq, copy))
    for twin, kernel in zip(*results[:2], strict=True):
        if twin is not None:
            assert torch.equal(twin, kernel)
    for twin, reference in zip(results[0][:3], results[2][:3], strict=True):
        torch.testing.assert_close(twin, reference, rtol=1e-5, atol=1e-6)


def regions(source_dtype: torch.dtype, target_dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    make = torch.Generator().manual_seed(3)
    bucket = torch.zeros(60_000, dtype=target_dtype, device=DEVICE)
    pairs, at = [], 0
    for rows, columns, lo, hi in (
        (7, 33, 2, 30),
        (1, 5000, 0, 5000),
        (90, 64, 0, 64),
        (64, 128, 100, 101),
        (3, 4, 4, 4),
    ):
        matrix = torch.randn(rows, columns, generator=make).to(source_dtype).to(DEVICE)
        source = matrix[:, lo:hi]
        pairs.append((source, bucket[at : at + source.numel()].view(source.shape)))
        at += source.numel() + 3
    vector = torch.randn(TILE + 1, generator=make).to(source_dtype).to(DEVICE)
    pairs.append((vector, bucket[at : at + TILE + 1]))
    return pairs


@pytest.mark.parametrize(
    ("source_dtype", "target_dtype"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_regions_arrive_bit_for_bit_and_nothing_beside_them_is_touched(
    use: Use, source_dtype: torch.dtype, target_dtype: torch.dtype
) -> None:
    found = []
    for form in ("torch", "triton"):
        use(form)
        pairs = regions(source_dtype, target_dtype)
        copy_regions(pairs)
        found.append(pairs[0][1].untyped_storage())
    assert torch.equal(
        torch.tensor([], dtype=torch.uint8, device=DEVICE).set_(found[0]),
        torch.tensor([], dtype=torch.uint8, device=DEVICE).set_(found[1]),
    )


def test_unpacking_writes_into_strided_storage(use: Use) -> None:
    use("triton")
    source = torch.arange(12.0, device=DEVICE).view(4, 3)
    target = torch.zeros(4, 8, device=DEVICE)
    transposed = torch.zeros(3, 4, device=DEVICE)
    copy_regions([(source, target[:, 2:5]), (source, transposed.t())])
    assert torch.equal(target[:, 2:5], source)
    assert float(target.sum()) == float(source.sum())
    assert torch.equal(transposed.t(), source)


@pytest.mark.parametrize(
    ("source_dtype", "target_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
)
def test_rows_of_flat_tensors_arrive_in_every_form(
    use: Use, source_dtype: torch.dtype, target_dtype: torch.dtype
) -> None:
    """A run, rows of whole words, rows that are not, single columns; the kernel takes them as regions."""
    rows = [(3, 5, 1, 70, 70, 70), (96, 128, 4, 16, 32, 16), (226, 201, 5, 3, 9, 7), (300, 250, 6, 1, 2, 8)]
    source = torch.randn(400, generator=torch.Generator().manual_seed(3)).to(source_dtype).to(DEVICE)
    expected = torch.zeros(400, dtype=target_dtype, device=DEVICE)
    for source_at, target_at, num, width, source_stride, target_stride in rows:
        for row in range(num):
            lo, at = source_at + row * source_stride, target_at + row * target_stride
            expected[at : at + width] = source[lo : lo + width].to(target_dtype)
    for form in ("torch", "triton"):
        use(form)
        target = torch.zeros_like(expected)
        copy_rows([(source, target, rows)])
        assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))


def test_an_unknown_choice_of_kernels_is_refused_with_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "cuda")
    with pytest.raises(ConfigError, match="one of auto, torch, triton"):
        dispatch.runs_triton(torch.zeros(1))


def test_triton_without_triton_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    with pytest.raises(ConfigError, match="NEREUS_KERNELS=auto"):
        dispatch.runs_triton(torch.zeros(1))
