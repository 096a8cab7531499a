"""Log-probability, entropy and their gradients by parts of the vocabulary: kernel, twin, and autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nereus.kernels import vocabulary
from nereus.kernels.vocabulary import join, joined_numbers, logit_gradient_, part_numbers
from tests.kernels.conftest import DEVICE

Use = Callable[[str], None]
SHAPES = [(1, 1, 1), (3, 16, 50), (70, 72, 1300), (65, 130, 600), (2, 5, 0)]


def inputs(m: int, h: int, v: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(m * 1000 + v)
    x_mh = torch.randn(m, h, generator=make).to(dtype)
    weight_vh = torch.randn(v, h, generator=make).to(dtype)
    targets_m = torch.randint(0, v + 20, (m,), generator=make)
    return x_mh.to(DEVICE), weight_vh.to(DEVICE), targets_m.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("entropy", [True, False])
def test_the_kernels_numbers_are_the_twins(
    use: Use, shape: tuple[int, int, int], dtype: torch.dtype, entropy: bool
) -> None:
    x_mh, weight_vh, targets_m = inputs(*shape, dtype)
    found = []
    for form in ("torch", "triton"):
        use(form)
        found.append(part_numbers(x_mh, weight_vh, targets_m, start=5, temperature=0.7, entropy=entropy))
    torch.testing.assert_close(*found, rtol=1e-5, atol=5e-5)  # sums of up to 1300 terms around 50


def test_slices_and_rows_that_are_views_give_the_same_numbers(use: Use) -> None:
    x_mh, weight_vh, targets_m = inputs(9, 24, 700, torch.float32)
    wide = torch.randn(9, 48, device=DEVICE)
    wide[:, ::2] = x_mh
    use("triton")
    whole = part_numbers(x_mh, weight_vh, targets_m, start=0, temperature=1.0, entropy=True)
    strided = part_numbers(
        wide[:, ::2], weight_vh.t().contiguous().t(), targets_m, start=0, temperature=1.0, entropy=True
    )
    torch.testing.assert_close(strided, whole, rtol=0, atol=0)


@pytest.mark.parametrize("form", ["torch", "triton"])
@pytest.mark.parametrize("cuts", [[700], [300, 400], [1, 0, 699], [100] * 7])
def test_parts_of_the_vocabulary_join_to_the_whole(use: Use, form: str, cuts: list[int]) -> None:
    x_mh, weight_vh, targets_m = inputs(6, 24, 700, torch.float32)
    targets_m = targets_m.clamp(max=699)
    use(form)
    parts, start = [], 0
    for size in cuts:
        rows = weight_vh[start : start + size]
        parts.append(part_numbers(x_mh, rows, targets_m, start=start, temperature=1.3, entropy=True))
        start += size
    logprobs_m, entropy_m, lse_m = join(torch.stack(parts))
    z_mv = x_mh @ weight_vh.t() / 1.3
    reference_mv = z_mv.log_softmax(dim=1)
    torch.testing.assert_close(
        logprobs_m, reference_mv.gather(1, targets_m[:, None])[:, 0], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        entropy_m, -(reference_mv.exp() * reference_mv).sum(dim=1), rtol=1e-5, atol=1e-5
    )
    again = joined_numbers(torch.stack(parts))
    torch.testing.assert_close(again[:, 0], lse_m)
    torch.testing.assert_close(join(again[None])[0], logprobs_m, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["torch", "triton"])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_the_gradient_by_logits_is_autograds(use: Use, form: str, with_entropy: bool) -> None:
    make = torch.Generator().manual_seed(7)
    raw_mv = torch.randn(5, 1100, generator=make).to(DEVICE).requires_grad_()
    targets_m = torch.randint(0, 1100, (5,), generator=make).to(DEVICE)
    grad_m, grad_entropy_m = torch.randn(2, 5, generator=make).to(DEVICE).unbind()
    temperature = 0.8
    logp_mv = (raw_mv / temperature).log_softmax(dim=1)
    entropy_m = -(logp_mv.exp() * logp_mv).sum(dim=1)
    loss = (logp_mv.gather(1, targets_m[:, None])[:, 0] * grad_m).sum()
    if with_entropy:
        loss = loss + (entropy_m * grad_entropy_m).sum()
    (expected_mv,) = torch.autograd.grad(loss, raw_mv)
    use(form)
    z_mv = raw_mv.detach() / temperature
    found = []
    for lo, hi in ((0, 400), (400, 1100)):  # two ranks' parts
        found.append(
            logit_gradient_(
                z_mv[:, lo:hi].contiguous(),
                z_mv.logsumexp(dim=1),
                targets_m,
                grad_m,
                entropy_m.detach() if with_entropy else None,
                grad_entropy_m if with_entropy else None,
                start=lo,
                temperature=temperature,
            )
        )
    torch.testing.assert_close(torch.cat(found, dim=1), expected_mv, rtol=1e-5, atol=1e-6)


def test_what_the_kernel_keeps_does_not_grow_with_the_vocabulary(
    use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor that the Triton form makes is counted: numbers by slice, never logits."""
    use("triton")
    made: list[int] = []
    empty = torch.empty

    def counted(*size: int, **options: object) -> torch.Tensor:
        tensor: torch.Tensor = empty(*size, **options)  # type: ignore[call-overload]
        made.append(tensor.numel())
        return tensor

    monkeypatch.setattr(vocabulary.torch, "empty", counted)
    peaks = []
    for v in (2_000, 8_000):
        made.clear()
        x_mh, weight_vh, targets_m = inputs(70, 1, v, torch.float32)
        part_numbers(x_mh, weight_vh, targets_m, start=0, temperature=1.0, entropy=True)
        peaks.append(sum(made))
    slices = -(-vocabulary.PROGRAMS // 2)  # two blocks of tokens
    assert max(peaks) <= 4 * 70 * slices
    assert max(peaks) < 70 * 2_000
