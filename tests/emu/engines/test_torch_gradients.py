"""Which gradients are parts of a whole, and who counts which element in the norm."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.arena import Arena, ShardState
from nereus.emu.decoder import EMBED, DecoderConfig, decoder_spec
from nereus.emu.engines.torch import optimizer as adam
from nereus.emu.engines.torch.gradients import copy_spans, owned_spans, partial_gradients, squared_norm
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.layout import Layout, shard
from nereus.emu.source import fill
from nereus.emu.tensor import ModelSpec
from tests.emu.engines.torch_cases import LLAMA, MIXTRAL, QWEN2, QWEN3, Random

CONFIGS = (
    LLAMA,
    QWEN2,
    QWEN3,
    replace(LLAMA, num_heads=9, num_kv_heads=3, head_dim=4),
    QWEN2.with_head("value"),
    MIXTRAL,
)


def layout_of(spec: ModelSpec, tp: int, pp: int, ep: int = 1, cp: int = 1) -> Layout:
    return Layout.make(spec, tp=tp, pp=pp, ep=ep, cp=cp, ranks=tuple(range(tp * pp * ep * cp)))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[DecoderConfig, Layout]:
    config = draw(st.sampled_from(CONFIGS))
    kv, heads = config.num_kv_heads, config.num_heads
    tps = [tp for tp in range(1, heads + 1) if tp <= kv or (tp % kv == 0 and heads % tp == 0)]
    pp = draw(st.integers(1, config.num_layers))
    ep = draw(st.sampled_from([1, 2, 4] if config.experts else [1]))
    sizes = draw(st.sampled_from(tps)), pp, ep, draw(st.integers(1, 2))
    return config, layout_of(decoder_spec(config), *sizes)


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_every_logical_element_is_counted_once(drawn: tuple[DecoderConfig, Layout]) -> None:
    config, layout = drawn
    spec = decoder_spec(config)
    source = Random(config)
    total, counted = torch.zeros((), dtype=torch.float64), 0
    for rank in layout.ranks:
        mine = shard(spec, layout, rank)
        state = ShardState.empty(mine, {"grad": torch.float32})
        fill(state, source, {"grad": "theta"})
        spans = owned_spans(spec, layout, mine)
        counted += sum(hi - lo for lo, hi in spans)
        total += squared_norm(state["grad"].flat, spans)
    expected = sum(float(tensor.double().square().sum()) for tensor in source.tensors.values())
    assert counted == spec.num_elements
    assert float(total) == pytest.approx(expected, rel=1e-12)


def parts_of(config: DecoderConfig, tp: int, pp: int, rank: int) -> dict[str, str]:
    spec = decoder_spec(config)
    layout = layout_of(spec, tp, pp)
    return {p.physical: p.group for p in partial_gradients(spec, layout, shard(spec, layout, rank))}


def test_replicated_keys_and_values_are_summed_over_their_holders() -> None:
    spec = decoder_spec(QWEN2)
    layout = layout_of(spec, 4, 1)
    parts = partial_gradients(spec, layout, shard(spec, layout, 1))
    assert {p.group for p in parts} == {"kv"}
    weights = [p for p in parts if p.physical == "model.layers.0.self_attn.qkv_proj.weight"]
    assert [p.rows for p in weights] == [(8, 16), (16, 24)]  # one query head of 8 rows lies before them
    assert not partial_gradients(spec, layout_of(spec, 2, 1), shard(spec, layout_of(spec, 2, 1), 0))


def test_head_norms_are_summed_over_tp_only_when_it_is_cut() -> None:
    assert set(parts_of(QWEN3, 2, 1, 0).values()) == {"tp"}
    assert len(parts_of(QWEN3, 2, 1, 0)) == 2 * QWEN3.num_layers
    assert parts_of(QWEN3, 1, 1, 0) == {}


def test_gradients_are_summed_over_all_copies_and_those_of_experts_along_cp() -> None:
    spec = decoder_spec(MIXTRAL)
    layout = layout_of(spec, 1, 1, 2, 2)
    held = shard(spec, layout, 0)
    spans = copy_spans(spec, layout, held)
    assert [span.axes for span in spans] == ["copies", "cp"] * MIXTRAL.num_layers + ["copies"]
    assert spans[0].lo == 0
    assert all(one.hi == other.lo for one, other in pairwise(spans))
    assert spans[-1].hi == Arena(held, torch.float32).flat.numel()
    plain = layout_of(spec, 2, 1)
    assert copy_spans(spec, plain, shard(spec, plain, 0)) == ()
    assert {p.physical for p in partial_gradients(spec, plain, shard(spec, plain, 0))} == {
        f"model.layers.{layer}.mlp.gate.weight" for layer in range(MIXTRAL.num_layers)
    }


def test_tied_embeddings_are_summed_over_first_and_last_stage() -> None:
    assert [parts_of(QWEN2, 1, 3, rank) for rank in range(3)] == [{EMBED: "tie"}, {}, {EMBED: "tie"}]
    assert parts_of(QWEN2, 1, 1, 0) == {}
    assert parts_of(LLAMA, 1, 2, 0) == {}


def test_adamw_bits_do_not_depend_on_the_cut() -> None:
    spec = decoder_spec(QWEN2)
    source = Random(QWEN2)
    kinds = ("theta", "exp_avg", "exp_avg_sq")
    settings = AdamW(weight_decay=0.01)

    def stepped(layout: Layout, rank: int) -> ShardState:
        mine = shard(spec, layout, rank)
        state = ShardState.empty(mine, dict.fromkeys((*kinds, "grad"), torch.float32))
        fill(state, source, dict.fromkeys((*kinds, "grad"), "theta"))
        state["exp_avg_sq"].flat.square_()
        adam.step(state, state["grad"].flat, settings, learning_rate=1e-3, step_count=3)
        return state

    whole = stepped(layout_of(spec, 1, 1), 0)
    logical = {p.logical: whole["theta"].piece(p) for p in whole.shard.pieces}
    for layout in (layout_of(spec, 2, 1), layout_of(spec, 4, 1), layout_of(spec, 2, 3)):
        for rank in layout.ranks:
            state = stepped(layout, rank)
            for piece in state.shard.pieces:
                expected = logical[piece.logical][tuple(slice(lo, hi) for lo, hi in piece.box)]
                assert torch.equal(state["theta"].piece(piece), expected), piece


@pytest.mark.parametrize("step_count", [1, 5])
def test_adamw_equals_torch(step_count: int) -> None:
    spec = decoder_spec(LLAMA)
    mine = shard(spec, layout_of(spec, 1, 1), 0)
    state = ShardState.empty(mine, dict.fromkeys(("theta", "exp_avg", "exp_avg_sq"), torch.float32))
    fill(state, Random(LLAMA), {"theta": "theta"})
    twin = torch.nn.Parameter(state["theta"].flat.clone())
    reference = torch.optim.AdamW([twin], lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    settings = AdamW(betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    draw = torch.Generator().manual_seed(0)
    for step in range(1, step_count + 1):
        grad = Arena(mine, torch.float32).flat.normal_(generator=draw)
        twin.grad = grad.clone()
        reference.step()
        adam.step(state, grad, settings, learning_rate=1e-2, step_count=step)
    # torch's default path rounds in another order
    torch.testing.assert_close(state["theta"].flat, twin.detach(), rtol=1e-6, atol=1e-6)


def test_clipping_matches_torch_and_leaves_small_gradients_alone() -> None:
    grad = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    twin = torch.nn.Parameter(torch.zeros(1000))
    twin.grad = grad.clone()
    norm = float(torch.nn.utils.clip_grad_norm_([twin], 0.5))
    clipped = grad.clone()
    adam.clip(clipped, norm, 0.5)
    torch.testing.assert_close(clipped, twin.grad, rtol=1e-6, atol=0)
    for limit in (None, norm + 1):
        adam.clip(grad, norm, limit)
    assert float(grad.norm()) == pytest.approx(norm)
