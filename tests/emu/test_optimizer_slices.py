"""Optimizer slices divide a shard exactly, and any hop cuts them anew at the lower bound."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.kinds import Kind, optimizer_kinds
from nereus.emu.layout import Layout, Rank, shard, sliced
from nereus.emu.optimizer_slices import optimizer_units, seat
from nereus.emu.reshard import ReshardPlan, plan_reshard
from nereus.emu.shard_bytes import sizes_of
from nereus.emu.tensor import box_size
from nereus.emu.topology import Topology
from nereus.emu.unit import Unit, UnitId
from nereus.errors import NoSource
from tests.emu.exchange import check, run, stores_of
from tests.emu.states import random_model, random_units

STAGE = "actor.training"
THETA, OMEGA = (Kind("theta", "bf16"),), optimizer_kinds("bf16")
MODEL = decoder_spec(
    DecoderConfig(
        vocab_size=64,
        hidden_size=16,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=4,
        intermediate_size=32,
    )
)


def units_of(tp: int, pp: int, *groups: tuple[Rank, ...]) -> tuple[Unit, ...]:
    return tuple(
        Unit(
            id=UnitId(STAGE, number),
            model="actor",
            kinds=THETA,
            layout=Layout.make(MODEL, tp=tp, pp=pp, ranks=ranks),
        )
        for number, ranks in enumerate(groups)
    )


def omega_of(units: tuple[Unit, ...], *, shared: bool = True) -> tuple[Unit, ...]:
    return optimizer_units(STAGE, "actor", [unit.layout for unit in units], OMEGA, shared=shared)


def moved(old: tuple[Unit, ...], new: tuple[Unit, ...], **options: object) -> tuple[ReshardPlan, ReshardPlan]:
    """The plans of weights and optimizer state, the new units seated for both."""
    topology = Topology.single_node(1 + max(r for unit in (*old, *new) for r in unit.layout.ranks))
    placed = seat(MODEL, old, omega_of(old), new, topology)
    theta = plan_reshard(MODEL, old, placed, placement="as_given")
    return theta, plan_reshard(MODEL, omega_of(old), omega_of(placed), placement="as_given")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_slices_divide_every_box_of_the_shard_and_differ_by_one_row(seed: int) -> None:
    rng = random.Random(seed)
    model = random_model(rng)
    units = random_units(rng, model, THETA, tuple(range(12)), first_index=0)
    layouts = [unit.layout for unit in units]
    omega = sliced(layouts)
    for place in range(layouts[0].world_size):
        whole = shard(model, layouts[0], layouts[0].ranks[place])
        parts = [shard(model, omega, layout.ranks[place]) for layout in layouts]
        for tensor in whole.tensors:
            count = {piece.logical: np.zeros(model.by_name[piece.logical].shape) for piece in tensor.pieces}
            for part in parts:
                (mine,) = [each for each in part.tensors if each.name == tensor.name]
                for piece in mine.pieces:
                    count[piece.logical][tuple(slice(lo, hi) for lo, hi in piece.box)] += 1
                stored = sum(box_size(piece.stored) for piece in mine.pieces)
                assert omega.slices == 1 or stored == np.prod(mine.shape), "a slice has no padding"
            for piece in tensor.pieces:
                inside = tuple(slice(lo, hi) for lo, hi in piece.box)
                assert (count[piece.logical][inside] == 1).all()
                count[piece.logical][inside] = 0
            assert not any(array.any() for array in count.values())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1))
def test_any_hop_cuts_the_slices_anew_bit_for_bit_at_the_lower_bound(seed: int) -> None:
    rng = random.Random(seed)
    model, ranks = random_model(rng), tuple(range(10))
    old = random_units(rng, model, THETA, ranks, first_index=0)
    new = random_units(rng, model, THETA, ranks, first_index=50)
    before, after = rng.random() < 0.7, rng.random() < 0.7
    if rng.random() < 0.8:
        new = seat(
            model, old, omega_of(old, shared=before), new, Topology.uniform(10, rng.choice([2, 5, 10]))
        )
    plan = plan_reshard(
        model, omega_of(old, shared=before), omega_of(new, shared=after), placement="as_given"
    )
    outcome = run(plan, stores_of(plan))
    check(plan, outcome)
    assert outcome.sent_bytes == plan.bytes == plan.lower_bound
    sizes = sizes_of({"actor": model})
    for unit in plan.new if after else ():
        held = [
            sum(array.size for (kind, _), array in outcome.stores[r].items() if kind == "master")
            for r in unit.layout.ranks
        ]
        assert sizes(unit) == tuple(12 * count for count in held)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (units_of(2, 1, (0, 1), (2, 3)), units_of(1, 1, (0,), (1,), (2,), (3,))),
        (units_of(1, 1, (0,), (1,), (2,), (3,)), units_of(2, 1, (0, 1), (2, 3))),
        (units_of(4, 1, (0, 1, 2, 3)), units_of(2, 1, (0, 1), (2, 3))),
    ],
)
def test_trading_tp_for_dp_moves_the_optimizer_state_of_norms_alone(
    old: tuple[Unit, ...], new: tuple[Unit, ...]
) -> None:
    theta, omega = moved(old, new)
    assert omega.bytes <= 12 * 2 * replicated() < 0.05 * 12 * MODEL.num_elements
    assert theta.bytes == theta.lower_bound


def test_an_extended_stage_keeps_its_weights_and_half_of_each_slice() -> None:
    old = units_of(2, 1, (0, 1), (2, 3))
    theta, omega = moved(old, units_of(2, 1, (0, 1), (2, 3), (4, 5), (6, 7)))
    layouts = [unit.layout.ranks for unit in theta.new]
    assert set(layouts) == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert theta.bytes == 2 * MODEL.num_elements * 2 + 2 * 2 * replicated(), "the new units' weights"
    everything = sum(sizes_of({"actor": MODEL})(omega.new[0]))
    assert omega.bytes == everything // 2, "each old rank keeps half of its slice, new ones get the rest"


def replicated() -> int:
    """Elements that the second rank of a unit of tp 2 holds as well: the norms."""
    return sum(int(np.prod(spec.shape)) for spec in MODEL.tensors if len(spec.shape) == 1)


def test_a_destroyed_units_slices_reach_those_that_stay() -> None:
    old = units_of(1, 1, (0,), (1,), (2,), (3,))
    theta, omega = moved(old, units_of(1, 1, (1,), (2,), (3,)))
    outcome = run(omega, stores_of(omega))
    check(omega, outcome)
    assert theta.bytes == 0
    assert omega.bytes == omega.lower_bound > 0


def test_the_death_of_a_unit_takes_the_only_copy_of_its_slice() -> None:
    old = units_of(1, 1, (0,), (1,), (2,))
    new = units_of(1, 1, (0,), (1,))
    theta = plan_reshard(MODEL, old, new, lost={2})
    assert theta.bytes == 0, "its weights have other holders"
    with pytest.raises(NoSource, match="restore this model from its last checkpoint"):
        plan_reshard(MODEL, omega_of(old), omega_of(new), lost={2}, placement="as_given")


def test_sharing_divides_the_optimizers_bytes_by_the_units() -> None:
    units = units_of(2, 2, (0, 1, 2, 3), (4, 5, 6, 7))
    sizes = sizes_of({"actor": MODEL})
    whole = sizes(omega_of(units, shared=False)[0])
    shared = sizes(omega_of(units)[0])
    for place in range(4):
        assert shared[2 * place : 2 * place + 2] == (whole[place] // 2,) * 2
