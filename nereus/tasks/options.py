"""The options of a plan at work: micro-batches, sequences held at once, recomputation. They move no state.

The first two are arguments of every call. Recomputation is built into an engine: where it changes, engines
are made anew around the state that they have.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from nereus.emu.stage import FromMemory
from nereus.tasks.adapt import with_options
from nereus.tasks.counters import adam_steps
from nereus.tasks.device import device
from nereus.tasks.job import Job, build_stages
from nereus.tasks.stages import GENERATION


def follow_options(job: Job, at_rest: Callable[[], AbstractContextManager[None]]) -> None:
    """Let the plan in force run with the options that were chosen for the work of now.

    `at_rest` keeps generation at rest, where it runs ahead: inside it engines are made anew. Raises
    WorkerLost when a worker dies in that; the job then is not built.
    """
    assert job.adapter is not None, "the job adapts"
    chosen = with_options(job.stages, job.adapter.seated)
    if chosen == job.stages:
        return
    is_built_in = any(spec.recompute != job.stages[name].recompute for name, spec in chosen.items())
    told = ", ".join(f"{name} {spec.text}" for name, spec in chosen.items() if spec != job.stages[name])
    job.listener.on_message(f"before step {job.state.step}: options {told}")
    if not is_built_in:
        job.stages = chosen
        return
    counts = adam_steps(job)
    with at_rest():
        job.is_built = False
        job.stages = {
            name: spec
            if name == GENERATION
            else replace(spec, origin=FromMemory(step_count=counts.get(name, 0)))
            for name, spec in chosen.items()
        }
        job.cluster.join()
        job.weight_sync = build_stages(job.cluster, job.stages, device=device(job.config))
        job.is_built = True
