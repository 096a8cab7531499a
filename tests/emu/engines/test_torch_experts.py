"""Mixtures of experts equal transformers' Qwen3-MoE and Mixtral at every layout; folders go both ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nereus.emu.batch import TokenBatch, TrainBatch
from nereus.emu.decoder import DecoderConfig, Experts, decoder_spec
from nereus.emu.engines.torch.experts import ExpertGroup, ExpertWeights, mixture, route
from nereus.emu.engines.torch.token_share import TokenShare
from nereus.emu.hf_folder import HFSource, write_hf_folder
from nereus.emu.tensor import whole
from nereus.errors import ModelError
from tests.emu.engines import generate_cases
from tests.emu.engines import torch_cases as cases
from tests.emu.engines.generate_cases import alone, make_prompts
from tests.emu.engines.test_torch_generate import PROMPTS, assert_logprobs_fit, sampling
from tests.emu.engines.test_torch_parity import BATCH, COUNTS, LOGITS_TOLERANCE, LOSS, check_training
from tests.emu.engines.torch_cases import MIXTRAL, QWEN3_MOE, Case, Pool, Random
from tests.emu.engines.transformers_twin import frozen_twin

FAMILIES = {"qwen3_moe": QWEN3_MOE, "mixtral": MIXTRAL}
LAYOUTS = ({}, {"ep": 2}, {"tp": 2}, {"pp": 2}, {"ep": 2, "tp": 2}, {"ep": 2, "pp": 2}, {"ep": 4})
FAST = (("qwen3_moe", {"ep": 2}), ("mixtral", {"ep": 2, "tp": 2}))
CASES = [
    pytest.param(family, layout, marks=() if (family, layout) in FAST else pytest.mark.slow)
    for family in FAMILIES
    for layout in LAYOUTS
]


def case_of(config: DecoderConfig, layout: dict[str, int]) -> Case:
    return Case(config=config, **layout)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_entropy_equal_transformers_at_every_layout(pool: Pool, family: str) -> None:
    config = FAMILIES[family]
    expected = frozen_twin(config).scores(BATCH.batch, temperature=0.8)
    assert expected.logprobs_bt is not None
    assert expected.entropy_bt is not None
    for layout in LAYOUTS:
        case = replace(case_of(config, layout), optimizer=None)
        for logprobs, entropy in pool.run(case, cases.score, BATCH.batch, 3, 0.8):
            for found, wanted in ((logprobs, expected.logprobs_bt), (entropy, expected.entropy_bt)):
                torch.testing.assert_close(
                    torch.from_numpy(found), wanted.detach(), rtol=0, atol=LOGITS_TOLERANCE
                )


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_two_adamw_steps_equal_transformers(pool: Pool, family: str, layout: dict[str, int]) -> None:
    check_training(pool, case_of(FAMILIES[family], layout))


@pytest.mark.slow
def test_recomputed_layers_send_their_visits_again(pool: Pool) -> None:
    check_training(pool, Case(config=MIXTRAL, ep=2, recompute=True))


def test_a_rank_without_rows_takes_part_all_the_same(pool: Pool) -> None:
    check_training(pool, Case(config=MIXTRAL, ep=4), sizes=(1, 3, 1, 1, 1))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_greedy_tokens_equal_transformers(pool: Pool, family: str, layout: dict[str, int]) -> None:
    config = FAMILIES[family]
    wanted = generate_cases.greedy_of_transformers(frozen_twin(config).model, PROMPTS, 12)
    results = pool.run(
        case_of(config, layout), generate_cases.generate, make_prompts(PROMPTS, greedy=True), sampling(12)
    )
    for result in results:
        for row, (prompt, answer) in enumerate(zip(PROMPTS, wanted, strict=True)):
            assert result["tokens"][row, : len(prompt) + 12].tolist() == [*prompt, *answer], row
    assert_logprobs_fit(config, results[0])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_do_not_move_with_ep(pool: Pool, family: str) -> None:
    config, prompts, how = FAMILIES[family], make_prompts(PROMPTS), sampling(stop_token_ids=(3,))
    expected = generate_cases.arrays(alone(config).generate(prompts, how, 3))
    for result in pool.run(Case(config=config, ep=2), generate_cases.generate, prompts, how):
        assert np.array_equal(result["tokens"], expected["tokens"])


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_of_transformers_are_read_and_ours_are_loaded_by_it(family: str, tmp_path: Path) -> None:
    config, model = FAMILIES[family], frozen_twin(FAMILIES[family]).model
    model.save_pretrained(tmp_path / "theirs")
    source, known = HFSource(tmp_path / "theirs"), Random(config)
    assert source.config.experts == config.experts
    for spec in decoder_spec(config).tensors:
        assert torch.equal(source.read("theta", spec.name, whole(spec.shape)), known.tensors[spec.name])
    name = "model.layers.1.mlp.experts.up_proj.weight"
    box = ((1, 3), (0, 5), (2, 9))
    assert torch.equal(source.read("theta", name, box), known.read("theta", name, box))

    write_hf_folder(source, source.config, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs = dict(model.named_parameters())
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in again.named_parameters())


def test_dense_layers_between_the_experts_are_refused() -> None:
    fields = QWEN3_MOE.to_hf() | {"decoder_sparse_step": 2}
    with pytest.raises(ModelError, match="every layer must be a mixture"):
        DecoderConfig.from_hf(fields)
    for config in FAMILIES.values():
        again = DecoderConfig.from_hf(config.to_hf())
        assert replace(again, rope=config.rope) == config


def test_weights_of_the_visited_experts_sum_to_one_where_they_are_normalized() -> None:
    draw = torch.Generator().manual_seed(1)
    x_nh, router_eh = torch.randn(9, 6, generator=draw), torch.randn(5, 6, generator=draw)
    probs_ne = (x_nh @ router_eh.t()).softmax(dim=-1)
    plain = route(x_nh, router_eh, Experts(num=5, per_token=2, normalized=False))
    torch.testing.assert_close(plain.weights_nk, probs_ne.gather(1, plain.experts_nk))
    even = route(x_nh, router_eh, Experts(num=5, per_token=2))
    torch.testing.assert_close(even.weights_nk.sum(dim=1), torch.ones(9))


def test_a_mixture_is_the_weighted_sum_of_its_experts_also_of_no_tokens() -> None:
    draw = torch.Generator().manual_seed(2)
    shape = Experts(num=4, per_token=2)
    weights = ExpertWeights(
        router=torch.randn(4, 6, generator=draw),
        gate=torch.randn(4, 3, 6, generator=draw),
        up=torch.randn(4, 3, 6, generator=draw),
        down=torch.randn(4, 6, 3, generator=draw),
    )
    x_nh = torch.randn(7, 6, generator=draw)
    routed = route(x_nh, weights.router, shape)
    wanted = torch.zeros(7, 6)
    for row in range(7):
        for expert, share in zip(routed.experts_nk[row].tolist(), routed.weights_nk[row], strict=True):
            gated = torch.nn.functional.silu(weights.gate[expert] @ x_nh[row]) * (
                weights.up[expert] @ x_nh[row]
            )
            wanted[row] += share * (weights.down[expert] @ gated)
    torch.testing.assert_close(mixture(x_nh, weights, shape, ExpertGroup(None)), wanted, rtol=1e-4, atol=1e-4)
    assert mixture(x_nh[:0], weights, shape, ExpertGroup(None)).shape == (0, 6)


def test_the_balancing_loss_has_the_gradient_of_its_definition_and_changes_no_output() -> None:
    draw = torch.Generator().manual_seed(5)
    shape = Experts(num=4, per_token=2)
    parts = {"gate": (4, 3, 6), "up": (4, 3, 6), "down": (4, 6, 3)}
    rest = {name: torch.randn(size, generator=draw) for name, size in parts.items()}
    router_eh, x_nh = torch.randn(4, 6, generator=draw), torch.randn(7, 6, generator=draw)

    def run(balance: float) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = router_eh.clone().requires_grad_()
        weights = ExpertWeights(router=leaf, **rest)
        out_nh = mixture(x_nh, weights, shape, ExpertGroup(None, balance=balance))
        out_nh.sum().backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return out_nh.detach(), leaf.grad

    leaf = router_eh.clone().requires_grad_()
    probs_ne = (x_nh @ leaf.t()).softmax(dim=-1)
    visits_e = torch.bincount(probs_ne.topk(2).indices.flatten(), minlength=4) / 7
    (0.3 * 4 * (visits_e * probs_ne.mean(dim=0)).sum()).backward()  # type: ignore[no-untyped-call]
    plain, even = run(0.0), run(0.3)
    assert torch.equal(plain[0], even[0])
    torch.testing.assert_close(even[1] - plain[1], leaf.grad, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_balancing_loss_weighs_the_same_at_every_tp(pool: Pool) -> None:
    batches = [cases.split(BATCH, (3, 2, 2))]
    first, second = (
        cases.assemble(
            MIXTRAL,
            [r.grads for r in pool.run(case, cases.train, batches, LOSS, COUNTS, 1)],
        )
        for case in (
            Case(config=MIXTRAL, router_balance=0.5),
            Case(config=MIXTRAL, router_balance=0.5, tp=2),
        )
    )
    for name, grad in first.items():
        torch.testing.assert_close(second[name], grad, rtol=0, atol=1e-4 * float(grad.abs().max()) + 1e-7)


def test_rows_are_dealt_along_ep_in_order_of_length_each_once() -> None:
    batch: TokenBatch = BATCH.batch
    shares = [TokenShare(ep=3, expert=expert) for expert in range(3)]
    dealt = torch.cat([share.rows(batch) for share in shares])
    assert dealt.sort().values.tolist() == list(range(batch.num_rows))
    lens_b = batch.prompt_lens_b + batch.response_lens_b
    sums = [int(lens_b[share.rows(batch)].sum()) for share in shares]
    assert max(sums) - min(sums) <= int(lens_b.max())
    one: TrainBatch = BATCH.select([0])
    spare = TokenShare(ep=3, expert=2).train(one)
    assert spare.mask_bt.sum() == 0
    assert spare.batch.response_lens_b.tolist() == [0]
