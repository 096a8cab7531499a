"""Split, Merge, Extend, Destroy: what they give, what they refuse, and that ranks are never lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.kinds import serving_kinds, training_kinds
from nereus.emu.layout import Layout
from nereus.emu.operations import Destroy, Extend, Merge, Operation, Split, apply_all
from nereus.emu.unit import ClusterState, Unit, UnitId
from nereus.errors import InvalidOperation

KINDS = training_kinds("bf16")


def name(index: int, stage: str = "actor.training") -> UnitId:
    return UnitId(stage, index)


def flat(*ranks: int, pp: int = 1) -> Layout:
    return Layout(tp=len(ranks) // pp, pp=pp, ranks=ranks, layers=(4 // pp,) * pp)


def start(*layouts: Layout, num_ranks: int = 8) -> ClusterState:
    units = [Unit(id=name(i), model="actor", layout=each, kinds=KINDS) for i, each in enumerate(layouts)]
    return ClusterState.of(units, range(num_ranks))


def test_split_gives_full_replicas_on_the_units_ranks() -> None:
    state = start(flat(0, 1, 2, 3))
    after = Split(unit=name(0), into=((name(1), flat(0, 2)), (name(2), flat(1, 3)))).apply(state)
    assert [(unit.id, unit.layout.ranks) for unit in after.units] == [(name(1), (0, 2)), (name(2), (1, 3))]
    assert all(unit.kinds == KINDS and unit.model == "actor" for unit in after.units)


def test_a_part_may_keep_the_units_name() -> None:
    after = Split(unit=name(0), into=((name(0), flat(0)), (name(1), flat(1)))).apply(start(flat(0, 1)))
    assert [unit.id for unit in after.units] == [name(0), name(1)]


@pytest.mark.parametrize(
    ("into", "rule"),
    [
        (((name(1), flat(0, 1, 2, 3)),), "at least two units"),
        (((name(1), flat(0, 1)), (name(2), flat(2))), "every rank of the old units exactly once"),
        (((name(1), flat(0, 1)), (name(2), flat(1, 2, 3))), "exactly once"),
        (((name(1), flat(0, 1)), (name(2), flat(2, 3, 4))), "exactly once"),
        (((name(1), flat(0, 1)), (name(2, "critic.training"), flat(2, 3))), "stays in its model-stage"),
    ],
)
def test_split_refuses_parts_that_do_not_make_up_the_unit(
    into: tuple[tuple[UnitId, Layout], ...], rule: str
) -> None:
    with pytest.raises(InvalidOperation, match=rf"cannot split actor.training#0: .*{rule}.*Remedy: "):
        Split(unit=name(0), into=into).apply(start(flat(0, 1, 2, 3)))


def test_merge_joins_replicas_on_their_ranks() -> None:
    state = start(flat(0, 1), flat(2, 3))
    after = Merge(units=(name(0), name(1)), into=(name(0), flat(0, 2, 1, 3))).apply(state)
    assert [unit.layout.ranks for unit in after.units] == [(0, 2, 1, 3)]


def test_merge_of_one_unit_changes_its_layout_in_place() -> None:
    state = start(flat(0, 1, 2, 3, pp=2))
    after = Merge(units=(name(0),), into=(name(0), flat(0, 1, 2, 3))).apply(state)
    assert after.unit(name(0)).layout.pp == 1
    with pytest.raises(InvalidOperation, match="leave the unit alone"):
        Merge(units=(name(0),), into=(name(0), flat(0, 1, 2, 3))).apply(after)


def test_merge_refuses_units_that_are_no_replicas() -> None:
    critic = Unit(id=name(0, "critic.training"), model="critic", layout=flat(4), kinds=KINDS)
    state = start(flat(0, 1), flat(2, 3)).with_units(critic)
    with pytest.raises(InvalidOperation, match="must be replicas"):
        Merge(units=(name(0), critic.id), into=(name(0), flat(0, 1, 4))).apply(state)
    with pytest.raises(InvalidOperation, match="distinct units"):
        Merge(units=(name(0), name(0)), into=(name(0), flat(0, 1))).apply(state)
    with pytest.raises(InvalidOperation, match="distinct units"):
        Merge(units=(), into=(name(0), flat(0, 1))).apply(state)
    with pytest.raises(InvalidOperation, match="exactly once"):
        Merge(units=(name(0), name(1)), into=(name(0), flat(0, 1))).apply(state)


def test_extend_puts_new_replicas_on_free_ranks_and_keeps_the_sources() -> None:
    state = start(flat(0, 1))
    extend = Extend(sources=(name(0),), into=((name(1), flat(5, 4)), (name(2), flat(2))))
    after = extend.apply(state)
    assert after.units[0] == state.units[0]
    assert after.free("training") == {3, 6, 7}
    old, new = extend.reshard_units(state)
    assert old == state.units
    assert new == after.units


def test_extend_makes_serving_units_of_another_stage_from_training_units() -> None:
    state = start(flat(0, 1))
    serving = name(0, "actor.generation")
    after = Extend(sources=(name(0),), into=((serving, flat(0, 1)),), kinds=serving_kinds("bf16")).apply(
        state
    )
    assert after.unit(serving).kinds == serving_kinds("bf16")
    with pytest.raises(InvalidOperation, match=r"kinds .*are not in actor.generation#0"):
        Extend(sources=(serving,), into=((name(1), flat(2)),), kinds=KINDS).apply(after)


def test_extend_refuses_ranks_in_use_and_empty_requests() -> None:
    state = start(flat(0, 1))
    with pytest.raises(InvalidOperation, match=r"ranks \[1\]; .*\[2, 3, 4, 5, 6, 7\]"):
        Extend(sources=(name(0),), into=((name(1), flat(1, 2)),)).apply(state)
    with pytest.raises(InvalidOperation, match="needs a source"):
        Extend(sources=(), into=((name(1), flat(2)),)).apply(state)
    with pytest.raises(InvalidOperation, match="rank 3 belongs to"):
        Extend(sources=(name(0),), into=((name(1), flat(2, 3)), (name(2), flat(3)))).apply(state)


def test_destroy_frees_ranks_but_never_the_last_holder() -> None:
    state = start(flat(0, 1), flat(2, 3))
    after = Destroy(unit=name(0)).apply(state)
    assert after.free("training") == {0, 1, 4, 5, 6, 7}
    with pytest.raises(InvalidOperation, match="it alone holds theta, master, exp_avg, exp_avg_sq of actor"):
        Destroy(unit=name(1)).apply(after)


def test_a_serving_unit_may_go_while_training_holds_the_weights_and_not_the_other_way() -> None:
    serving = Unit(id=name(0, "actor.generation"), model="actor", layout=flat(4), kinds=serving_kinds("bf16"))
    state = start(flat(0, 1)).with_units(serving)
    assert Destroy(unit=serving.id).apply(state) == start(flat(0, 1))
    with pytest.raises(InvalidOperation, match="it alone holds master"):
        Destroy(unit=name(0)).apply(state)


def random_operation(rng: random.Random, state: ClusterState) -> Operation:
    units = state.replicas("actor.training")
    unit = rng.choice(units)
    ranks = list(unit.layout.ranks)
    fresh = state.next_id("actor.training")
    match rng.choice(["split", "merge", "extend", "destroy"]):
        case "split":
            rng.shuffle(ranks)
            cut = rng.randint(0, len(ranks))
            parts = tuple(
                (name(fresh.index + i), flat(*part))
                for i, part in enumerate((ranks[:cut], ranks[cut:]))
                if part
            )
            return Split(unit=unit.id, into=parts)
        case "merge":
            some = rng.sample(units, rng.randint(1, len(units)))
            every = [rank for each in some for rank in each.layout.ranks]
            rng.shuffle(every)
            return Merge(units=tuple(each.id for each in some), into=(fresh, flat(*every)))
        case "extend":
            free = sorted(state.free("training"))
            target = rng.sample(free, rng.randint(1, len(free))) if free else [0]
            return Extend(sources=tuple(each.id for each in units), into=((fresh, flat(*target)),))
    return Destroy(unit=unit.id)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_i2_any_sequence_keeps_the_ranks_and_a_full_replica(seed: int) -> None:
    rng = random.Random(seed)
    state = start(flat(0, 1, 2, 3), num_ranks=10)
    done: list[Operation] = []
    refusals: list[str] = []
    begin = state
    for _ in range(12):
        operation = random_operation(rng, state)
        try:
            state = operation.apply(state)
        except InvalidOperation as error:
            refusals.append(str(error))
            continue
        done.append(operation)
        used = [rank for unit in state.units for rank in unit.layout.ranks]
        assert len(used) == len(set(used))
        assert set(used) | state.free("training") == set(range(10))
        assert state.replicas("actor.training")
    assert apply_all(begin, done) == state
    assert all("Remedy: " in refusal for refusal in refusals)


def test_operations_are_values() -> None:
    one, two = Destroy(unit=name(0)), Destroy(unit=name(0))
    assert one == two
    assert len({one, two, Destroy(unit=name(1))}) == 2
