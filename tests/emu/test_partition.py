"""Partitions: blocks cover the model once, and every layout holds each of them whole or not at all."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.layout import Layout, shard
from nereus.emu.partition import Cut, Partition, classes_of, cut_of, partition
from nereus.emu.tensor import ModelSpec
from tests.emu.exchange import slices
from tests.emu.states import random_model
from tests.emu.test_layout import random_layout


def random_partition(seed: int) -> tuple[ModelSpec, Partition, list[Cut]]:
    rng = random.Random(seed)
    model = random_model(rng)
    layouts = [random_layout(rng, model) for _ in range(3)]
    cuts = sorted({cut_of(replace(each, slices=rng.choice([1, 1, 2, 3]))) for each in layouts})
    return model, partition(model, tuple(cuts)), cuts


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_blocks_cover_every_element_once(seed: int) -> None:
    model, part, _ = random_partition(seed)
    count = {spec.name: np.zeros(spec.shape, dtype=int) for spec in model.tensors}
    for block, size in zip(part.blocks, part.num_elements, strict=True):
        seen = 0
        for instance, cell in block.items():
            target = count[part.classes[block.kind].names[instance][cell.slot]][slices(cell.box)]
            target += 1
            seen += target.size
        assert seen == size
    assert all((array == 1).all() for array in count.values())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_position_holds_exactly_the_elements_of_its_blocks(seed: int) -> None:
    model, part, cuts = random_partition(seed)
    for cut in cuts:
        layout = Layout(tp=cut.tp, pp=len(cut.layers), ranks=(), layers=cut.layers, slices=cut.slices)
        layout = replace(layout, ep=cut.ep, cp=cut.cp)
        layout = layout.with_ranks(tuple(range(layout.world_size)))
        for row in layout.ranks:
            held = {spec.name: np.zeros(spec.shape, dtype=bool) for spec in model.tensors}
            for number in np.flatnonzero(part.held[cut][row]):
                block = part.blocks[number]
                for instance, cell in block.items():
                    held[part.classes[block.kind].names[instance][cell.slot]][slices(cell.box)] = True
            want = {spec.name: np.zeros(spec.shape, dtype=bool) for spec in model.tensors}
            for piece in shard(model, layout, row).pieces:
                want[piece.logical][slices(piece.box)] = True
            assert all(np.array_equal(held[name], want[name]) for name in want)


def test_the_number_of_blocks_does_not_grow_with_the_layers() -> None:
    def blocks(num_layers: int) -> int:
        config = DecoderConfig(
            vocab_size=256,
            hidden_size=16,
            num_layers=num_layers,
            num_heads=8,
            num_kv_heads=8,
            head_dim=2,
            intermediate_size=32,
        )
        half, quarter = num_layers // 2, num_layers // 4
        return len(
            partition(
                decoder_spec(config), (Cut(4, (quarter,) * 4), Cut(8, (half, num_layers - half)))
            ).blocks
        )

    assert blocks(8) == blocks(80)


def test_layers_of_unequal_geometry_are_classes_of_their_own() -> None:
    config = DecoderConfig(
        vocab_size=8,
        hidden_size=4,
        num_layers=4,
        num_heads=2,
        num_kv_heads=2,
        head_dim=2,
        intermediate_size=4,
    )
    spec = decoder_spec(config)
    wide = decoder_spec(replace(config, intermediate_size=6)).by_name
    mixed = ModelSpec(
        tensors=tuple(wide[t.name] if t.place in (1, 3) else t for t in spec.tensors),
        fused=spec.fused,
        num_layers=4,
        num_heads=2,
        num_kv_heads=2,
    )
    layers = [kind.layers for kind in classes_of(mixed) if kind.place == "layer"]
    assert layers == [(0, 2), (1, 3)]
    assert partition(mixed, (Cut(2, (3, 1)),)).num_elements.sum() == mixed.num_elements


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_block_is_cut_between_rows_of_its_cells(seed: int) -> None:
    _, part, _ = random_partition(seed)
    rng = random.Random(seed)
    block = rng.choice(part.blocks)
    sizes = [int(np.prod([hi - lo for lo, hi in cell.box])) for _, cell in block.items()]
    rows = [next((hi - lo for lo, hi in cell.box if hi - lo > 1), 1) for _, cell in block.items()]
    allowed = {0}
    start = 0
    for size, num in zip(sizes, rows, strict=True):
        allowed |= {start + row * (size // num) for row in range(num + 1)}
        start += size
    at = rng.randrange(start)
    assert block.snap(at) == min(place for place in allowed if place >= at)
