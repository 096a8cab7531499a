"""Shadow or bounded: chosen by the memory at hand, and staged so that a replica always stays."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from nereus.emu.bounded import choose_moves, stages_of
from nereus.emu.reshard import plan_reshard
from nereus.errors import InvalidOperation
from tests.emu.states import random_kinds, random_model, random_units

RANKS = tuple(range(8))


@pytest.mark.parametrize("seed", range(25))
def test_stages_lead_to_the_same_units_and_each_leaves_a_replica_alone(seed: int) -> None:
    rng = random.Random(seed)
    model, kinds = random_model(rng), random_kinds(rng)
    old = random_units(rng, model, kinds, RANKS, first_index=0)
    new = random_units(rng, model, kinds, RANKS, first_index=100)
    plan = plan_reshard(model, old, new)
    try:
        stages = stages_of(plan)
    except InvalidOperation:
        assert all(all(unit.ranks & other.ranks for unit in plan.new) for other in plan.old)
        return
    assert (stages[0].old, stages[-1].new) == (plan.old, plan.new) or set(stages[-1].new) == set(plan.new)
    for stage in stages:
        assert any(unit in stage.old for unit in stage.new)
        for rank in stage.ranks:
            assert stage.rank_plan(rank, "bounded").mode == "bounded"
    for before, after in pairwise(stages):
        assert set(before.new) == set(after.old)


def test_shadow_is_taken_where_it_fits_and_refused_nowhere_is_named() -> None:
    rng = random.Random(3)
    model, kinds = random_model(rng), random_kinds(rng)
    old = random_units(rng, model, kinds, (0, 1, 2, 3), first_index=0)
    new = random_units(rng, model, kinds, (4, 5, 6, 7), first_index=9)
    plan = plan_reshard(model, old, (*old, *new))
    assert choose_moves(plan, {}).mode == "shadow"
    room = {rank: plan.peak_bytes(rank) for rank in plan.ranks}
    assert choose_moves(plan, room).mode == "shadow"
    tight = next(iter(new[0].ranks))
    with pytest.raises(InvalidOperation, match=f"rank {tight} would hold"):
        choose_moves(plan, {**room, tight: 1})
