"""Admission policies: what they admit, and that every number is in the decision."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from nereus.config.adaptation import AdaptationConfig, PaybackPolicy, Policy
from nereus.planner.admission import ProposedChange, judge
from nereus.planner.policies.any_gain import AnyGain
from nereus.planner.policies.configured import policy_of
from nereus.planner.policies.dp_scaling import DpScaling
from nereus.planner.policies.every_n import EveryN
from nereus.planner.policies.never import Never
from nereus.planner.policies.oracle import Oracle
from nereus.planner.policies.payback import Payback, moving_average
from nereus.planner.policies.verl_gate import VerlGate
from nereus.planner.signals import SignalHistory, Switch
from nereus.planner.triggers import Cause, Trigger

PAYBACK = Payback(gamma=0.5, smoothing=0.3, min_crossings=5)
EVERYONE = (PAYBACK, AnyGain(), EveryN(steps=3), VerlGate(window=3), Never(), DpScaling(), Oracle())


def change(
    gain_s: float, cost_s: float, *, step: int = 40, cause: Cause = Cause.LENGTH, known: float | None = None
) -> ProposedChange:
    """A change of a step of 100 s."""
    return ProposedChange(
        step=step,
        trigger=Trigger(cause=cause, text="for a test", numbers={}),
        old="old",
        new="new",
        old_step_s=100.0,
        new_step_s=100.0 - gain_s,
        predicted_s=cost_s,
        steps_to_change=known,
    )


def seen(*steps: int, switches: tuple[Switch, ...] = ()) -> SignalHistory:
    """A history in which the length crossed its threshold at these steps."""
    return SignalHistory(crossings={"length": steps}, switches=switches)


@settings(deadline=None)
@given(
    gain=st.floats(-5, 20),
    cost=st.floats(0.1, 500),
    interval=st.integers(1, 60),
    gamma=st.floats(0.1, 1.0),
)
def test_payback_is_its_formula_once_enough_crossings_were_seen(
    gain: float, cost: float, interval: int, gamma: float
) -> None:
    policy = Payback(gamma=gamma, smoothing=0.3, min_crossings=5)
    steps = tuple(interval * number for number in range(5))
    asked = change(gain, cost, step=steps[-1])
    decision = policy.decide(asked, seen(*steps))
    assert decision.admit == (gain > 0 and cost <= gamma * interval * asked.gain_s)
    assert decision.numbers["gain_s"] == asked.gain_s
    assert decision.why


@settings(deadline=None)
@given(gains=st.lists(st.floats(0.01, 10), min_size=1, max_size=60), cost=st.floats(0.1, 50))
def test_ski_rental_costs_at_most_twice_the_clairvoyant(gains: list[float], cost: float) -> None:
    """Deterministic ski rental is 2-competitive: paid <= 2 min(stay for good, move at once)."""
    history, paid = seen(0), 0.0
    for step, gain in enumerate(gains):
        if PAYBACK.decide(change(gain, cost, step=step), history).admit:
            paid += cost
            break
        history = history.waiting("length", step, gain)
        paid += gain
    assert paid <= 2 * min(sum(gains), cost) + 1e-9


def test_the_average_follows_recent_intervals() -> None:
    assert moving_average((10, 10, 10), 0.3) == 10
    assert moving_average((10, 20), 0.3) == pytest.approx(13)


def test_a_state_that_outlived_the_average_is_expected_to_last_as_long_again() -> None:
    history = seen(0, 4, 8, 12, 16)
    asked = change(1.0, 10.0, step=16)
    assert not PAYBACK.decide(asked, history).admit  # 0.5 x 4 steps x 1 s < 10 s
    later = PAYBACK.decide(replace(asked, step=36), history)
    assert later.admit
    assert later.numbers["horizon_steps"] == 20


def test_a_known_change_of_the_pool_bounds_the_horizon() -> None:
    history = seen(0, 40, 80, 120, 160)
    assert PAYBACK.decide(change(1.0, 10.0, step=160), history).admit
    soon = PAYBACK.decide(change(1.0, 10.0, step=160, known=5.0), history)
    assert not soon.admit
    assert "until the pool changes" in soon.why
    assert soon.numbers["steps_to_known_change"] == 5.0


def test_the_cost_is_the_measured_one_once_there_is_one() -> None:
    slow = tuple(Switch(step=at, predicted_s=1.0, measured_s=3.0) for at in range(3))
    asked = change(1.0, 10.0)
    assert asked.transition_s(seen()) == 10.0
    assert asked.transition_s(seen(switches=slow)) == pytest.approx(30.0)
    decision = PAYBACK.decide(asked, seen(0, 10, 20, 30, 40, switches=slow))
    assert decision.numbers["transition_s"] == pytest.approx(30.0)
    assert decision.numbers["predicted_transition_s"] == 10.0


def test_the_gate_compares_one_step_with_the_mean_of_the_last_three_switches() -> None:
    gate = VerlGate(window=3)
    took = tuple(Switch(step=at, predicted_s=1.0, measured_s=s) for at, s in enumerate((90.0, 4.0, 5.0, 6.0)))
    assert gate.decide(change(5.5, 100.0), seen(switches=took)).admit
    assert not gate.decide(change(4.5, 0.1), seen(switches=took)).admit
    assert not gate.decide(change(4.5, 5.0), seen()).admit  # none measured: the prediction


def test_the_simple_policies_do_what_their_names_say() -> None:
    assert AnyGain().decide(change(0.001, 1e6), seen()).admit
    assert not AnyGain().decide(change(0.0, 0.0), seen()).admit
    every = EveryN(steps=3)
    assert every.asks(9, seen())
    assert not every.asks(10, seen())
    assert every.decide(change(1.0, 1e6, step=9), seen()).admit
    assert not every.decide(change(1.0, 0.0, step=10), seen()).admit
    assert not Never().decide(change(99.0, 0.0), seen()).admit
    assert DpScaling().decide(change(1.0, 1e6, cause=Cause.POOL), seen()).admit
    assert not DpScaling().decide(change(99.0, 0.0), seen()).admit


@pytest.mark.parametrize("policy", EVERYONE, ids=lambda policy: policy.name)
@pytest.mark.parametrize("cause", [Cause.LOST, Cause.VIOLATION])
def test_profit_is_waived_where_the_job_cannot_go_on(policy: Payback, cause: Cause) -> None:
    asked = replace(change(-50.0, 1e6, cause=cause), old_step_s=None)
    decision = judge(policy, asked, seen())
    assert decision.admit
    assert "waived" in decision.why


@pytest.mark.parametrize("policy", EVERYONE, ids=lambda policy: policy.name)
def test_every_decision_is_a_record_with_its_numbers(policy: Payback) -> None:
    tree = judge(policy, change(2.0, 3.0), seen(0, 10)).to_json()
    assert tree["policy"] == policy.name
    assert tree["why"]
    assert tree["change"]["trigger"]["cause"] == "length"
    for name in ("gain_s", "old_step_s", "new_step_s", "transition_s", "predicted_transition_s"):
        assert isinstance(tree["numbers"][name], float)


def test_policies_are_told_apart_by_kind_and_refuse_nonsense() -> None:
    read = TypeAdapter(Policy)
    names = [
        policy_of(read.validate_python({"kind": kind})).name
        for kind in ("payback", "every_n", "any_gain", "verl_gate", "never")
    ]
    assert names == ["payback", "every_3", "any_gain", "verl_gate", "never"]
    assert AdaptationConfig().policy == PaybackPolicy()
    for wrong in ({"kind": "oracle"}, {"kind": "payback", "gamma": 0}, {"kind": "never", "gamma": 1}):
        with pytest.raises(ValidationError):
            read.validate_python(wrong)
