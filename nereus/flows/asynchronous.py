"""Generation ahead of training: a thread of the driver that answers the prompts of the steps to come.

    this thread   claim ─▶ gather (generate, rewards) ─▶ put ─┐         ▲ rests at boundaries when asked
                                                          RolloutQueue ─┤
    the campaign  rows ◀── score, estimate, learn ──▶ weight sync ──────┘

The position in the data that a checkpoint holds is that after the rows which were learnt from. What was drawn
ahead is in no checkpoint: a resumed run draws it anew, from that position.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from nereus.errors import Cancelled
from nereus.flows.gather import Gathered, alike, gather
from nereus.flows.rollout_queue import Abandoned, Published, RolloutQueue
from nereus.flows.row_source import rows_from
from nereus.flows.tracking import Calls, Once, PlainCalls
from nereus.tasks.job import GENERATE, CampaignState, Job
from nereus.tasks.score import Rewards, score_rewards
from nereus.tasks.stages import GENERATION
from nereus.tasks.staleness import staleness


@contextmanager
def generating(job: Job, *, end: Callable[[], int]) -> Iterator[None]:
    """Let generation run ahead inside, as far as the campaign asks for that. No rows are begun for step
    `end()` or later; the end may move while the campaign runs.
    """
    if job.config.asynchrony is None:
        yield
        return
    ahead = Ahead(job, end=end)
    try:
        with rows_from(ahead):
            yield
    except BaseException:
        job.cluster.halt()  # end the wait for rows that nobody will take
        raise
    finally:
        ahead.close()


class Ahead:
    """A `RowSource` whose rows are drawn by a thread. Everything but `_draw` runs in the campaign's
    thread.
    """

    def __init__(self, job: Job, *, end: Callable[[], int]) -> None:
        asynchrony = job.config.asynchrony
        assert asynchrony is not None, "the campaign is asynchronous"
        self._job, self._bound = job, asynchrony.staleness
        self._in_segments = asynchrony.segment_tokens is not None
        self._queue: RolloutQueue[Gathered] = RolloutQueue(
            staleness=asynchrony.staleness,
            published=_published(job.state),
            end=end,
            stopped=job.cluster.stop.is_set,
        )
        self._cursor = job.state.cursor
        self._done: dict[str, object] = {}
        self._reached = job.state.step
        self._thread: threading.Thread | None = None
        self._kept = ExitStack()
        self._rests = self._rests_next = False
        self._waited_s = 0.0

    def rows(self, job: Job, once: Once) -> Gathered:
        """Wait until they are drawn; raises what drawing them raised."""
        self.go_on()
        self._reached = job.state.step
        self._start()
        with job.stage("wait for rows"):
            gathered = self._queue.take(job.state.step)
        lag = staleness(gathered.rollouts, job.state.policy_version)
        assert lag["staleness/max"] <= self._bound, f"I15: {lag} beyond {self._bound}"
        return replace(gathered, stats={**gathered.stats, **lag})

    @contextmanager
    def weight_sync(self, job: Job) -> Iterator[bool]:
        """Wait for generation's boundary, which is near where responses are drawn in segments. Else it comes
        with the end of a batch: then go on with the next rows, if they are there and nothing is to move.
        """
        keeps = self._rests_next or _rests_always(job)
        following = None if self._in_segments or keeps else job.state.step + 1
        with ExitStack() as stack:
            with job.stage("wait for boundary"):
                rests = stack.enter_context(self._queue.hold(unless_ready=following))
            yield rests
            if keeps:
                self._kept, self._rests, self._rests_next = stack.pop_all(), True, False

    def advance(self, state: CampaignState, *, synced: bool) -> None:
        """Let batches be begun with the weights of this state, if generation has them."""
        self._reached = state.step
        if synced:
            self._queue.advance(_published(state))

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Wait for generation's boundary, and keep it there."""
        started = time.perf_counter()
        with self._queue.hold():
            self._waited_s += time.perf_counter() - started
            yield

    @property
    def rests(self) -> bool:
        """Whether it was kept at rest since the last weight sync."""
        return self._rests

    def rest_next(self) -> None:
        """From the next weight sync on."""
        self._rests_next = True

    def go_on(self) -> None:
        """Let it draw."""
        self._rests = False
        self._kept.close()

    @property
    def waited_s(self) -> float:
        """Seconds that `at_rest` has waited so far."""
        return self._waited_s

    def version(self, job: Job) -> int:
        """That of the last sync."""
        return self._queue.version

    def recover(self) -> None:
        """Draw on: the batch that failed is begun anew. After a way back all batches are."""
        state = self._job.state
        if state.step < self._reached:
            self._queue.rewind(_published(state))
            self._cursor, self._done, self._reached = state.cursor, {}, state.step
        if self._queue.failure is not None and self._thread is not None:
            self._thread.join()  # it has said so, and ends
        self._queue.recover()
        self._start()

    def close(self) -> None:
        """End the thread. A call that a worker is at goes on there; its result is not waited for."""
        self._queue.close()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        is_alive = self._thread is not None and self._thread.is_alive()
        if not is_alive and self._queue.failure is None:
            self._thread = threading.Thread(target=self._draw, name="generation", daemon=True)
            self._thread.start()

    def _draw(self) -> None:
        """The thread: one batch after the other, as the queue has places, until it is closed."""
        try:
            with PlainCalls() as calls:
                while (step := self._queue.claim()) is not None:
                    try:
                        self._queue.put(self._answered(step, calls))
                    except Abandoned:
                        continue
        except BaseException as error:  # the campaign's thread raises it
            self._queue.fail(error)

    def _answered(self, step: int, calls: Calls) -> Gathered:
        """The rows of `step`, drawn as the job would draw them if it were there.

        What was completed before a failure is kept in `_done`, so it is not drawn twice; the seconds of the
        others would not be those of a whole batch. A reward model is asked before the boundary: nothing reads
        its units while generation rests.
        """
        is_whole = not self._done
        version = self._queue.version
        then = CampaignState(step=step, policy_version=version, cursor=self._cursor)
        view = replace(self._job, state=then, stage_s={}, done=self._done)
        if self._in_segments:
            view.at_boundary = partial(self._rest, view)
        self._take_work_s()
        drawn_by = view.stages[GENERATION]
        gathered = gather(view, Once(self._done, calls))
        if view.reward is None:
            gathered.rewards.result()
        work_s = self._take_work_s() if is_whole and alike(drawn_by, view.stages[GENERATION]) else {}
        self._cursor, self._done = gathered.cursor, {}
        rewards = _Rewards(gathered, view)
        return replace(gathered, stage_s=view.stage_s, work_s=work_s, drawn_by=drawn_by, rewards=rewards)

    def _take_work_s(self) -> dict[str, float]:
        """What drawing took the busiest worker, since this was last asked."""
        return self._job.cluster.take_busy_s(lambda what: what == GENERATE)

    def _rest(self, view: Job) -> int:
        """A boundary. Units may be others after it."""
        version = self._queue.boundary()
        view.stages = self._job.stages
        return version


class _Rewards:
    """The rewards of rows that were drawn ahead. A failure elsewhere ends their computation: then who asks
    for them computes them anew.
    """

    def __init__(self, gathered: Gathered, view: Job) -> None:
        self._gathered, self._view = gathered, view

    def result(self) -> Rewards:
        """Wait for them; raises what the reward raised."""
        try:
            return self._gathered.rewards.result()
        except Cancelled:
            return score_rewards.fn(self._view, self._gathered.prompts, self._gathered.rollouts)


def _rests_always(job: Job) -> bool:
    """Whether nothing is to be begun before an adapting job has looked at its signals: in turn with training,
    and where a GPU of generation is about to go away.
    """
    if job.adapter is None:
        return False
    own = job.stages[GENERATION].ranks
    return not job.config.runs_ahead or any(
        gpu.drain_at_s is not None and gpu.rank in own for gpu in job.cluster.pool()
    )


def _published(state: CampaignState) -> Published:
    return Published(step=state.step, version=state.policy_version)
