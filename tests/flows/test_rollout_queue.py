"""The queue between generation and training: bounded, in order, never stale beyond its bound, never stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.errors import Cancelled, DataError
from nereus.flows.rollout_queue import Abandoned, Published, RolloutQueue

START = Published(step=0, version=0)
LONG_S = 20.0  # nothing here takes a hundredth of it; what reaches it hangs


def in_thread(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(LONG_S)
    return not thread.is_alive()


def waits(thread: threading.Thread) -> bool:
    """Whether it is still at it after a while in which it could have ended many times."""
    thread.join(0.1)
    return thread.is_alive()


@settings(max_examples=60, deadline=None)
@given(
    staleness=st.integers(0, 3),
    steps=st.integers(1, 9),
    draw_ms=st.lists(st.integers(0, 2), min_size=9, max_size=9),
    learn_ms=st.lists(st.integers(0, 2), min_size=9, max_size=9),
    num_boundaries=st.integers(0, 3),
    waits_for_batch=st.booleans(),
    first_end=st.integers(1, 9),
)
def test_i15_every_batch_is_taken_once_in_order_and_never_too_old(
    staleness: int,
    steps: int,
    draw_ms: list[int],
    learn_ms: list[int],
    num_boundaries: int,
    waits_for_batch: bool,
    first_end: int,
) -> None:
    end = min(first_end, steps)  # is moved when training is there
    queue: RolloutQueue[tuple[int, list[int]]] = RolloutQueue(
        staleness=staleness, published=START, end=lambda: end
    )
    most_ready: list[int] = []

    def draw() -> None:
        while (step := queue.claim()) is not None:
            versions = [queue.version]
            for _ in range(num_boundaries):
                time.sleep(draw_ms[step] / 1e3)
                versions.append(queue.boundary())
            queue.put((step, versions))
            most_ready.append(queue.num_ready)

    producer = in_thread(draw)
    taken: list[int] = []
    for step in range(steps):
        if step == end:
            end = steps
        drawn_step, versions = queue.take(step)
        assert (drawn_step, versions) == queue.take(step)  # a step that is tried again
        taken.append(drawn_step)
        assert versions == sorted(versions)
        assert 0 <= step - versions[0] <= staleness
        time.sleep(learn_ms[step] / 1e3)
        with queue.hold(unless_ready=None if waits_for_batch else step + 1) as rests:
            assert rests or not waits_for_batch
            if rests:
                queue.advance(Published(step=step + 1, version=step + 1))
    queue.close()
    assert ended(producer)
    assert taken == list(range(steps))
    assert max(most_ready) <= staleness + 1


def test_a_full_queue_makes_generation_wait_until_training_has_published() -> None:
    queue: RolloutQueue[str] = RolloutQueue(staleness=1, published=START, end=lambda: 9)
    for step in (0, 1):
        assert queue.claim() == step
        queue.put(f"batch {step}")
    claimed: list[int | None] = []
    producer = in_thread(lambda: claimed.append(queue.claim()))
    assert queue.take(0) == "batch 0"
    assert waits(producer)
    with queue.hold() as rests:
        assert rests
        queue.advance(Published(step=1, version=1))
        assert waits(producer)
    assert ended(producer)
    assert (claimed, queue.version) == ([2], 1)


def test_a_producer_at_the_end_goes_on_when_the_end_moves_and_begins_nothing_beyond_it() -> None:
    end = 1
    queue: RolloutQueue[str] = RolloutQueue(staleness=2, published=START, end=lambda: end)
    claimed: list[int | None] = []

    def draw() -> None:
        while (step := queue.claim()) is not None:
            claimed.append(step)
            queue.put(f"batch {step}")

    producer = in_thread(draw)
    assert queue.take(0) == "batch 0"
    assert waits(producer)
    end = 2
    assert queue.take(1) == "batch 1"
    end = 1
    assert waits(producer)
    queue.close()
    assert ended(producer)
    assert claimed == [0, 1]


def test_an_empty_queue_makes_training_wait_and_wakes_it() -> None:
    queue: RolloutQueue[str] = RolloutQueue(staleness=1, published=START, end=lambda: 9)
    taken: list[str] = []
    consumer = in_thread(lambda: taken.append(queue.take(0)))
    assert queue.claim() == 0
    assert waits(consumer)
    queue.put("batch 0")
    assert ended(consumer)
    assert taken == ["batch 0"]


def test_a_dead_consumer_leaves_a_bounded_queue_and_a_producer_that_ends() -> None:
    queue: RolloutQueue[int] = RolloutQueue(staleness=2, published=START, end=lambda: 99)

    def draw() -> None:
        while (step := queue.claim()) is not None:
            queue.put(step)

    producer = in_thread(draw)
    assert waits(producer)
    assert queue.num_ready == 3
    queue.close()
    assert ended(producer)
    assert queue.num_ready == 3


def test_a_dead_producer_leaves_what_it_has_drawn_and_its_error_to_who_waits() -> None:
    queue: RolloutQueue[str] = RolloutQueue(staleness=1, published=START, end=lambda: 9)
    queue.claim()
    queue.put("batch 0")
    queue.claim()
    failures: list[BaseException] = []

    def take_both() -> None:
        queue.take(0)
        try:
            queue.take(1)
        except DataError as error:
            failures.append(error)

    consumer = in_thread(take_both)
    assert waits(consumer)
    queue.fail(DataError("the reward is broken"))
    assert ended(consumer)
    assert [str(failure) for failure in failures] == ["the reward is broken"]
    queue.recover()
    assert queue.claim() == 1  # begun anew: no step is left out


def test_a_stop_ends_every_wait() -> None:
    stop = threading.Event()
    queue: RolloutQueue[str] = RolloutQueue(staleness=0, published=START, end=lambda: 9, stopped=stop.is_set)
    queue.claim()
    errors: list[str] = []

    def ends(wait: Callable[[], object]) -> threading.Thread:
        def act() -> None:
            try:
                wait()
            except Cancelled:
                errors.append("cancelled")

        return in_thread(act)

    def hold() -> None:
        with queue.hold():
            raise AssertionError("nobody came to a boundary")

    threads = [ends(lambda: queue.take(0)), ends(hold)]
    assert all(waits(thread) for thread in threads)
    stop.set()
    assert all(ended(thread) for thread in threads)
    assert errors == ["cancelled"] * 2


def test_a_hold_waits_for_the_next_boundary_and_weights_change_there() -> None:
    queue: RolloutQueue[str] = RolloutQueue(staleness=1, published=START, end=lambda: 9)
    queue.claim()
    queue.put("batch 0")
    assert queue.claim() == 1
    held = threading.Event()

    def sync() -> None:
        with queue.hold():
            held.set()
            queue.advance(Published(step=1, version=1))

    trainer = in_thread(sync)
    assert waits(trainer)
    assert not held.is_set()
    versions = [queue.version, queue.boundary()]
    assert ended(trainer)
    assert versions == [0, 1]


def test_a_way_back_drops_all_batches_and_the_one_that_is_being_drawn() -> None:
    queue: RolloutQueue[str] = RolloutQueue(
        staleness=2, published=Published(step=5, version=5), end=lambda: 9
    )
    queue.claim()
    queue.put("batch 5")
    assert queue.claim() == 6
    with pytest.raises(Abandoned):
        _at_boundary_while(queue, lambda: queue.rewind(Published(step=3, version=3)))
    assert queue.num_ready == 0
    assert (queue.claim(), queue.version) == (3, 3)


def _at_boundary_while(queue: RolloutQueue[str], act: Callable[[], None]) -> None:
    """Come to a boundary while a trainer holds and acts there."""

    def trainer() -> None:
        with queue.hold():
            act()

    thread = in_thread(trainer)
    assert waits(thread)
    try:
        queue.boundary()
    finally:
        assert ended(thread)
