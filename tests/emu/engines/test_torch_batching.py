"""Loss and gradient of real engines do not depend on how rows are batched, packed, padded or dealt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.batch import TokenBatch, TrainBatch
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engines.torch import packing
from nereus.emu.engines.torch.attention import CausalAttention, RowBlock, row_blocks
from nereus.emu.engines.torch.engine import TorchEngine
from nereus.emu.layout import Layout
from nereus.emu.source import fill
from nereus.emu.unit_groups import UnitGroups
from nereus.tasks.micro_batches import Limit, cut_batch, deal_rows
from tests.emu.engines import torch_cases as cases
from tests.emu.engines.torch_cases import ADAM, LLAMA, QWEN2, SMALL, Case, Pool, Random, TokenLoss, make_batch
from tests.emu.engines.transformers_twin import frozen_twin

# float32 gradients of order 1, summed in another order
RTOL, ATOL = 1e-4, 2e-5
LOSS = TokenLoss(temperature=0.9, entropy=0.01)
UNCLIPPED = replace(ADAM, max_gradient_norm=None)


def engine_of(config: DecoderConfig) -> TorchEngine:
    layout = Layout.make(decoder_spec(config), tp=1, pp=1, ranks=(0,))
    engine = TorchEngine(config, layout, UnitGroups.alone(layout), optimizer=UNCLIPPED)
    fill(engine.state, Random(config), {"theta": "theta"})
    return engine


def gradient(config: DecoderConfig, parts: list[TrainBatch], counts: GlobalCounts) -> tuple[float, Tensor]:
    """Loss and gradient of a first step."""
    engine = engine_of(config)
    metrics = engine.train_step(parts, LOSS, counts, learning_rate=1e-2)
    assert engine.grad is not None
    return metrics.loss, engine.grad.flat.clone()


def rows_of(lengths: list[tuple[int, int]], seed: int) -> TrainBatch:
    """Rows of these prompt and response lengths."""
    draw = torch.Generator().manual_seed(seed)
    prompt_b, response_b = torch.tensor(lengths).T
    width = int((prompt_b + response_b).max())
    tokens_bs = torch.randint(0, 67, (len(lengths), width), generator=draw)
    tokens_bs[torch.arange(width) >= (prompt_b + response_b)[:, None]] = 0
    batch = TokenBatch(tokens_bs=tokens_bs, prompt_lens_b=prompt_b, response_lens_b=response_b)
    mask_bt = batch.response_mask().float()
    return TrainBatch(batch=batch, mask_bt=mask_bt, advantages_bt=torch.randn(mask_bt.shape, generator=draw))


def dealt(batch: TrainBatch, num_units: int, limit: Limit) -> list[list[TrainBatch]]:
    lengths = (batch.batch.prompt_lens_b + batch.batch.response_lens_b).tolist()
    shares = deal_rows(lengths, num_units=num_units, limit=limit)
    return [[cut_batch(batch, micro) for micro in share] for share in shares]


ROWS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40)), min_size=1, max_size=9)


@settings(max_examples=8, deadline=None)
@given(lengths=ROWS, tokens=st.integers(5, 200), seed=st.integers(0, 99), pads=st.booleans())
def test_micro_batches_by_tokens_give_the_gradient_of_rows_one_by_one(
    lengths: list[tuple[int, int]], tokens: int, seed: int, pads: bool
) -> None:
    batch = rows_of(lengths, seed)
    counts = GlobalCounts.from_mask(batch.mask_bt, max_tokens=40)
    one_by_one = [batch.select([row]).trimmed() for row in range(len(lengths))]
    loss, grad = gradient(QWEN2, one_by_one, counts)
    (parts,) = dealt(batch, 1, Limit(rows=1, tokens=tokens, pads=pads))
    again, same = gradient(QWEN2, parts, counts)
    assert again == pytest.approx(loss, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(same, grad, rtol=RTOL, atol=ATOL)


@settings(max_examples=5, deadline=None)
@given(lengths=ROWS, seed=st.integers(0, 99), extra=st.integers(1, 30))
def test_packing_and_padding_do_not_change_the_gradient(
    lengths: list[tuple[int, int]], seed: int, extra: int
) -> None:
    batch = rows_of(lengths, seed)
    counts = GlobalCounts.from_mask(batch.mask_bt, max_tokens=40)
    loss, grad = gradient(SMALL, [batch], counts)
    wide = replace(
        batch,
        batch=replace(batch.batch, tokens_bs=F.pad(batch.batch.tokens_bs, (0, extra), value=66)),
        mask_bt=F.pad(batch.mask_bt, (0, extra)),
        advantages_bt=F.pad(batch.advantages_bt, (0, extra), value=7.0),  # type: ignore[arg-type]
    )
    with pytest.MonkeyPatch.context() as patch:
        for share in (0.0, 2.0):  # nothing is packed, everything is
            patch.setattr(packing, "DENSE_ABOVE", share)
            for part in (batch, wide):
                again, same = gradient(SMALL, [part], counts)
                assert again == pytest.approx(loss, rel=1e-5, abs=1e-6)
                torch.testing.assert_close(same, grad, rtol=RTOL, atol=ATOL)


def test_scores_are_those_of_transformers_whichever_side_it_pads() -> None:
    batch = rows_of([(4, 9), (1, 2), (6, 20), (3, 3)], 5).batch
    found = engine_of(LLAMA).score(batch, micro_batch_rows=1, micro_batch_tokens=40, temperature=0.8)
    assert found.logprobs_bt is not None
    model = frozen_twin(LLAMA).model
    lens_b = batch.prompt_lens_b + batch.response_lens_b
    width = batch.tokens_bs.shape[1]
    for side in ("left", "right"):
        shift_b = width - lens_b if side == "left" else torch.zeros_like(lens_b)
        places_bs = torch.arange(width) - shift_b[:, None]
        real_bs = (places_bs >= 0) & (places_bs < lens_b[:, None])
        tokens_bs = batch.tokens_bs.gather(1, places_bs.clamp(0, width - 1)) * real_bs
        with torch.no_grad():
            logits_bsv = model(
                tokens_bs, attention_mask=real_bs.long(), position_ids=places_bs.clamp(min=0)
            ).logits
        logprobs_bsv = (logits_bsv / 0.8).log_softmax(-1)
        for row in range(batch.num_rows):
            first = int(shift_b[row] + batch.prompt_lens_b[row])
            num = int(batch.response_lens_b[row])
            chosen_t = tokens_bs[row, first : first + num]
            expected_t = logprobs_bsv[row, first - 1 : first + num - 1].gather(1, chosen_t[:, None])[:, 0]
            torch.testing.assert_close(found.logprobs_bt[row, :num], expected_t, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("tp", "pp", "units"), [(1, 1, 2), (2, 1, 2), (1, 2, 1), (1, 1, 3)])
def test_units_and_layouts_give_the_gradient_of_one_rank(pool: Pool, tp: int, pp: int, units: int) -> None:
    batch = make_batch(9)
    counts = GlobalCounts.from_mask(batch.mask_bt, max_tokens=12)
    case = Case(config=QWEN2, tp=tp, pp=pp, units=units, optimizer=UNCLIPPED)
    (alone,) = dealt(batch, 1, Limit(rows=1))
    loss, grad = gradient(QWEN2, alone, counts)
    parts = dealt(batch, units, Limit(rows=1, tokens=30))
    trained = pool.run(case, cases.train, parts, LOSS, counts, 1)
    layout = Layout.make(decoder_spec(QWEN2), tp=1, pp=1, ranks=(0,))
    engine = TorchEngine(QWEN2, layout, UnitGroups.alone(layout), optimizer=UNCLIPPED)
    assert engine.grad is not None
    engine.grad.flat.copy_(grad)
    expected = cases.assemble(QWEN2, [cases.boxes(engine.grad)])
    found = cases.assemble(QWEN2, [one.grads for one in trained])
    assert all(one.metrics[0].loss == pytest.approx(loss, rel=1e-5) for one in trained)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=RTOL, atol=ATOL, msg=name)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=20))
def test_blocks_hold_every_token_once_and_little_beside(lens: list[int]) -> None:
    blocks = row_blocks(lens)
    edges = [0, *(block.stop for block in blocks)]
    assert [block.start for block in blocks] == edges[:-1]
    assert edges[-1] == sum(lens)
    assert sum(block.num_rows for block in blocks) == sum(1 for num in lens if num)
    for block in blocks:
        real = block.stop - block.start
        assert 5 * real >= 4 * block.num_rows * block.width
        assert (block.places_n is None) == (real == block.num_rows * block.width)


@settings(max_examples=20, deadline=None)
@given(lens=st.lists(st.integers(1, 30), min_size=1, max_size=8), seed=st.integers(0, 9))
def test_block_attention_is_that_of_each_row_alone(lens: list[int], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    q_nqd = torch.randn(sum(lens), 4, 8, generator=draw)
    k_nkd, v_nkd = torch.randn(2, sum(lens), 2, 8, generator=draw)
    width = max(lens)
    places_n = (torch.arange(width) < torch.tensor(lens)[:, None]).flatten().nonzero()[:, 0]
    attend = CausalAttention(num_rows=len(lens), width=width, places_n=places_n, blocks=row_blocks(lens))
    found, start = attend(0, q_nqd, k_nkd, v_nkd), 0
    for num in lens:
        row = RowBlock(start=start, stop=start + num, num_rows=1, width=num)
        torch.testing.assert_close(
            found[start : start + num], row.attend(q_nqd, k_nkd, v_nkd), rtol=1e-5, atol=1e-6
        )
        start += num
