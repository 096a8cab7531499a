"""Units and the cluster state: I1 and the pure changes."""

from __future__ import annotations

import pytest

from nereus.emu.kinds import Kind, same_kinds, serving_kinds, training_kinds
from nereus.emu.layout import Layout
from nereus.emu.unit import ClusterState, Unit, UnitId
from nereus.errors import InvalidOperation


def unit(stage: str, index: int, *ranks: int) -> Unit:
    layout = Layout(tp=len(ranks), pp=1, ranks=ranks, layers=(4,))
    return Unit(
        id=UnitId(stage, index), model=stage.split(".")[0], layout=layout, kinds=training_kinds("bf16")
    )


def test_ids_read_as_stage_and_number() -> None:
    name = UnitId("actor.training", 2)
    assert str(name) == "actor.training#2"
    assert name.stage == "training"
    assert UnitId("actor.generation", 9) < UnitId("actor.training", 0)


def test_bytes_of_an_element_over_all_kinds() -> None:
    assert unit("actor.training", 0, 0).bytes_per_element == 14
    assert sum(kind.num_bytes for kind in training_kinds("fp32")) == 12
    assert serving_kinds("bf16") == (Kind("theta", "bf16"),)


def test_serving_state_cannot_seed_an_optimizer() -> None:
    with pytest.raises(InvalidOperation, match=r"missing \['master', 'exp_avg', 'exp_avg_sq'\]"):
        same_kinds(serving_kinds("bf16"), training_kinds("bf16"))


def test_i1_a_rank_belongs_to_one_unit_of_a_stage() -> None:
    with pytest.raises(
        InvalidOperation, match=r"rank 1 belongs to actor.training#0 and to critic.training#0"
    ):
        ClusterState.of([unit("actor.training", 0, 0, 1), unit("critic.training", 0, 1, 2)], range(4))


def test_i1_units_of_different_stages_take_turns_on_a_rank() -> None:
    state = ClusterState.of([unit("actor.training", 0, 0, 1), unit("critic.inference", 0, 1, 2)], range(5))
    assert state.free("training") == {2, 3, 4}
    assert state.free("inference") == {0, 3, 4}
    assert state.free("generation") == {0, 1, 2, 3, 4}
    assert state.idle == {3, 4}


def test_i1_a_unit_lies_on_ranks_of_the_cluster() -> None:
    with pytest.raises(InvalidOperation, match=r"ranks \[7\] outside the cluster"):
        ClusterState.of([unit("actor.training", 0, 0, 7)], range(4))


def test_ids_are_unique() -> None:
    with pytest.raises(InvalidOperation, match="appears twice"):
        ClusterState.of([unit("actor.training", 0, 0), unit("actor.training", 0, 1)], range(4))


def test_states_with_the_same_units_are_equal_whatever_their_order() -> None:
    a, b = unit("actor.training", 0, 0), unit("actor.training", 1, 1)
    assert ClusterState.of([a, b], range(2)) == ClusterState.of([b, a], (1, 0))
    assert hash(ClusterState.of([a, b], range(2))) == hash(ClusterState.of([b, a], range(2)))


def test_changes_leave_the_state_they_start_from() -> None:
    a, b = unit("actor.training", 0, 0), unit("actor.training", 1, 1)
    state = ClusterState.of([a], range(2))
    grown = state.with_units(b)
    assert state.units == (a,)
    assert grown.replicas("actor.training") == (a, b)
    assert grown.without(a.id).units == (b,)
    assert grown.next_id("actor.training") == UnitId("actor.training", 2)
    assert state.next_id("critic.training") == UnitId("critic.training", 0)
    assert state.with_ranks((5,)).idle == {1, 5}
    assert state.without_ranks((1,)).ranks == {0}


def test_a_rank_leaves_only_when_no_unit_lies_on_it() -> None:
    state = ClusterState.of([unit("actor.training", 0, 0)], range(2))
    with pytest.raises(InvalidOperation, match="outside the cluster"):
        state.without_ranks((0,))


def test_a_stranger_is_named_with_the_live_units() -> None:
    state = ClusterState.of([unit("actor.training", 0, 0)], range(2))
    with pytest.raises(InvalidOperation, match=r"no unit actor.training#4; live units are actor.training#0"):
        state.unit(UnitId("actor.training", 4))
