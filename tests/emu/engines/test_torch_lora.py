"""Adapters on the torch engine against autograd through transformers, under every kind of cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.batch import TokenBatch
from nereus.emu.decoder import DecoderConfig
from nereus.emu.lora import Lora, down_of, is_adapter, up_of
from tests.emu.engines import torch_cases as cases
from tests.emu.engines.torch_cases import (
    ADAM,
    LLAMA,
    QWEN2,
    QWEN3,
    SMALL,
    Case,
    Pool,
    Random,
    TokenLoss,
    make_batch,
)
from tests.emu.engines.transformers_twin import Twin

LORA = Lora(rank=4, alpha=6)
BATCH = make_batch()
COUNTS = GlobalCounts.from_mask(BATCH.mask_bt)
LOSS = TokenLoss(temperature=0.8, entropy=0.01)


class LoraTwin(Twin):
    """The transformers model whose targets are W + alpha / r * B A, with gradients of A and B alone."""

    def __init__(self, config: DecoderConfig) -> None:
        assert config.lora is not None
        super().__init__(config.with_lora(None))
        self.model.requires_grad_(False)
        tensors = Random(config).tensors
        self.score = tensors.get("score.weight", self.score).clone().requires_grad_()
        self.lora = config.lora
        self.frozen = {name: value.detach() for name, value in self.model.named_parameters()}
        self.factors = {n: value.clone().requires_grad_() for n, value in tensors.items() if is_adapter(n)}

    def merged(self) -> dict[str, Tensor]:
        """All weights of the model by name."""
        out = dict(self.frozen)
        for name in out:
            if down_of(name) in self.factors:
                product = self.factors[up_of(name)] @ self.factors[down_of(name)]
                out[name] = self.frozen[name] + self.lora.scale * product
        return out

    def logits(self, tokens_bs: Tensor) -> Tensor:
        return torch.func.functional_call(self.model, self.merged(), (tokens_bs,)).logits  # type: ignore[no-any-return]

    def scores(self, batch: TokenBatch, temperature: float = 1.0):  # type: ignore[no-untyped-def]
        if self.config.head == "lm":
            return super().scores(batch, temperature)
        trunk = {n.removeprefix("model."): w for n, w in self.merged().items() if n.startswith("model.")}
        original, self.model.model = self.model.model, _Called(self.model.model, trunk)
        try:
            return super().scores(batch, temperature)
        finally:
            self.model.model = original

    def parameters(self) -> dict[str, Tensor]:
        return self.factors | ({"score.weight": self.score} if self.config.head == "value" else {})


class _Called(torch.nn.Module):
    """A module run with other weights."""

    def __init__(self, module: torch.nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.call = lambda tokens: torch.func.functional_call(module, weights, (tokens,))

    def forward(self, tokens: Tensor) -> object:
        return self.call(tokens)


def trained(case: Case, pool: Pool) -> tuple[list[cases.Trained], dict[str, Tensor], dict[str, Tensor]]:
    """What two steps saw, and logical weights and gradients, on which all holders agree bit for bit."""
    halves = [cases.split(half, [2, 2 - unit]) for unit, half in enumerate(cases.split(BATCH, [4, 3]))]
    micro = halves if case.units == 2 else [cases.split(BATCH, [3, 4])]
    results = pool.run(case, cases.train, micro, LOSS, COUNTS, 2)
    weights = cases.assemble(case.config, [result.weights for result in results])
    grads = cases.assemble(case.config, [result.grads for result in results], trained=True)
    return results, weights, grads


GRID = [
    pytest.param(Case(config=LLAMA.with_lora(LORA)), id="llama"),
    pytest.param(Case(config=QWEN2.with_lora(LORA), tp=2), id="qwen2-tp2"),
    pytest.param(
        Case(config=QWEN3.with_lora(replace(LORA, targets=("k_proj", "o_proj"))), tp=4), id="qwen3-tp4"
    ),
    pytest.param(Case(config=QWEN2.with_lora(LORA), pp=2, recompute=True), id="qwen2-pp2"),
    pytest.param(
        Case(config=SMALL.with_lora(replace(LORA, targets=("up_proj", "q_proj"))), tp=2, units=2),
        id="tp2-dp2",
    ),
    pytest.param(Case(config=LLAMA.with_head("value").with_lora(LORA), tp=2, pp=2), id="critic-tp2-pp2"),
]


@pytest.mark.parametrize("case", GRID)
def test_two_steps_of_the_adapters_are_those_of_autograd(pool: Pool, case: Case) -> None:
    results, weights, grads = trained(case, pool)
    twin = LoraTwin(case.config)
    losses, norms, expected = twin.train(BATCH, LOSS, COUNTS, ADAM)
    assert [m.loss for m in results[0].metrics] == pytest.approx(losses, rel=2e-5)
    assert [m.gradient_norm for m in results[0].metrics] == pytest.approx(norms, rel=2e-4)
    assert expected.keys() == grads.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        assert float((grads[name] - gradient).abs().max()) <= 2e-4 * scale + 1e-7, name
    for name, parameter in twin.parameters().items():
        torch.testing.assert_close(weights[name], parameter.detach(), atol=2e-5, rtol=2e-4)
    assert max(result.largest_pad for result in results) == 0


@pytest.mark.parametrize("case", GRID[:2])
def test_frozen_weights_keep_every_bit(pool: Pool, case: Case) -> None:
    _, weights, _ = trained(case, pool)
    for name, tensor in Random(case.config).tensors.items():
        assert is_adapter(name) or torch.equal(weights[name], tensor), name
