"""Products by MKL and by oneDNN: the same numbers and gradients as float64, packed or not, small or large."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from nereus.emu.engines.torch import product as products
from nereus.emu.engines.torch.product import packed, product

SIZES = [(3, 16, 8), (64, 128, 256), (300, 64, 999), (1024, 100, 77)]  # the first stays with F.linear


@pytest.fixture(autouse=True, params=["oneDNN", "MKL"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test by either library, whatever this processor is."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if request.param == "oneDNN" and not available:
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(products, "USES_ONEDNN", request.param == "oneDNN")
    return str(request.param)


def _inputs(n: int, i: int, o: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    x, w, b = (torch.randn(shape, generator=generator) for shape in ((n, i), (o, i), (o,)))
    return x.requires_grad_(), w.requires_grad_(), b.requires_grad_()


@pytest.mark.parametrize(("n", "i", "o"), SIZES)
@pytest.mark.parametrize("biased", [True, False])
def test_products_and_gradients_equal_float64(n: int, i: int, o: int, biased: bool) -> None:
    x, w, b = _inputs(n, i, o)
    inputs = (x, w, b) if biased else (x, w)
    upstream = torch.randn(n, o, generator=torch.Generator().manual_seed(1))
    out = product(*inputs)
    exact_inputs = [t.detach().double().requires_grad_() for t in inputs]
    exact = F.linear(*exact_inputs)
    # Sums of up to 1024 float32 products of normal numbers: rounding stays below 1e-3 absolutely.
    torch.testing.assert_close(out.double(), exact, atol=1e-3, rtol=0)
    got = torch.autograd.grad(out, inputs, upstream)
    wanted = torch.autograd.grad(exact, exact_inputs, upstream.double())
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-3, rtol=0)


@pytest.mark.parametrize("rows", [1, 7, 130])
def test_a_packed_weight_gives_the_same_products(library: str, rows: int) -> None:
    x, w, b = _inputs(rows, 512, 640)
    with torch.no_grad():
        copy = packed(w)
        assert copy is not w
        assert copy.is_mkldnn == (library == "oneDNN")
        torch.testing.assert_close(product(x, copy, b), F.linear(x, w, b), atol=1e-4, rtol=1e-5)


def test_weights_that_packing_does_not_help_are_returned_as_they_are(library: str) -> None:
    small, half = torch.zeros(8, 8), torch.zeros(1024, 1024, dtype=torch.bfloat16)
    assert (packed(small) is small) == (library == "oneDNN")  # transposed, small ones gain too
    assert packed(half) is half


def test_a_packed_weight_does_not_follow_the_weight() -> None:
    weight = torch.ones(640, 512)
    with torch.no_grad():
        copy = packed(weight)
        weight.zero_()
        assert product(torch.ones(1, 512), copy).tolist() == [[512.0] * 640]


def test_views_with_any_strides_are_read_rightly() -> None:
    flat = torch.randn(1_000_000, generator=torch.Generator().manual_seed(3))
    w = flat[32 : 32 + 300 * 200].view(300, 200)[:290]
    x = flat[100_000:500_000].view(1000, 400)[::2, ::2]
    with torch.no_grad():
        torch.testing.assert_close(product(x, w), F.linear(x, w), atol=1e-3, rtol=0)


def test_gradients_survive_recomputation() -> None:
    x, w, _ = _inputs(300, 64, 999)
    plain = torch.autograd.grad(product(x, w).square().sum(), (x, w))
    again = torch.autograd.grad(checkpoint(product, x, w, use_reentrant=False).square().sum(), (x, w))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_only_the_wanted_gradients_are_made() -> None:
    x, w, _ = _inputs(300, 64, 999)
    (grad_w,) = torch.autograd.grad(product(x.detach(), w).sum(), (w,))
    # Every output's gradient is one, so each row of the weight's gradient is the sum of the inputs.
    torch.testing.assert_close(grad_w, x.detach().sum(0).expand(999, -1), atol=1e-3, rtol=0)
