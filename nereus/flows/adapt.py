"""Between two steps of a job that adapts: take new GPUs, look at the signals, decide, and move if it pays.

pool, last step ─▶ signals ─▶ review (planner) ─▶ decision, recorded ─▶ transition ─▶ drained workers end
"""

from __future__ import annotations

import time

from nereus.flows import events
from nereus.flows.transition import move_to
from nereus.record.decisions import append_decision
from nereus.tasks.adapt import seated_stages, signals_after
from nereus.tasks.job import Job
from nereus.tasks.options import follow_options
from nereus.tasks.pool import end_drained, follow_grant, take_new_gpus


def adapt(job: Job) -> None:
    """Follow the drift of load, GPUs and speed, if there is reason to and it pays.

    An aborted transition leaves the job under its old plan. Raises Infeasible when the job cannot stay as it
    is and no plan fits.
    """
    adapter, measured = job.adapter, job.measured
    assert adapter is not None, "the job adapts"
    follow_pool(job)
    if measured is None:
        return
    signals = signals_after(
        adapter,
        step=job.state.step,
        lengths_b=measured.lengths_b,
        work_s=measured.work_s,
        terms_s=measured.terms_s,
        memory_bytes=measured.memory_bytes,
        pool=job.cluster.pool(),
    )
    outcome = adapter.observe(signals)
    if outcome.decision is not None:
        append_decision(job.config.run_folder, outcome.decision.to_json())
        job.decided = job.state.step
        events.plan_decided(job, outcome.decision)
        verdict = "moves" if outcome.decision.admit else "stays"
        job.listener.on_message(f"before step {job.state.step}: {verdict}; {outcome.decision.why}")
    if not outcome.moves:
        follow_options(job)
        return
    started = time.perf_counter()
    if move_to(job, seated_stages(job.stages, outcome.seated)):
        adapter.settle(outcome, time.perf_counter() - started)
        follow_pool(job)


def follow_pool(job: Job) -> None:
    """Take the GPUs that have come, give back those that go away, and tell of both and of what is held."""
    events.pool_changed(job, "grew", take_new_gpus(job), "workers came up")
    events.pool_changed(job, "shrank", end_drained(job), "given back")
    follow_grant(job)
