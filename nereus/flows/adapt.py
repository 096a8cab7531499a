"""Between two steps of a job that adapts: take new GPUs, look at the signals, decide, and move if it pays.

pool, last step ─▶ signals ─▶ review (planner) ─▶ decision, recorded ─▶ transition ─▶ drained workers end

Between two stages of a step it looks at drain deadlines alone: GPUs that go away before the next stage would
have ended are left while their state can still be copied.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from nereus.flows import events
from nereus.flows.row_source import current_source
from nereus.flows.tracking import Future
from nereus.flows.transition import move_to, tell_synced
from nereus.planner.signals import Signals
from nereus.planner.standstill import Way
from nereus.planner.workload import Stage
from nereus.record.decisions import append_decision
from nereus.tasks.adapt import Adapter, gpus_of, seated_stages, signals_after
from nereus.tasks.job import Job, Measured
from nereus.tasks.options import follow_options
from nereus.tasks.pool import end_drained, follow_grant, give_back, next_change_s, take_new_gpus


def adapt(job: Job) -> None:
    """Follow the drift of load, GPUs and speed, if there is reason to and it pays.

    An aborted transition leaves the job under its old plan. Generation that runs ahead is at rest meanwhile
    where the last weight sync was told so; what would have to wait for it is done at the next. Raises
    Infeasible when the job cannot stay as it is and no plan fits.
    """
    adapter, measured = job.adapter, job.measured
    assert adapter is not None, "the job adapts"
    follow_pool(job)
    if measured is not None:
        _look(job, adapter, measured)
    source = current_source()
    source.go_on()
    if _moves_next(job, adapter):
        source.rest_next()


def _moves_next(job: Job, adapter: Adapter) -> bool:
    """Whether it is known that the next boundary is one to move at."""
    step = job.state.step + 1
    planned = any(change.before_step == step for change in job.config.cluster.schedule)
    return planned or adapter.controller.policy.asks(step, adapter.history)


def _look(job: Job, adapter: Adapter, measured: Measured) -> None:
    signals = signals_after(
        adapter,
        step=job.state.step,
        lengths_b=measured.lengths_b,
        work_s=measured.work_s,
        terms_s=measured.terms_s,
        memory_bytes=measured.memory_bytes,
        pool=job.cluster.pool(),
        changes_s=next_change_s(job),
    )
    if not _follow(job, adapter, signals):

        @contextmanager
        def at_rest() -> Iterator[None]:
            with current_source().at_rest():
                yield
                tell_synced(job)

        follow_options(job, at_rest)


def leave_in_time(job: Job, coming: Stage, *, beside: Future[object] | None = None) -> None:
    """Between two stages of a step: move off GPUs that go away before the stage that comes would have ended.

    What the step has done is kept; what still runs `beside` is waited for. Raises Infeasible when no plan
    fits those that stay.
    """
    adapter = job.adapter
    if adapter is None:
        return
    pool, now_s = job.cluster.pool(), time.time()
    ends_s = now_s + adapter.expected_s(coming) + adapter.controller.drain_margin_s
    leaving = {gpu.rank for gpu in pool if gpu.drain_at_s is not None and gpu.drain_at_s <= ends_s}
    if leaving.isdisjoint(rank for spec in job.stages.values() for rank in spec.ranks):
        return
    job.listener.on_message(f"step {job.state.step}: workers {sorted(leaving)} go away before {coming} ends")
    if beside is not None:
        beside.result()
    gpus = tuple(replace(gpu, drain_s=now_s) if gpu.id in leaving else gpu for gpu in gpus_of(pool))
    signals = replace(adapter.last, step=job.state.step, now_s=now_s, pool=gpus, peak_memory_bytes={})
    job.again |= _follow(job, adapter, signals)  # the step's seconds are then those of two plans


def _follow(job: Job, adapter: Adapter, signals: Signals) -> bool:
    """Review the signals, record the decision, and move where it says so; whether the job moved."""
    outcome, source = adapter.observe(signals), current_source()
    if outcome.way is Way.AT_SYNC and not source.rests:
        job.listener.on_message(f"before step {job.state.step}: a better plan waits for the next weight sync")
        source.rest_next()
        return False
    if outcome.decision is not None:
        append_decision(job.config.run_folder, outcome.decision.to_json())
        job.decided = job.state.step
        events.plan_decided(job, outcome.decision)
        verdict = "moves" if outcome.decision.admit else "stays"
        job.listener.on_message(f"before step {job.state.step}: {verdict}; {outcome.decision.why}")
    if not outcome.moves:
        return False
    if outcome.way is Way.BESIDE:
        source.go_on()
    started = time.perf_counter() - source.waited_s
    has_moved = move_to(job, seated_stages(job.stages, outcome.seated))
    if has_moved:
        adapter.settle(outcome, time.perf_counter() - source.waited_s - started)
        follow_pool(job)
    return has_moved


def follow_pool(job: Job) -> None:
    """Take the GPUs that have come, give back those that go away, and tell of both and of what is held."""
    events.pool_changed(job, "grew", take_new_gpus(job), "workers came up")
    events.pool_changed(job, "shrank", end_drained(job), "given back")
    give_back(job)
    follow_grant(job)
