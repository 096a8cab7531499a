"""Layouts and shards: every element is stored by exactly the right ranks; what no piece covers is padding."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nereus.emu.decoder import EMBED, DecoderConfig, decoder_spec
from nereus.emu.layout import Layout, Position, Shard, shard, shard_at
from nereus.emu.tensor import Even, Fused, ModelSpec, TensorSpec, box_shape, box_size
from nereus.errors import InvalidLayout
from tests.emu.exchange import slices
from tests.emu.states import random_model


def random_layout(rng: random.Random, model: ModelSpec) -> Layout:
    while True:
        tp, pp = rng.choice([1, 2, 3, 4, 6, 8, 12]), rng.randint(1, model.num_layers)
        cuts = sorted(rng.sample(range(1, model.num_layers), pp - 1))
        layers = tuple(hi - lo for lo, hi in zip([0, *cuts], [*cuts, model.num_layers], strict=True))
        ep, cp = rng.choice([1, 2, 3, 6] if model.num_experts else [1]), rng.choice([1, 1, 2, 3])
        ranks = tuple(rng.sample(range(2000), tp * pp * ep * cp))
        try:
            return Layout.make(model, tp=tp, pp=pp, ranks=ranks, layers=layers, ep=ep, cp=cp)
        except InvalidLayout:
            continue


def expected_holders(model: ModelSpec, layout: Layout, spec: TensorSpec) -> NDArray[np.bool_]:
    """[world, *shape]: who must hold each element, from place and cut alone."""
    out = np.zeros((layout.world_size, *spec.shape), dtype=bool)
    for pp, (lo, hi) in enumerate(layout.split):
        first, last = pp == 0, pp == layout.pp - 1
        here = {"first": first, "last": last}.get(str(spec.place), False)
        if isinstance(spec.place, int):
            here = lo <= spec.place < hi
        if here or (spec.also == "last" and last):
            for cp, ep, tp in product(range(layout.cp), range(layout.ep), range(layout.tp)):
                box = spec.cut.box(spec.shape, layout.tp, tp)
                if spec.experts:
                    each = spec.shape[0] // layout.ep
                    box = ((ep * each, (ep + 1) * each), *box[1:])
                row = ((pp * layout.cp + cp) * layout.ep + ep) * layout.tp + tp
                out[row][slices(box)] = True
    return out


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_element_is_stored_once_by_exactly_the_right_ranks(seed: int) -> None:
    rng = random.Random(seed)
    model = random_model(rng)
    layout = random_layout(rng, model)
    count = {s.name: np.zeros((layout.world_size, *s.shape), dtype=int) for s in model.tensors}
    for index, rank in enumerate(layout.ranks):
        for piece in shard(model, layout, rank).pieces:
            assert box_shape(piece.stored) == box_shape(piece.box)
            assert box_size(piece.box) > 0
            count[piece.logical][index][slices(piece.box)] += 1
    for spec in model.tensors:
        np.testing.assert_array_equal(count[spec.name], expected_holders(model, layout, spec).astype(int))
        assert count[spec.name].any(axis=0).all(), "no element is lost"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_only_vocabulary_rows_are_padding(seed: int) -> None:
    rng = random.Random(seed)
    model = random_model(rng)
    layout = random_layout(rng, model)
    for rank in layout.ranks:
        for tensor in shard(model, layout, rank).tensors:
            covered = np.zeros(tensor.shape, dtype=int)
            for piece in tensor.pieces:
                assert piece.physical == tensor.name
                covered[slices(piece.stored)] += 1
            assert covered.max(initial=0) <= 1, "pieces do not overlap"
            if tensor.name not in (EMBED, "lm_head.weight"):
                assert covered.all()


def test_fused_rows_are_stored_part_after_part_and_may_be_empty() -> None:
    """gate/up of 2 x 6 rows over 4 by the chunk rule: 2 + 2 rows at three positions, none at the last."""
    cut = Even(dim=0, rule="chunk")
    model = ModelSpec(
        tensors=(
            TensorSpec(name="gate", shape=(6, 5), cut=cut, place=0),
            TensorSpec(name="up", shape=(6, 5), cut=cut, place=0),
        ),
        fused=(Fused(name="gate_up", parts=("gate", "up")),),
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
    )
    held = [shard_at(model, 4, (1,), Position(pp=0, tp=tp)) for tp in range(4)]
    assert [each.tensors[0].shape for each in held] == [(4, 5), (4, 5), (4, 5), (0, 5)]
    assert [(p.logical, p.stored[0], p.box[0]) for p in held[1].pieces] == [
        ("gate", (0, 2), (2, 4)),
        ("up", (2, 4), (2, 4)),
    ]
    assert held[3].pieces == ()


def grouped_model() -> ModelSpec:
    config = DecoderConfig(
        vocab_size=8,
        hidden_size=4,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=1,
        intermediate_size=4,
    )
    spec = decoder_spec(config)
    rules = tuple(
        Fused(name=r.name, parts=r.parts, order="per_kv_group") if "qkv" in r.name else r for r in spec.fused
    )
    return ModelSpec(tensors=spec.tensors, fused=rules, num_layers=1, num_heads=4, num_kv_heads=2)


def test_per_kv_group_order_interleaves_queries_keys_and_values() -> None:
    held = shard_at(grouped_model(), 1, (1,), Position(pp=0, tp=0))
    qkv = next(tensor for tensor in held.tensors if "qkv" in tensor.name)
    order = [(piece.logical.split(".")[-2][0], piece.box[0]) for piece in qkv.pieces]
    assert order == [("q", (0, 2)), ("k", (0, 1)), ("v", (0, 1)), ("q", (2, 4)), ("k", (1, 2)), ("v", (1, 2))]


def test_tied_embedding_is_held_by_first_and_last_stage() -> None:
    config = DecoderConfig(
        vocab_size=8,
        hidden_size=4,
        num_layers=3,
        num_heads=2,
        num_kv_heads=2,
        head_dim=2,
        intermediate_size=4,
        tied=True,
    )
    model = decoder_spec(config)

    def holds(held: Shard) -> int:
        return sum(piece.logical == EMBED for piece in held.pieces)

    stages = [holds(shard_at(model, 1, (1, 1, 1), Position(pp=pp, tp=0))) for pp in range(3)]
    assert stages == [1, 0, 1]
    assert holds(shard_at(model, 1, (3,), Position(pp=0, tp=0))) == 1


def test_i12_positions_follow_the_order_of_ranks_and_never_their_size() -> None:
    layout = Layout.make(grouped_model(), tp=2, pp=1, ranks=(9, 3))
    assert layout.position(9) == Position(pp=0, tp=0)
    assert layout.position(3) == Position(pp=0, tp=1)
    assert layout.tp_group(0) == (9, 3)
    assert layout.rank_at(0, 1) == 3
    with pytest.raises(InvalidLayout, match="rank 4 is not in the layout"):
        layout.position(4)


def test_groups_cover_the_ranks_along_each_axis() -> None:
    config = DecoderConfig(
        vocab_size=8,
        hidden_size=4,
        num_layers=5,
        num_heads=4,
        num_kv_heads=4,
        head_dim=1,
        intermediate_size=4,
    )
    layout = Layout.make(decoder_spec(config), tp=2, pp=3, ranks=(5, 4, 3, 2, 1, 0))
    assert [layout.tp_group(pp) for pp in range(3)] == [(5, 4), (3, 2), (1, 0)]
    assert [layout.pp_group(tp) for tp in range(2)] == [(5, 3, 1), (4, 2, 0)]
    assert layout.layers == (2, 2, 1)
    assert layout.split == ((0, 2), (2, 4), (4, 5))
    assert layout.with_ranks((0, 1, 2, 3, 4, 5)).tp_group(2) == (4, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 0}, "at least 1"),
        ({"ranks": (0, 1, 2)}, "distinct ranks"),
        ({"ranks": (0, 0)}, "distinct ranks"),
        ({"layers": (2,)}, "must be split over"),
        ({"tp": 3, "ranks": (0, 1, 2)}, "multiple of 2"),
        ({"pp": 2, "tp": 1, "layers": (1, 0)}, "at least one each"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"tp": 2, "pp": 1, "ranks": (0, 1), "layers": None} | change
    with pytest.raises(InvalidLayout, match=message):
        Layout.make(grouped_model(), **arguments)  # type: ignore[arg-type]
