"""The bounded queue between generation, which runs ahead, and training: who may go on, and who waits.

    generation   claim ─▶ boundary ... boundary ─▶ put ─▶ claim of the next step      waits while it is full
    training     take ─▶ hold { weight sync ─▶ advance } ─▶ take of the next step     waits while it is empty

The batch of step s may be begun once generation has the weights of step s - `staleness` or later (I15). So at
most `staleness` + 1 batches are begun and not taken, whatever their sizes and whoever is slow. Training moves
weights and workers only while generation rests: at a boundary, or between two batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from nereus.errors import Cancelled, explain

T = TypeVar("T")
POLL_S = 0.5  # the longest a stop goes unnoticed


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What generation has: the weights before step `step`, which are those of policy version `version`."""

    step: int
    version: int


class Abandoned(Exception):
    """Training went back to an earlier step: the batch that is being drawn has no use any more."""


class RolloutQueue(Generic[T]):
    """Batches by step from one producer to one consumer. Every wait ends when `stopped` says so, or at
    `close`.
    """

    def __init__(
        self,
        *,
        staleness: int,
        published: Published,
        end: Callable[[], int],
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """The first batch is that of step `published.step`, the last that before step `end()`. The end may
        move: a producer that has reached it waits there.
        """
        self._staleness, self._end, self._stopped = staleness, end, stopped
        self._published = published
        self._next = published.step
        self._ready: dict[int, T] = {}
        self._is_drawing = False
        self._num_holds = 0
        self._num_rewinds = 0
        self._failure: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def version(self) -> int:
        """The version of the policy in generation. It does not change while a batch is drawn, but at
        boundaries.
        """
        return self._published.version

    @property
    def num_ready(self) -> int:
        """Batches that are drawn and not dropped; that of the step which learns is among them."""
        return len(self._ready)

    @property
    def failure(self) -> BaseException | None:
        """What ended the producer, until `recover`."""
        return self._failure

    # The producer's side.

    def claim(self) -> int | None:
        """Begin the next batch, once it may be begun: its step. None at `close`."""
        with self._changed:
            self._wait(lambda: self._may_begin and not self._num_holds)
            if self._is_closed:
                return None
            self._is_drawing = True
            return self._next

    @property
    def _may_begin(self) -> bool:
        """I15, as a bound on what is begun; and nothing is begun from the end on."""
        return self._next <= self._published.step + self._staleness and self._next < self._end()

    def boundary(self) -> int:
        """Rest here while training asks for it; returns the policy's version from here on.

        Raises Abandoned when training went back meanwhile, Cancelled at `close`.
        """
        with self._changed:
            before = self._num_rewinds
            if self._num_holds:
                self._is_drawing = False
                self._changed.notify_all()
                self._wait(lambda: not self._num_holds)
                if self._num_rewinds != before:
                    raise Abandoned
                self._is_drawing = True
            if self._is_closed:
                raise Cancelled(explain("stopped while responses were drawn"))
            return self._published.version

    def put(self, batch: T) -> None:
        """Hand over the batch that was begun last. Never waits: its place was kept from when it was begun."""
        with self._changed:
            self._ready[self._next] = batch
            self._next += 1
            self._is_drawing = False
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The producer ended. Who takes a batch that is not there gets the error; the others stay."""
        with self._changed:
            self._failure, self._is_drawing = error, False
            self._changed.notify_all()

    # The consumer's side.

    def take(self, step: int) -> T:
        """The batch of `step`; those of earlier steps are dropped. It stays until a later one is taken, so
        that a step which is tried again finds it.

        Raises what ended the producer, Cancelled at a stop.
        """
        with self._changed:
            for done in [old for old in self._ready if old < step]:
                del self._ready[done]
            self._changed.notify_all()  # the end may have moved; a producer waits there
            self._wait(lambda: step in self._ready or self._failure is not None)
            if step in self._ready:
                return self._ready[step]
            if self._failure is not None:
                raise self._failure
            raise Cancelled(explain(f"stopped while step {step} waited for its responses"))

    @contextmanager
    def hold(self, *, unless_ready: int | None = None) -> Iterator[bool]:
        """Keep generation at rest inside; waits until it is. May be nested.

        Yields False and holds nothing where generation is at work and the batch of step `unless_ready` is
        there: then there is something better to do than to wait.
        """
        with self._changed:
            rests = not self._is_drawing or unless_ready not in self._ready
            if rests:
                self._num_holds += 1
                try:
                    self._wait(lambda: not self._is_drawing)
                except BaseException:
                    self._release()
                    raise
        try:
            yield rests
        finally:
            if rests:
                with self._changed:
                    self._release()

    def _release(self) -> None:
        self._num_holds -= 1
        self._changed.notify_all()

    def advance(self, published: Published) -> None:
        """Generation has newer weights, as of now. Only inside `hold`."""
        with self._changed:
            assert self._num_holds, "weights move inside a hold"
            assert not self._is_drawing, "weights move while generation rests"
            self._published = published
            self._changed.notify_all()

    def rewind(self, published: Published) -> None:
        """Training went back: drop all batches and begin at its step anew. Only inside `hold`."""
        with self._changed:
            self._ready.clear()
            self._next = published.step
            self._num_rewinds += 1
        self.advance(published)

    def recover(self) -> None:
        """Forget the failure: what caused it is mended, and a producer begins the batch that failed anew."""
        with self._changed:
            self._failure = None

    def close(self) -> None:
        """End all waits, now and later."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        while not ready() and not self._is_closed:
            if self._stopped():
                raise Cancelled(explain("stopped between generation and training"))
            self._changed.wait(POLL_S)
