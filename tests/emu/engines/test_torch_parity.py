"""The torch engine equals transformers at every layout: logits, log-probabilities, gradients, AdamW steps."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.decoder import DecoderConfig
from tests.emu.engines import torch_cases as cases
from tests.emu.engines.torch_cases import ADAM, LLAMA, QWEN2, QWEN3, Case, Pool, TokenLoss, make_batch
from tests.emu.engines.transformers_twin import Twin, frozen_twin

LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
BATCH = make_batch()
COUNTS = GlobalCounts.from_mask(BATCH.mask_bt)
LOSS = TokenLoss(temperature=0.8, entropy=0.01)
# float32 sums in another order: the weights are of order 1, so 1e-4 is some hundred roundings
LOGITS_TOLERANCE = 1e-4
# after two steps of 1e-2 each; a rounding of a gradient moves a weight by far less
WEIGHTS_TOLERANCE = 2e-5


@lru_cache(maxsize=8)
def trained(config: DecoderConfig) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    twin = Twin(config)
    losses, norms, grads = twin.train(BATCH, LOSS, COUNTS, ADAM)
    return losses, norms, grads, twin.weights()


def check_training(pool: Pool, case: Case, sizes: tuple[int, ...] = (3, 2, 2)) -> None:
    """Two optimizer steps of the case equal the twin's, on every worker and for every logical element."""
    losses, norms, grads, weights = trained(case.config)
    results = pool.run(case, cases.train, [cases.split(BATCH, sizes)], LOSS, COUNTS)
    for result in results:
        assert [m.loss for m in result.metrics] == pytest.approx(losses, abs=1e-5)
        assert [m.gradient_norm for m in result.metrics] == pytest.approx(norms, rel=1e-4)
        assert result.metrics[0].stats["tokens"] == COUNTS.num_tokens
        assert result.largest_pad == 0.0
    found_grads = cases.assemble(case.config, [result.grads for result in results])
    found_weights = cases.assemble(case.config, [result.weights for result in results])
    assert set(found_grads) == set(grads)
    for name in grads:
        atol = 1e-4 * float(grads[name].abs().max()) + 1e-7
        assert worst(found_grads[name], grads[name]) <= atol, name
        assert worst(found_weights[name], weights[name]) <= WEIGHTS_TOLERANCE, name


def worst(found: Tensor, expected: Tensor) -> float:
    """The largest difference."""
    return float((found - expected).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_at_every_layout(pool: Pool, family: str) -> None:
    config = FAMILIES[family]
    expected = frozen_twin(config).logits(BATCH.batch.tokens_bs).detach()
    for tp, pp in LAYOUTS:
        results = pool.run(Case(config=config, tp=tp, pp=pp), cases.logits, BATCH.batch.tokens_bs)
        seen = [torch.from_numpy(result) for result in results if result is not None]
        assert len(seen) == tp
        for found in seen:
            torch.testing.assert_close(found, expected, rtol=0, atol=LOGITS_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_entropy_equal_transformers_at_every_layout(pool: Pool, family: str) -> None:
    config = FAMILIES[family]
    expected = frozen_twin(config).scores(BATCH.batch, temperature=0.8)
    assert expected.logprobs_bt is not None
    assert expected.entropy_bt is not None
    for tp, pp in LAYOUTS:
        for logprobs, entropy in pool.run(
            Case(config=config, tp=tp, pp=pp, optimizer=None), cases.score, BATCH.batch, 3, 0.8
        ):
            for found, wanted in ((logprobs, expected.logprobs_bt), (entropy, expected.entropy_bt)):
                torch.testing.assert_close(
                    torch.from_numpy(found), wanted.detach(), rtol=0, atol=LOGITS_TOLERANCE
                )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_two_adamw_steps_equal_transformers(pool: Pool, family: str, tp: int, pp: int) -> None:
    check_training(pool, Case(config=FAMILIES[family], tp=tp, pp=pp))


def test_uneven_heads_train_like_even_ones(pool: Pool) -> None:
    config = replace(LLAMA, num_heads=9, num_kv_heads=3, head_dim=8, hidden_size=36)
    check_training(pool, Case(config=config, tp=2))


def test_uneven_layers_train_like_even_ones(pool: Pool) -> None:
    config = replace(QWEN2, num_layers=4)
    check_training(pool, Case(config=config, pp=2, layers=(1, 3)))


def test_four_stages_with_tied_embeddings_equal_transformers(pool: Pool) -> None:
    check_training(pool, Case(config=replace(QWEN2, num_layers=4), pp=4), sizes=(2, 2, 1, 1, 1))


def test_fewer_micro_batches_than_stages_equal_transformers(pool: Pool) -> None:
    check_training(pool, Case(config=LLAMA, pp=2), sizes=(7,))


def test_a_vocabulary_smaller_than_tp_leaves_a_rank_without_rows(pool: Pool) -> None:
    config = replace(QWEN2, vocab_size=5)
    batch = make_batch(vocab_size=5)
    twin = Twin(config)
    losses, norms, _ = twin.train(batch, LOSS, COUNTS, ADAM)
    for result in pool.run(Case(config=config, tp=4), cases.train, [[batch]], LOSS, COUNTS):
        assert [m.loss for m in result.metrics] == pytest.approx(losses, abs=1e-5)
        assert [m.gradient_norm for m in result.metrics] == pytest.approx(norms, rel=1e-4)


def test_recomputed_activations_give_the_same_gradients(pool: Pool) -> None:
    check_training(pool, Case(config=LLAMA, tp=2, pp=2, recompute=True))


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_a_critic_equals_transformers(pool: Pool, tp: int, pp: int) -> None:
    config = QWEN2.with_head("value")
    case = Case(config=config, tp=tp, pp=pp)
    check_training(pool, case)
    expected = frozen_twin(config)
    values_bt = expected.scores(BATCH.batch).values_bt
    assert values_bt is not None
    for values, rewards in pool.run(case, cases.score, BATCH.batch, 2, 1.0):
        torch.testing.assert_close(torch.from_numpy(values), values_bt.detach(), rtol=0, atol=1e-4)
        torch.testing.assert_close(
            torch.from_numpy(rewards), expected.rewards(BATCH.batch).detach(), rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("name", ["llama31-tiny", "qwen25-tiny", "qwen3-tiny"])
def test_published_folders_give_the_logits_of_transformers(pool: Pool, shared_data: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = shared_data / "tiny_checkpoints" / name
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens_bs = torch.randint(0, 512, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens_bs).logits
    config = DecoderConfig.from_folder(folder).with_dtype("fp32")
    for tp, pp in LAYOUTS:
        case = Case(config=config, tp=tp, pp=pp, folder=str(folder), optimizer=None)
        seen = [torch.from_numpy(r) for r in pool.run(case, cases.logits, tokens_bs) if r is not None]
        assert len(seen) == tp
        for found in seen:
            torch.testing.assert_close(found, expected, rtol=0, atol=LOGITS_TOLERANCE)
