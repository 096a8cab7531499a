"""The GPUs of a job that adapts: new ones are taken when their workers are up, drained ones given back.

Workers start beside the running step: a boundary asks for them, a later one takes those that have come up.
"""

from __future__ import annotations

from dataclasses import replace

from nereus.emu.layout import Rank
from nereus.planner.broker import PRICELESS
from nereus.tasks.adapt import gpus_of, with_worth
from nereus.tasks.job import Job


def take_new_gpus(job: Job) -> tuple[Rank, ...]:
    """The workers that have come up since the last boundary; then ask for one on every GPU that is free, up
    to the campaign's limit. Waits for nothing. The planner decides whether to use them.
    """
    cluster = job.cluster
    if new := cluster.take_started():
        job.listener.on_message(f"before step {job.state.step}: {len(new)} more GPUs, workers {list(new)}")
    limit = most_gpus(job)
    # A GPU whose worker is starting may still be called free: it is counted as asked for either way.
    wanted = min(cluster.num_free_gpus, limit - len(cluster.ranks)) - cluster.num_starting
    if wanted > 0:
        cluster.request(wanted)
    return new


def most_gpus(job: Job) -> int:
    """GPUs that the job may hold now: as configured, and as granted where it shares a pool."""
    most = job.config.cluster.most_at(job.state.step)
    granted = None if job.share is None else job.share.granted
    return most if granted is None else min(most, granted)


def give_back(job: Job) -> None:
    """Begin to give back what is beyond the GPUs that the job may hold."""
    if leaving := beyond(job, most_gpus(job)):
        job.listener.on_message(f"before step {job.state.step}: gives back workers {list(leaving)}")
        job.cluster.release(leaving)


def next_change_s(job: Job) -> tuple[float, ...]:
    """Seconds, by the plan's step, until the GPUs that the job may hold change as configured."""
    steps = [change.before_step - job.state.step for change in job.config.cluster.schedule]
    assert job.adapter is not None, "a job with a schedule adapts"
    step_s = job.adapter.seated.plan.step_s
    return tuple(number * step_s for number in steps if number > 0)


def follow_grant(job: Job) -> None:
    """Bid anew with what is held now, where the job shares a pool."""
    if job.share is None:
        return
    assert job.adapter is not None, "a job that shares adapts"
    sharing, cluster = job.config.cluster.broker, job.cluster
    assert sharing is not None, "a job that shares says how"
    held = len(cluster.ranks) + cluster.num_starting
    most = job.config.cluster.max_gpus or job.config.cluster.gpus
    bid = replace(job.share.bid, held=held, most=most)
    valued = with_worth(job.adapter, bid, gpus_of(cluster.pool()), sharing.unit)
    loss = min(sharing.weight * valued.loss, PRICELESS)
    job.share.put(replace(valued, gain=sharing.weight * valued.gain, loss=loss))


def beyond(job: Job, most: int) -> tuple[Rank, ...]:
    """The workers that a job with at most so many GPUs gives back: unused ones first, then the newest."""
    used = {rank for spec in job.stages.values() for rank in spec.ranks}
    leaving = {gpu.rank for gpu in job.cluster.pool() if gpu.drain_at_s is not None}
    staying = [rank for rank in job.cluster.ranks if rank not in leaving]
    order = sorted(staying, key=lambda rank: (rank in used, -rank))
    return tuple(order[: max(0, len(staying) - most)])


def end_drained(job: Job) -> tuple[Rank, ...]:
    """End the workers on GPUs that go away, once no model-stage lies on them; returns them."""
    used = {rank for spec in job.stages.values() for rank in spec.ranks}
    drained = [gpu.rank for gpu in job.cluster.pool() if gpu.drain_at_s is not None and gpu.rank not in used]
    if drained:
        job.listener.on_message(
            f"before step {job.state.step}: workers {drained} leave their node before it ends"
        )
    job.cluster.end(drained)
    return tuple(drained)
