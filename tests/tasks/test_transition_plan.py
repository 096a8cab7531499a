"""The operations of a live transition: order, orders, and what becomes of every model-stage. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.layout import Layout
from nereus.emu.orders import Order, SpillOrder
from nereus.emu.stage import FromStage, Role, StageSpec
from nereus.errors import InvalidOperation, NoSource
from nereus.tasks.memory_room import MemoryRoom, held_bytes
from nereus.tasks.planned_transition import Transition, asked_of
from nereus.tasks.stages import CRITIC, GENERATION, REFERENCE, TRAINING
from nereus.tasks.transition_plan import plan_transition

MODEL = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=24,
)
SPEC = decoder_spec(MODEL)
ROLES: dict[str, Role] = {
    TRAINING: "training",
    GENERATION: "generation",
    CRITIC: "training",
    REFERENCE: "inference",
}
NUM_RANKS = 8


def stage(name: str, tp: int, pp: int, dp: int, first: int = 0) -> StageSpec:
    size = tp * pp
    units = tuple(
        Layout.make(SPEC, tp=tp, pp=pp, ranks=range(first + i * size, first + (i + 1) * size))
        for i in range(dp)
    )
    return StageSpec(name=name, role=ROLES[name], model=MODEL, units=units, origin=FromStage(stage=TRAINING))


def stages(*specs: StageSpec) -> dict[str, StageSpec]:
    """Generation shares training's weights unless it is given, or lies elsewhere."""
    out = {spec.name: spec for spec in specs}
    generation = out.setdefault(GENERATION, replace(out[TRAINING], name=GENERATION, role="generation"))
    if generation.units == out[TRAINING].units:
        out[GENERATION] = replace(generation, shares=TRAINING)
    return out


sizes = st.sampled_from([(tp, pp, dp) for tp in (1, 2, 4) for pp in (1, 2) for dp in (1, 2, 4)]).filter(
    lambda size: size[0] * size[1] * size[2] <= NUM_RANKS
)


@st.composite
def plans(draw: st.DrawFn) -> dict[str, StageSpec]:
    """All four model-stages, each of any size, anywhere: trained models may share GPUs."""
    specs = []
    for name in ROLES:
        tp, pp, dp = draw(sizes)
        specs.append(stage(name, tp, pp, dp, draw(st.integers(0, NUM_RANKS - tp * pp * dp))))
    return stages(*specs)


@settings(max_examples=15, deadline=None)
@given(plans(), plans())
def test_operations_come_after_those_they_wait_for_and_move_the_least(
    now: dict[str, StageSpec], then: dict[str, StageSpec]
) -> None:
    transition = plan_transition(now, then)
    seen: set[str] = set()
    for operation in transition.operations:
        assert set(operation.after) <= seen, "predecessors first"
        seen.add(operation.id)
        assert bool(operation.orders) == (operation.carrier is None)
        assert operation.carrier is None or operation.carrier in seen
    assert len(seen) == len(transition.graph.nodes)
    assert transition.bytes == transition.lower_bound == sum(o.bytes for o in transition.operations)
    for name, spec in transition.stages.items():
        assert Counter((unit.tp, unit.layers) for unit in spec.units) == Counter(
            (unit.tp, unit.layers) for unit in then[name].units
        )


@settings(max_examples=15, deadline=None)
@given(plans(), plans())
def test_a_worker_changes_a_model_stage_once_and_ends_with_the_shard_of_its_new_unit(
    now: dict[str, StageSpec], then: dict[str, StageSpec]
) -> None:
    transition = plan_transition(now, then)
    held = {(name, rank): unit for name, rank, unit in shards(now)}
    changed: set[tuple[str, int]] = set()
    for operation in transition.operations:
        for rank, order in operation.orders.items():
            key = (order.target, rank)
            if not order.changes_target:
                continue
            assert key not in changed
            changed.add(key)
            if order.plan.new is None:
                held.pop(key, None)
            else:
                held[key] = order.plan.new.layout
    assert held == {(name, rank): unit for name, rank, unit in shards(transition.stages)}


def shards(given: dict[str, StageSpec]) -> list[tuple[str, int, Layout]]:
    """Who holds which unit's shard; generation that shares has none of its own."""
    return [
        (name, rank, unit)
        for name, spec in given.items()
        if spec.shares is None
        for unit in spec.units
        for rank in unit.ranks
    ]


def told(room: MemoryRoom) -> Callable[[Transition], MemoryRoom]:
    """Workers that have this room, and a part in what is drafted."""

    def room_of(draft: Transition) -> MemoryRoom:
        assert set(draft.movers) <= set(room.state_bytes)
        return room

    return room_of


def kinds(transition: Transition, model_stage: str) -> list[str]:
    return [o.kind for o in transition.operations if o.model_stage == model_stage]


def test_generation_that_leaves_shared_weights_is_copied_from_all_that_hold_them_there() -> None:
    now = stages(stage(TRAINING, 1, 1, 4))
    then = stages(stage(TRAINING, 1, 1, 4), stage(GENERATION, 2, 1, 2))
    apart = plan_transition(now, then)
    assert kinds(apart, GENERATION) == ["extend", "extend"]
    assert kinds(apart, TRAINING) == []
    assert apart.bytes == 0, "every GPU held all of it"
    together = plan_transition(then, now)
    assert kinds(together, GENERATION) == ["destroy", "destroy"]
    assert together.stages[GENERATION].shares == TRAINING
    assert GENERATION not in together.in_memory


def test_a_model_stage_that_lost_workers_is_made_from_what_is_left_and_generation_synced() -> None:
    now = stages(stage(TRAINING, 2, 1, 2), stage(GENERATION, 1, 1, 4), stage(REFERENCE, 1, 1, 1, 3))
    whole = now[TRAINING].units[1]
    then = stages(replace(now[TRAINING], units=(whole,)), stage(GENERATION, 1, 1, 2, 2), now[REFERENCE])
    transition = plan_transition(now, then, lost=frozenset({0}))
    assert kinds(transition, TRAINING) == ["destroy"], "the whole unit is kept as it is"
    assert transition.bytes == 0
    assert kinds(transition, GENERATION) == []
    assert GENERATION not in transition.in_memory
    assert 0 not in transition.movers
    last = stages(stage(TRAINING, 1, 1, 1, 3), stage(GENERATION, 1, 1, 1, 3), now[REFERENCE])
    with pytest.raises(NoSource):
        plan_transition(now, last, lost=frozenset({0, 2}))


def test_a_live_rank_whose_state_is_stale_is_filled_anew_in_that_model_stage_alone() -> None:
    now = stages(stage(TRAINING, 2, 1, 2), stage(GENERATION, 1, 1, 4), stage(CRITIC, 2, 1, 1))
    transition = plan_transition(now, now, stale={TRAINING: frozenset({1})})
    assert transition.stages[TRAINING].units == now[TRAINING].units
    assert kinds(transition, TRAINING) == ["extend", "destroy"]
    assert kinds(transition, CRITIC) == [], "its state on the same rank is sound"
    (extend, _) = transition.operations
    plans = {rank: order.plan for rank, order in extend.orders.items() if isinstance(order, Order)}
    assert {(rank, plan.old is None) for rank, plan in plans.items() if plan.new} >= {(0, False), (1, True)}
    assert transition.bytes == plans[1].received_bytes > 0
    with pytest.raises(NoSource):
        plan_transition(now, now, stale={CRITIC: frozenset({1})})


def test_without_room_for_both_shards_one_replica_waits_for_a_second_transition() -> None:
    now, then = stages(stage(TRAINING, 2, 1, 2)), stages(stage(TRAINING, 1, 1, 4))
    shadow = plan_transition(now, then, memory=told(MemoryRoom(state_bytes=dict.fromkeys(range(4), 1 << 30))))
    assert (shadow.bounded, shadow.halfway) == (frozenset(), False)
    most = max(
        held_bytes(now)[rank] + plan.peak_bytes(rank) for plan in shadow.plans.values() for rank in range(4)
    )
    fits = [dict.fromkeys(range(4), most * share // 20) for share in range(1, 20)]
    found = [
        transition
        for room in fits
        if (transition := _planned(now, then, room)) is not None and transition.bounded
    ]
    assert found, "there is a room in which bounded mode fits and shadow mode does not"
    for first in found:
        assert first.halfway
        assert first.asked == asked_of(then)
        assert len({unit.tp for unit in first.stages[TRAINING].units}) == 2
        (kept,) = [unit for unit in first.stages[TRAINING].units if unit.tp == 2]
        assert kept in now[TRAINING].units
    tightest = next(room for room in fits if (one := _planned(now, then, room)) is not None and one.bounded)
    second = plan_transition(found[0].stages, then, memory=told(MemoryRoom(state_bytes=tightest)))
    assert not second.halfway
    assert {unit.tp for unit in second.stages[TRAINING].units} == {1}
    for transition in (found[0], second):
        modes = {
            order.plan.mode for operation in transition.operations for order in operation.orders.values()
        }
        assert modes == {"bounded"}


def test_where_no_replica_can_be_left_alone_old_shards_go_to_the_host_first() -> None:
    now, then = stages(stage(TRAINING, 2, 1, 1)), stages(stage(TRAINING, 1, 2, 1))
    held = held_bytes(now)
    (plan,) = plan_transition(now, then).plans.values()
    beside = {rank: plan.peak_bytes(rank) - plan.held_bytes(rank) for rank in held}
    tight = {rank: held[rank] + beside[rank] - plan.held_bytes(rank) for rank in held}
    with pytest.raises(InvalidOperation, match="bounded mode frees old storage"):
        plan_transition(now, then, memory=told(MemoryRoom(state_bytes=tight)))
    hosts = dict.fromkeys(held, 1 << 30)
    found = plan_transition(now, then, memory=told(MemoryRoom(state_bytes=tight, host_bytes=hosts)))
    assert (found.bounded, found.halfway, found.asked) == (frozenset(), False, asked_of(then))
    spill, merge = found.operations
    assert (spill.kind, spill.ranks, spill.after) == ("spill", (0, 1), ())
    assert merge.after == (spill.id,)
    assert spill.bytes == found.spilled_bytes == sum(plan.held_bytes(rank) for rank in held)
    assert found.bytes == plan.bytes, "what goes to the host crosses to nobody"
    for order in spill.orders.values():
        assert isinstance(order, SpillOrder)
        assert order.unit in plan.old
    # A byte less, or buffers for what the device reads from there, and not even that helps.
    short = replace_rank(tight, 1, -1)
    for room in (
        MemoryRoom(state_bytes=short, host_bytes=hosts),
        MemoryRoom(state_bytes=tight, host_bytes=hosts, is_far=True),
    ):
        with pytest.raises(InvalidOperation, match=r"rank \d lacks .*; without spills: .*bounded mode"):
            plan_transition(now, then, memory=told(room))


def replace_rank(amounts: dict[int, int], rank: int, more: int) -> dict[int, int]:
    return amounts | {rank: amounts[rank] + more}


def test_shards_whose_memory_comes_back_as_a_whole_go_to_the_host_where_bounded_mode_would_do() -> None:
    now, then = stages(stage(TRAINING, 2, 1, 2)), stages(stage(TRAINING, 1, 1, 4))
    most = max(
        held_bytes(now)[rank] + plan.peak_bytes(rank) - 2 * plan.held_bytes(rank)
        for plan in plan_transition(now, then).plans.values()
        for rank in plan.ranks
    )
    room = MemoryRoom(state_bytes=dict.fromkeys(range(4), most), host_bytes=dict.fromkeys(range(4), 1 << 30))
    assert plan_transition(now, then, memory=told(room)).bounded
    whole = plan_transition(now, then, memory=told(replace(room, in_parts=False)))
    assert not whole.bounded
    assert kinds(whole, TRAINING).count("spill") == 2, "one for each unit"


def _planned(
    now: dict[str, StageSpec], then: dict[str, StageSpec], room: dict[int, int]
) -> Transition | None:
    try:
        return plan_transition(now, then, memory=told(MemoryRoom(state_bytes=room)))
    except InvalidOperation:
        return None


def test_text_names_units_layouts_gpus_and_bytes() -> None:
    now = stages(stage(TRAINING, 2, 1, 1), stage(GENERATION, 2, 1, 1, 2))
    then = stages(stage(TRAINING, 1, 1, 1), stage(GENERATION, 2, 1, 1, 2))
    split, destroy = plan_transition(now, then).operations
    assert split.text.startswith(
        "Split actor.training#0 into #1 tp1 pp1 on 0; #2 tp1 pp1 on 1; from tp2 pp1; "
    )
    assert split.text.endswith("KB")
    assert destroy.text == "Destroy actor.training#2 tp1 pp1 on 1; bytes travel with Split"
    assert destroy.after == (split.id,)
    assert destroy.bytes == 0 < split.bytes


def test_whether_units_share_an_optimizer_does_not_change_in_a_transition() -> None:
    now = stages(stage(TRAINING, 1, 1, 4))
    then = stages(replace(stage(TRAINING, 2, 1, 2), zero1=True))
    for one, other in ((now, then), (then, now)):
        with pytest.raises(InvalidOperation, match=r"optimizer\.zero1 would change for .*actor\.training"):
            plan_transition(one, other)


def test_a_model_that_does_not_change_is_read_again_where_its_last_unit_is_lost() -> None:
    now = stages(stage(TRAINING, 1, 1, 4), stage(REFERENCE, 2, 1, 1, first=4))
    then = stages(stage(TRAINING, 1, 1, 4), stage(REFERENCE, 1, 1, 1, first=5))
    transition = plan_transition(now, then, lost=frozenset({4}))
    assert REFERENCE not in transition.in_memory
    assert all(operation.model_stage != REFERENCE for operation in transition.operations)
    assert transition.stages[REFERENCE].units == then[REFERENCE].units
    # With a whole unit left it is moved, and a trained model has no folder to be read from.
    whole = stages(stage(TRAINING, 1, 1, 4), stage(REFERENCE, 1, 1, 2, first=4))
    assert REFERENCE in plan_transition(whole, then, lost=frozenset({4})).in_memory
    alone = stages(stage(TRAINING, 2, 1, 1), stage(REFERENCE, 1, 1, 2, first=4))
    left = stages(stage(TRAINING, 1, 1, 1, first=1), stage(REFERENCE, 1, 1, 1, first=5))
    with pytest.raises(NoSource):
        plan_transition(alone, left, lost=frozenset({0}))
