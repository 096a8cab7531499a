"""Stage publish: the weight sync, from the actor's training units to its generation units."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from nereus.tasks.job import Job, sync_calls


@task(name="publish", cache_policy=NO_CACHE)
def publish(job: Job) -> int:
    """Move theta by the prepared reshard plan; returns the bytes that crossed between workers.

    Nothing moves where generation shares the training units' weights.
    """
    if job.weight_sync is None:
        return 0
    with job.stage("publish"):
        calls = sync_calls(job.weight_sync)
        return sum(job.cluster.run(calls, what="publish").values())
