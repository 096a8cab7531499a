"""GPUs of a shared pool: never too many, never too few, never to and fro."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.planner.broker import PRICELESS, Bid, Grant, Rules, next_grants, value, with_values

RULES = Rules(residence_s=50.0, margin=0.2, patience_s=1000.0)


@dataclass(kw_only=True)
class Pool:
    """Campaigns that carry out their grants some rounds later."""

    num_gpus: int
    bids: dict[str, Bid]
    grants: dict[str, Grant] = field(default_factory=dict)
    changes: list[tuple[float, str, int]] = field(default_factory=list)

    def round(self, now_s: float) -> None:
        after = next_grants(self.num_gpus, self.bids.values(), self.grants, now_s=now_s, rules=RULES)
        for name, grant in after.items():
            if name in self.grants and grant != self.grants[name]:
                self.changes.append((now_s, name, grant.gpus - self.grants[name].gpus))
        assert sum(after[name] != self.grants.get(name) for name in after) <= 1, "one mover at a time"
        self.grants = after
        held = {name: bid.held for name, bid in self.bids.items()}
        claimed = {name: max(held[name], after[name].gpus if name in after else 0) for name in held}
        assert sum(claimed.values()) <= self.num_gpus, "nobody waits for GPUs that another one still holds"
        for name, grant in after.items():
            assert self.bids[name].least <= grant.gpus <= max(self.bids[name].most, self.bids[name].least)

    def carry_out(self, name: str) -> None:
        if name in self.grants:
            self.bids[name] = replace(self.bids[name], held=self.grants[name].gpus)


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    names = [f"job{i}" for i in range(draw(st.integers(1, 5)))]
    bids = {}
    for name in names:
        least = draw(st.integers(1, 4))
        most = least + draw(st.integers(0, 12))
        bids[name] = Bid(name=name, held=0, least=least, most=most)
    spare = draw(st.integers(0, 12))
    return Pool(num_gpus=sum(bid.least for bid in bids.values()) + spare, bids=bids)


@settings(max_examples=50, deadline=None)
@given(pool=pools(), data=st.data())
def test_over_any_trace_of_values_nobody_is_short_nothing_is_given_twice_and_residence_holds(
    pool: Pool, data: st.DataObject
) -> None:
    for number in range(40):
        now_s = number * 10.0
        for name, bid in pool.bids.items():
            gain, loss = data.draw(st.tuples(st.floats(-1, 5), st.floats(-1, 5)))
            take, give = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
            pool.bids[name] = replace(bid, gain=gain, loss=loss, take=take, give=give)
        pool.round(now_s)
        for name in data.draw(st.sets(st.sampled_from(sorted(pool.bids)))):
            pool.carry_out(name)
    for name in pool.bids:
        times = [at for at, mover, _ in pool.changes if mover == name]
        assert all(b - a >= RULES.residence_s for a, b in pairwise(times))


@settings(max_examples=50, deadline=None)
@given(pool=pools(), data=st.data())
def test_with_values_that_stay_the_moves_end_and_no_campaign_gives_back_what_it_took(
    pool: Pool, data: st.DataObject
) -> None:
    serial = {name: data.draw(st.floats(0.01, 0.9)) for name in pool.bids}
    run_with(pool, lambda name, gpus: serial[name] + (1 - serial[name]) / gpus)  # Amdahl
    signs = {name: {by > 0 for _, mover, by in pool.changes if mover == name} for name in pool.bids}
    assert all(len(directions) <= 1 for directions in signs.values()), "to and fro"


@settings(max_examples=100, deadline=None)
@given(pool=pools(), data=st.data())
def test_the_moves_end_also_where_one_gpu_alone_is_worth_nothing(pool: Pool, data: st.DataObject) -> None:
    drops = {
        name: data.draw(st.lists(st.sampled_from([1.0, 1.0, 0.9, 0.5]), min_size=40, max_size=40))
        for name in pool.bids
    }
    run_with(pool, lambda name, gpus: math.prod(drops[name][:gpus]))


def run_with(pool: Pool, step_s: Callable[[str, int], float]) -> None:
    """Rounds with step times that stay; in the end nothing moves any more."""
    for number in range(200):
        for name, bid in pool.bids.items():
            pool.bids[name] = with_values(bid, partial(step_s, name)) if bid.held else bid
        pool.round(number * 60.0)
        for name in pool.bids:
            pool.carry_out(name)
    assert not [change for change in pool.changes if change[0] > 150 * 60.0], "at rest"


def test_a_campaign_takes_as_many_as_help_and_gives_what_helps_least() -> None:
    times = {1: 8.0, 2: 4.0, 3: 4.0, 4: 2.0, 5: 2.0}
    bid = with_values(Bid(name="pairs", held=2, least=1, most=5), times.get)
    assert (bid.take, bid.gain) == (2, math.log(2) / 2)
    bid = with_values(Bid(name="pairs", held=4, least=1, most=5), times.get)
    assert (bid.give, bid.loss) == (2, math.log(2) / 2)
    assert bid.gain == 0


def test_an_arrival_is_made_room_for_and_what_an_end_frees_goes_to_whom_it_helps_most() -> None:
    first = Bid(name="first", held=4, least=1, most=4, give=1, loss=0.1)
    grants = {"first": Grant(gpus=4, since_s=0.0)}
    second = Bid(name="second", held=0, least=2, most=2)
    for now_s, held in ((100.0, 3), (200.0, 2)):
        grants = next_grants(4, [first, second], grants, now_s=now_s, rules=RULES)
        assert grants["first"].gpus == held
        assert "second" not in grants
        first = replace(first, held=held)
    grants = next_grants(4, [first, second], grants, now_s=201.0, rules=RULES)
    assert grants["second"].gpus == 2
    grants = next_grants(4, [replace(first, gain=0.3, take=1)], grants, now_s=300.0, rules=RULES)
    assert {name: grant.gpus for name, grant in grants.items()} == {"first": 3}


def test_a_change_that_nobody_carries_out_is_taken_back() -> None:
    stuck = Bid(name="stuck", held=2, least=1, most=4, take=1, gain=1.0)
    grants = {"stuck": Grant(gpus=3, since_s=0.0)}
    assert next_grants(4, [stuck], grants, now_s=999.0, rules=RULES) == grants
    assert next_grants(4, [stuck], grants, now_s=1000.0, rules=RULES)["stuck"].gpus == 2


def test_a_gpu_without_which_there_is_no_plan_is_worth_everything() -> None:
    assert value(None, 2.0, 1) == PRICELESS
    assert value(2.0, None, 1) == 0.0
    assert math.isclose(value(4.0, 1.0, 2), math.log(2))
