"""Generation that runs ahead rests from a weight sync on where that was asked for, until it may go on."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nereus.flows.asynchronous import Ahead
from nereus.tasks.job import CampaignState, Job


class Idle:
    """A cluster of three workers, of which `drains` go away at some time."""

    def __init__(self, drains: frozenset[int] = frozenset()) -> None:
        self.stop, self._drains = threading.Event(), drains

    def pool(self) -> tuple[Any, ...]:
        drains = self._drains
        return tuple(SimpleNamespace(rank=r, drain_at_s=9e9 if r in drains else None) for r in range(3))


def job(*, staleness: int = 1, adapts: bool = True, drains: frozenset[int] = frozenset()) -> Job:
    """Before step 0; generation is on worker 2."""
    fake = SimpleNamespace(
        config=SimpleNamespace(
            asynchrony=SimpleNamespace(staleness=staleness, segment_tokens=None), runs_ahead=staleness > 0
        ),
        state=CampaignState(),
        cluster=Idle(drains),
        adapter=object() if adapts else None,
        stages={"actor.generation": SimpleNamespace(ranks=(2,))},
        stage=lambda name: nullcontext(),
    )
    return cast(Job, fake)


def sync(ahead: Ahead, of: Job) -> None:
    """The end of step 0."""
    with ahead.weight_sync(of) as rests:
        assert rests
        ahead.advance(CampaignState(step=1, policy_version=1), synced=True)


def begins(ahead: Ahead) -> bool:
    """Whether a batch may be begun now."""
    queue = ahead._queue
    return queue._may_begin and not queue._num_holds


def test_generation_goes_on_after_a_weight_sync_that_nobody_asked_to_be_a_rest() -> None:
    for one in (job(), job(adapts=False), job(drains=frozenset({0})), job(staleness=0, adapts=False)):
        ahead = Ahead(one, end=lambda: 9)
        sync(ahead, one)
        assert begins(ahead)
        assert not ahead.rests


def test_a_rest_that_was_asked_for_lasts_from_the_next_sync_until_it_may_go_on_and_is_the_only_one() -> None:
    one = job()
    ahead = Ahead(one, end=lambda: 9)
    ahead.rest_next()
    assert begins(ahead)
    sync(ahead, one)
    assert ahead.rests
    assert not begins(ahead)
    with ahead.at_rest():
        assert not begins(ahead)
    assert not begins(ahead)
    ahead.go_on()
    assert begins(ahead)
    sync(ahead, one)
    assert begins(ahead)


@pytest.mark.parametrize("one", [job(staleness=0), job(drains=frozenset({2}))])
def test_a_job_that_adapts_rests_in_turn_with_training_and_where_a_gpu_of_generation_goes_away(
    one: Job,
) -> None:
    ahead = Ahead(one, end=lambda: 9)
    sync(ahead, one)
    assert ahead.rests
    assert not begins(ahead)


def test_a_rest_that_was_asked_for_waits_for_the_batch_even_if_the_next_one_is_ready() -> None:
    one = job(staleness=2)
    ahead = Ahead(one, end=lambda: 9)
    queue = cast(Any, ahead._queue)
    for step in (0, 1):
        assert queue.claim() == step
        queue.put("rows")
    assert queue.claim() == 2
    with ahead.weight_sync(one) as rests:
        assert not rests  # the next rows are there
    ahead.rest_next()
    threading.Timer(0.2, queue.put, ["rows"]).start()
    with ahead.weight_sync(one) as rests:
        assert rests
    assert ahead.rests
    assert queue.num_ready == 3
