"""What a rank hands to vLLM's loader: whole shapes, its own part written. Needs no vLLM."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.arena import Arena
from nereus.emu.decoder import EMBED, DecoderConfig, decoder_spec
from nereus.emu.engines.vllm.weights import checkpoint_tensors, needs_gather, served_rows
from nereus.emu.layout import Layout, shard
from tests.emu.engines.conformance import LLAMA_TIED, MODEL, ONE_KV_HEAD, QWEN2, QWEN3
from tests.emu.engines.torch_cases import Random


def filled(config: DecoderConfig, layout: Layout, rank: int, *, order: str = "blocks") -> Arena:
    model = decoder_spec(config, qkv_order="per_kv_group" if order == "per_kv_group" else "blocks")
    arena, source = Arena(shard(model, layout, rank), torch.float32), Random(config)
    for piece in arena.shard.pieces:
        arena.piece(piece).copy_(source.read("theta", piece.logical, piece.box))
    return arena


@pytest.mark.parametrize("order", ["blocks", "per_kv_group"])
@pytest.mark.parametrize("config", [MODEL, LLAMA_TIED, QWEN2, QWEN3, ONE_KV_HEAD])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_each_rank_writes_its_part_of_every_tensor_it_serves(
    config: DecoderConfig, tp: int, pp: int, order: str
) -> None:
    spec, whole = decoder_spec(config), Random(config).tensors
    layout = Layout.make(spec, tp=tp, pp=pp, ranks=tuple(range(tp * pp)))
    written = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in whole.items()}
    for rank in layout.ranks:
        arena = filled(config, layout, rank, order=order)
        model = decoder_spec(config, qkv_order="per_kv_group" if order == "per_kv_group" else "blocks")
        for name, tensor in checkpoint_tensors(model, arena, {}):
            assert tensor.shape == whole[name].shape
            for piece in arena.shard.pieces:
                if piece.logical == name:
                    box = tuple(slice(lo, hi) for lo, hi in piece.box)
                    assert torch.equal(tensor[box], whole[name][box])
                    written[name][box] = True
    assert all(bool(each.all()) for each in written.values())


def test_a_rank_that_holds_a_tensor_whole_copies_nothing() -> None:
    layout = Layout.make(decoder_spec(MODEL), tp=1, pp=1, ranks=(0,))
    arena = filled(MODEL, layout, 0)
    for _, tensor in checkpoint_tensors(decoder_spec(MODEL), arena, {}):
        assert tensor.untyped_storage().data_ptr() == arena.flat.untyped_storage().data_ptr()


@settings(deadline=None)  # machines are shared
@given(st.integers(1, 2000), st.sampled_from([1, 2, 4, 8]))
def test_a_vocabulary_is_gathered_only_where_the_two_sides_cut_it_apart(vocab: int, tp: int) -> None:
    served = [served_rows(vocab, tp, position) for position in range(tp)]
    assert [row for lo, hi in served for row in range(lo, hi)] == list(range(vocab))
    config = replace(MODEL, vocab_size=vocab, num_heads=8, num_kv_heads=8)
    spec = decoder_spec(config)
    layout = Layout.make(spec, tp=tp, pp=1, ranks=tuple(range(tp)))
    held = [spec.by_name[EMBED].cut.box((vocab, 1), tp, position)[0] for position in range(tp)]
    lacking = any(set(range(*need)) - set(range(*have)) for need, have in zip(served, held, strict=True))
    assert needs_gather(spec, layout, EMBED) == lacking
    assert not lacking or vocab % 64
