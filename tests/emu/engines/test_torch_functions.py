"""The hand-written functions of the decoder equal their composed definitions, forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nereus.emu.decoder import Rope
from nereus.emu.engines.torch import token_logprobs as fused
from nereus.emu.engines.torch.rms_norm import rms_norm
from nereus.emu.engines.torch.rope import RopeTable, rotate
from nereus.emu.engines.torch.rows import put_rows, take_rows
from nereus.emu.engines.torch.swiglu import swiglu

CPU = torch.device("cpu")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor, atol: float = 2e-5
) -> None:
    """Equal values and gradients, and equal values without gradients; float32 sums differ in order."""
    left = [x.clone().requires_grad_() for x in inputs]
    right = [x.clone().requires_grad_() for x in inputs]
    found, expected = ours(*left), theirs(*right)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    upstream = noise(*expected.shape, seed=9).to(expected.dtype)
    torch.autograd.backward(found, upstream)
    torch.autograd.backward(expected, upstream)
    for x, y in zip(left, right, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=atol)
    with torch.no_grad():
        torch.testing.assert_close(ours(*inputs), found.detach(), rtol=0, atol=atol)


@pytest.mark.parametrize("shape", [(11, 24), (5, 3, 24)])
def test_rms_norm_equals_its_formula(shape: tuple[int, ...]) -> None:
    def composed(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    assert_same(lambda x, w: rms_norm(x, w, 1e-5), composed, noise(*shape), 1 + noise(24, seed=1))


def test_rms_norm_keeps_statistics_in_float32() -> None:
    x = (300 * noise(4, 64)).bfloat16()
    weight = torch.ones(64, dtype=torch.bfloat16)
    expected = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6), expected.bfloat16())


def test_rotation_turns_pairs_by_position() -> None:
    cos, sin = RopeTable(Rope(theta=100.0), 8, torch.float32, CPU).at(torch.arange(6) * 7, 36)

    def composed(x: Tensor) -> Tensor:
        turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
        return x * torch.cat([cos, cos], -1) + turned * torch.cat([sin, sin], -1)

    assert_same(lambda x: rotate(x, cos, sin), composed, noise(6, 3, 8))


@pytest.mark.parametrize(
    "rope",
    [
        Rope(theta=1e4),
        Rope(theta=5e5, kind="linear", factor=4.0),
        Rope(theta=5e5, kind="llama3", factor=8.0, original_max_positions=64),
    ],
)
def test_frequencies_equal_transformers(rope: Rope) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"rope_type": rope.kind, "rope_theta": rope.theta, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, rope_parameters=scaling)
    positions = torch.arange(700)
    cos, sin = LlamaRotaryEmbedding(config)(noise(1, 1), positions[None])
    ours = RopeTable(rope, 32, torch.float32, CPU).at(positions, 700)
    torch.testing.assert_close(ours[0].squeeze(1), cos[0, :, :16], rtol=0, atol=1e-5)
    torch.testing.assert_close(ours[1].squeeze(1), sin[0, :, :16], rtol=0, atol=1e-5)


def test_swiglu_equals_its_formula() -> None:
    assert_same(swiglu, lambda x: F.silu(x[:, :12]) * x[:, 12:], noise(7, 24))


def test_row_moves_equal_indexing() -> None:
    index = torch.tensor([4, 0, 3])
    assert_same(lambda x: take_rows(x, index), lambda x: x[index], noise(5, 2, 3))
    assert_same(
        lambda x: put_rows(x, index, 6), lambda x: torch.zeros(6, 2).index_put((index,), x), noise(3, 2)
    )


@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_equal_a_softmax_of_all_logits(
    monkeypatch: pytest.MonkeyPatch, keep_bytes: int, entropy: bool, temperature: float
) -> None:
    monkeypatch.setattr(fused, "KEEP_BYTES", keep_bytes)
    monkeypatch.setattr(fused, "CHUNK_BYTES", 4 * 50 * 3)  # three rows at a time
    targets = torch.randint(0, 50, (10,), generator=torch.Generator().manual_seed(2))

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        logprobs, found = fused.token_logprobs(
            x, weight, targets, vocab_start=0, temperature=temperature, entropy=entropy, group=None
        )
        assert (found is not None) == entropy
        return logprobs if found is None else torch.stack([logprobs, found])

    def composed(x: Tensor, weight: Tensor) -> Tensor:
        all_logprobs = (x @ weight.t() / temperature).log_softmax(-1)
        logprobs = all_logprobs.gather(1, targets[:, None]).squeeze(1)
        if not entropy:
            return logprobs
        return torch.stack([logprobs, -(all_logprobs.exp() * all_logprobs).sum(-1)])

    assert_same(ours, composed, noise(10, 8), noise(50, 8, seed=1))


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return made


def test_logits_of_many_tokens_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "KEEP_BYTES", 0)
    monkeypatch.setattr(fused, "CHUNK_BYTES", 4 * 50 * 10)  # ten tokens at a time
    x, weight = noise(200, 8).requires_grad_(), noise(50, 8, seed=1).requires_grad_()
    with Largest() as largest:
        logprobs, entropy = fused.token_logprobs(
            x,
            weight,
            torch.zeros(200, dtype=torch.long),
            vocab_start=0,
            temperature=1.0,
            entropy=True,
            group=None,
        )
        assert entropy is not None
        torch.autograd.backward(logprobs.sum() + entropy.sum())
    assert largest.num_elements == 200 * 8  # the hidden states; all logits would be 200 * 50


def test_token_logprobs_survive_logits_that_differ_by_thousands() -> None:
    x, weight = torch.eye(3) * 3000.0, torch.eye(3).requires_grad_()
    logprobs, entropy = fused.token_logprobs(
        x, weight, torch.tensor([0, 0, 2]), vocab_start=0, temperature=1.0, entropy=True, group=None
    )
    assert entropy is not None
    assert logprobs.tolist() == [0.0, -3000.0, 0.0]
    torch.autograd.backward(logprobs.sum() + entropy.sum())
    assert weight.grad is not None
    assert bool(weight.grad.isfinite().all())
    assert float(entropy.detach().abs().max()) < 1e-3
