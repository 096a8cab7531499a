"""Between two steps of a job that adapts: take new GPUs, look at the signals, decide, and move if it pays.

pool, last step ─▶ signals ─▶ review (planner) ─▶ decision, recorded ─▶ transition ─▶ drained workers end
"""

from __future__ import annotations

import time

from prefect import flow

from nereus.emu.decision import Decision
from nereus.flows.current import current_job, subflow_of
from nereus.flows.transition import carry_out
from nereus.record.decisions import append_decision
from nereus.tasks.adapt import seated_stages, signals_after
from nereus.tasks.job import Job
from nereus.tasks.transition import plan_transition

NEW_WORKER_S = 60.0  # a new worker that needs longer to start is left for the next boundary


def adapt(job: Job) -> None:
    """Follow the drift of load, GPUs and speed, if there is reason to and it pays.

    An aborted transition leaves the job under its old plan. Raises Infeasible when the job cannot stay as it
    is and no plan fits.
    """
    adapter, measured = job.adapter, job.measured
    assert adapter is not None, "the job adapts"
    if measured is None:
        return
    take_new_gpus(job)
    signals = signals_after(
        adapter,
        step=job.state.step,
        lengths_b=measured.lengths_b,
        work_s=measured.work_s,
        memory_bytes=measured.memory_bytes,
        pool=job.cluster.pool(),
    )
    outcome = adapter.observe(signals)
    if outcome.decision is not None:
        append_decision(job.config.run_folder, outcome.decision.to_json())
        verdict = "moves" if outcome.decision.admit else "stays"
        job.listener.on_message(f"before step {job.state.step}: {verdict}; {outcome.decision.why}")
    if not outcome.moves:
        return
    started = time.perf_counter()
    job.target = seated_stages(job.stages, outcome.seated)
    with subflow_of(job):
        decision = adaptation_flow(job.state.step)
    if decision.commits:
        adapter.settle(outcome, time.perf_counter() - started)
        end_drained(job)


@flow(name="transition", flow_run_name="transition before step {step}", validate_parameters=False)
def adaptation_flow(step: int) -> Decision:
    """Move the job to the plan that was admitted."""
    job = current_job()
    assert job.target is not None, "a plan was admitted"
    return carry_out(job, plan_transition(job.stages, job.target))


def take_new_gpus(job: Job) -> None:
    """Start workers on GPUs that are free, up to the campaign's limit; the planner decides whether to use
    them.
    """
    limit = job.config.cluster.max_gpus or job.config.cluster.gpus
    wanted = min(job.cluster.num_free_gpus, limit - len(job.cluster.ranks))
    if wanted > 0 and (new := job.cluster.add(wanted, timeout_s=NEW_WORKER_S)):
        job.listener.on_message(f"before step {job.state.step}: {len(new)} more GPUs, workers {list(new)}")


def end_drained(job: Job) -> None:
    """End the workers on nodes that go away, once no model-stage lies on them."""
    used = {rank for spec in job.stages.values() for rank in spec.ranks}
    drained = [gpu.rank for gpu in job.cluster.pool() if gpu.drain_at_s is not None and gpu.rank not in used]
    job.cluster.end(drained)
