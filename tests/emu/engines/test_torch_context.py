"""Context parallelism changes no number: log-probs, gradients and steps equal transformers'."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.engines.torch.block_attention import attend, attend_backward, merge, plain, plain_backward
from nereus.emu.engines.torch.packing import pack
from nereus.emu.engines.torch.ring_attention import RingAttention, parts_of
from nereus.emu.engines.torch.token_share import TokenShare
from tests.emu.engines import torch_cases as cases
from tests.emu.engines.test_torch_parity import BATCH, LOGITS_TOLERANCE, check_training
from tests.emu.engines.torch_cases import LLAMA, MIXTRAL, QWEN2, QWEN3, Case, Pool
from tests.emu.engines.transformers_twin import frozen_twin

LAYOUTS = ({"cp": 2}, {"cp": 3}, {"cp": 2, "tp": 2}, {"cp": 2, "pp": 2})


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_logprobs_and_entropy_equal_transformers(pool: Pool, config: cases.DecoderConfig) -> None:
    expected = frozen_twin(config).scores(BATCH.batch, temperature=0.8)
    assert expected.logprobs_bt is not None
    assert expected.entropy_bt is not None
    for layout in LAYOUTS:
        case = Case(config=config, optimizer=None, **layout)  # type: ignore[arg-type]
        for logprobs, entropy in pool.run(case, cases.score, BATCH.batch, 3, 0.8):
            for found, wanted in ((logprobs, expected.logprobs_bt), (entropy, expected.entropy_bt)):
                torch.testing.assert_close(
                    torch.from_numpy(found), wanted.detach(), rtol=0, atol=LOGITS_TOLERANCE
                )


@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], *(pytest.param(other, marks=pytest.mark.slow) for other in LAYOUTS[1:])], ids=str
)
def test_two_adamw_steps_equal_transformers(pool: Pool, layout: dict[str, int]) -> None:
    check_training(pool, Case(config=QWEN2, **layout))  # type: ignore[arg-type]


def test_experts_and_context_divide_a_unit_together(pool: Pool) -> None:
    check_training(pool, Case(config=MIXTRAL, ep=2, cp=2))


@pytest.mark.slow
def test_rows_shorter_than_the_ring_and_recomputed_layers_train_the_same(pool: Pool) -> None:
    check_training(pool, Case(config=LLAMA, cp=4, recompute=True), sizes=(1, 1, 1, 1, 1, 1, 1))


def test_a_value_head_reads_its_last_token_from_the_rank_that_has_it(pool: Pool) -> None:
    config = LLAMA.with_head("value")
    expected = frozen_twin(config)
    values = expected.scores(BATCH.batch).values_bt
    assert values is not None
    for found, rewards in pool.run(
        Case(config=config, cp=2, optimizer=None), cases.score, BATCH.batch, 3, 1.0
    ):
        torch.testing.assert_close(torch.from_numpy(found), values.detach(), rtol=0, atol=LOGITS_TOLERANCE)
        wanted = expected.rewards(BATCH.batch).detach()
        torch.testing.assert_close(torch.from_numpy(rewards), wanted, rtol=0, atol=LOGITS_TOLERANCE)


@given(length=st.integers(0, 97), cp=st.integers(1, 6))
def test_the_parts_of_a_row_are_its_tokens_and_as_many_on_every_rank_up_to_two(length: int, cp: int) -> None:
    parts = [parts_of(length, cp, rank) for rank in range(cp)]
    held = sorted(at for both in parts for lo, hi in both for at in range(lo, hi))
    assert held == list(range(length))
    sizes = [sum(hi - lo for lo, hi in both) for both in parts]
    assert max(sizes) - min(sizes) <= 2


@settings(deadline=None, max_examples=40)
@given(lens=st.lists(st.integers(0, 23), min_size=1, max_size=4), cp=st.integers(1, 5))
def test_the_calls_of_all_steps_see_every_earlier_token_once(lens: list[int], cp: int) -> None:
    """Each query meets each key of its row at or before it in exactly one call, and no other."""
    parts = tuple(
        tuple((e[1] - e[0], late[1] - late[0]) for e, late in (parts_of(n, cp, rank) for n in lens))
        for rank in range(cp)
    )
    places = [
        [(row, at) for row, n in enumerate(lens) for lo, hi in parts_of(n, cp, rank) for at in range(lo, hi)]
        for rank in range(cp)
    ]
    for here in range(cp):
        ring = RingAttention(group=None, here=here, parts=parts, width=max(lens))
        seen = [
            (query, key)
            for step in range(cp)
            for call in ring.calls(step)
            for i, query in enumerate(places[here][call.queries])
            for j, key in enumerate(places[ring.source(step)][call.keys])
            if not call.causal or j <= i
        ]
        wanted = [(query, (query[0], key)) for query in places[here] for key in range(query[1] + 1)]
        assert sorted(seen) == sorted(wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_merge_to_attention_over_all_keys_and_share_its_gradients(causal: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    q_qhd = torch.randn(5, 4, 8, generator=draw)
    k_skd, v_skd, grad_qhd = (torch.randn(n, h, 8, generator=draw) for n, h in ((9, 2), (9, 2), (5, 4)))
    late = slice(4, 9)
    blocks = [attend(q_qhd, k_skd[:4], v_skd[:4], causal=False)]
    blocks.append(attend(q_qhd, k_skd[late], v_skd[late], causal=causal))
    out_qhd, lse_qh = merge(*blocks)
    leaves = [x.clone().requires_grad_() for x in (q_qhd, k_skd, v_skd)]
    seen_qs = torch.ones(5, 9, dtype=torch.bool)
    if causal:
        seen_qs[:, late] = torch.ones(5, 5, dtype=torch.bool).tril()
    rows = [leaf.transpose(0, 1) for leaf in leaves]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *rows, attn_mask=seen_qs, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(out_qhd, wanted.detach(), rtol=0, atol=1e-5)
    wanted.backward(grad_qhd)
    for backward in (attend_backward, plain_backward):
        parts = [
            backward(grad_qhd, q_qhd, k_skd[own], v_skd[own], out_qhd, lse_qh, causal=how)
            for own, how in ((slice(0, 4), False), (late, causal))
        ]
        found = (
            parts[0][0] + parts[1][0],
            torch.cat([part[1] for part in parts]),
            torch.cat([part[2] for part in parts]),
        )
        for one, leaf in zip(found, leaves, strict=True):
            torch.testing.assert_close(one, leaf.grad, rtol=0, atol=1e-5)


def test_the_fused_block_equals_its_definition() -> None:
    draw = torch.Generator().manual_seed(4)
    q_qhd, k_skd, v_skd = (torch.randn(6, h, 8, generator=draw) for h in (4, 2, 2))
    for causal in (False, True):
        for one, other in zip(
            attend(q_qhd, k_skd, v_skd, causal=causal), plain(q_qhd, k_skd, v_skd, causal=causal), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_every_result_is_read_off_a_token_of_exactly_one_rank() -> None:
    whole = pack(BATCH.batch)
    shares = [pack(BATCH.batch, share=TokenShare(cp=3, part=part)) for part in range(3)]
    for name in ("places_m", "targets_m"):
        together = torch.cat([getattr(share, name) for share in shares])
        assert together.sort().values.tolist() == getattr(whole, name).sort().values.tolist()
    assert sum(share.num_tokens for share in shares) == int(whole.attend.places_n.numel())  # type: ignore[union-attr]
    for share in shares:
        read = share.tokens_n[share.select_m], share.positions_n[share.select_m]
        pairs = list(zip(share.places_m.tolist(), *(x.tolist() for x in read), strict=True))
        rows = BATCH.batch
        for place, token, position in pairs:
            row, t = divmod(place, share.num_responses)
            assert position == int(rows.prompt_lens_b[row]) + t - 1
            assert token == int(rows.tokens_bs[row, position])
