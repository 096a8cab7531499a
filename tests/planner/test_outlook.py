"""Rating plans over what is to come: lengths that will not fit, nodes that vanish."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from nereus.planner.choose import Priced, best_of
from nereus.planner.held import best, priced
from nereus.planner.outlook import NOW, TRAINED, Near, Outlook, expected_s, exposure, rated, replicated
from nereus.planner.profile import ClusterProfile
from nereus.planner.signals import SignalHistory
from nereus.planner.workload import Algorithm, ModelStage
from tests.planner.plan_requests import request

JOB = request("3x8xH100", batch=512, algorithm=Algorithm.GRPO)


def test_a_plan_that_will_not_fit_costs_the_move_and_the_best_step_of_then() -> None:
    outlook = Outlook(factors=(1.0, 1.3), move_s=2.0)
    assert expected_s([10.0, None], [9.0, 14.0], outlook) == (10.0 + 14.0 + 2.0) / 2
    assert expected_s([10.0, 20.0], [9.0, 14.0], outlook) == 15.0
    assert expected_s([10.0, None], [10.0, None], outlook) == 10.0  # nothing fits then: it does not count


def test_without_an_outlook_the_best_plan_of_now_that_fits_with_headroom_comes_first() -> None:
    ratings = rated(JOB, JOB.cluster, 0.1, NOW)
    first = min(ratings, key=lambda rating: rating.order)
    plan = best(JOB)
    assert plan is not None
    assert not first.order[0]
    assert first.plan.step_s == pytest.approx(plan.step_s, rel=1e-9)


def test_a_fast_plan_that_fits_less_is_taken_where_moving_is_cheap() -> None:
    """Fitting all that is to come is worth what it saves, and no more."""
    cheap, dear = (
        min(
            rated(JOB, JOB.cluster, 0.1, Outlook(factors=(1.0, 1.5, 2.0), move_s=seconds)),
            key=lambda rating: rating.order,
        )
        for seconds in (0.0, 1e6)
    )
    assert cheap.plan.step_s <= dear.plan.step_s


def test_replicated_plans_survive_the_loss_of_any_node_or_say_which_is_fatal() -> None:
    plan = replicated(JOB, JOB.cluster)
    assert plan is not None
    assert all(item.dp >= 2 for item in plan.assignments if item.model_stage in TRAINED)
    assert 0 <= exposure(plan, JOB.cluster) <= 1
    alone = request("1x8xH100", batch=512, algorithm=Algorithm.GRPO)
    only = best(alone)
    assert only is not None
    assert exposure(only, alone.cluster) == 1.0  # one node holds everything


def test_nodes_that_vanish_together_take_replicas_with_them() -> None:
    plan = replicated(JOB, JOB.cluster)
    assert plan is not None
    chances = [exposure(plan, JOB.cluster, num_lost=num) for num in (1, 2, 3)]
    assert chances == sorted(chances)
    assert chances[-1] == 1.0  # all three nodes
    for num, chance in enumerate(chances, start=1):  # by its definition
        choices = list(combinations(range(3), num))
        fatal = [
            any(
                all(any(rank // 8 in lost for rank in unit) for unit in item.units)
                for item in plan.assignments
                if item.model_stage in TRAINED
            )
            for lost in choices
        ]
        assert chance == pytest.approx(sum(fatal) / len(choices))


def test_what_is_drawn_of_many_choices_is_close_to_all_of_them() -> None:
    large = request("24x8xH100", batch=512, algorithm=Algorithm.GRPO)
    plan = best(large)
    assert plan is not None
    units = [unit for item in plan.assignments if item.model_stage in TRAINED for unit in item.units]
    nodes = [{rank // 8 for rank in unit} for unit in units]
    choices = list(combinations(range(24), 4))
    exact = sum(all(not own.isdisjoint(lost) for own in nodes) for lost in choices) / len(choices)
    assert exposure(plan, large.cluster, num_lost=4) == pytest.approx(exact, abs=0.06)


def test_a_near_plan_keeps_cuts_and_reads_what_is_lost_once() -> None:
    plan = best(JOB)
    assert plan is not None
    lost = frozenset({ModelStage.REFERENCE_INFERENCE})
    smaller = replace(JOB, cluster=ClusterProfile.parse("2x8xH100"))
    cuts, once, both = Near(plan=plan, lost=lost).plans(smaller, JOB.cluster)
    assert once is not None
    assert {item.dp for item in once.assignments if item.model_stage in lost} == {1}
    held_cuts = {item.model_stage: (item.tp, item.pp) for item in plan.assignments}
    for near in (cuts, both):
        if near is not None:
            assert {item.model_stage: (item.tp, item.pp) for item in near.assignments} == held_cuts


def test_losses_make_replicas_worth_their_price() -> None:
    calm = min(rated(JOB, JOB.cluster, 0.1, NOW), key=lambda rating: rating.order).plan
    stormy = min(rated(JOB, JOB.cluster, 0.1, replace(NOW, loss_s=1e6)), key=lambda rating: rating.order).plan
    assert exposure(stormy, JOB.cluster) <= exposure(calm, JOB.cluster)
    assert stormy.step_s >= calm.step_s


def test_the_rate_of_losses_is_their_number_over_the_steps_seen() -> None:
    history = SignalHistory(started_at=10)
    assert history.loss_rate(30) == 0.0
    assert history.with_loss(12).with_loss(20).loss_rate(30) == 0.1
    assert history.bursts == ((1, 1.0),)
    assert history.with_loss(12).with_loss(20, 24).with_loss(21, 24).bursts == ((1, 1 / 3), (24, 2 / 3))
    later = SignalHistory(started_at=40).after(history.with_loss(12))
    assert ([loss.step for loss in later.losses], later.started_at) == ([12], 10)


def test_options_left_out_make_no_plan_slower() -> None:
    """Pricing keeps, of one layout, only options that no other beats in time and memory."""
    kept = priced(JOB)
    whole = Priced.of(kept.request)  # with the lengths that are remembered, of six digits
    rows = [(len(few.seat), len(full.seat)) for few, full in zip(kept.sets, whole.sets, strict=True)]
    assert all(few <= full for few, full in rows)
    assert sum(few for few, _ in rows) < sum(full for _, full in rows)
    ours, theirs = best_of(kept), best_of(whole)
    assert ours is not None
    assert theirs is not None
    assert ours.step_s == pytest.approx(theirs.step_s, rel=1e-12)
