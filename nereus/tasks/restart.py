"""The last resort of a running job: all models from storage, on the workers that are left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nereus.emu.stage import StageSpec
from nereus.tasks.device import device
from nereus.tasks.job import Job, build_stages, counted_steps, restored_lengths, restored_state
from nereus.tasks.resume import newest_checkpoint, with_origin


def restart_from_storage(job: Job, then: Mapping[str, StageSpec]) -> None:
    """Build the stages of `then` from the newest checkpoint, or from the first weights where there is none.

    The job's state and its record go back to the checkpoint's step. Raises CheckpointError when it is
    damaged.
    """
    checkpoint = newest_checkpoint(job.config)
    first = job.prepared.stages_at(job.state.step)
    stages = {
        name: with_origin(replace(spec, origin=first[name].origin), checkpoint) for name, spec in then.items()
    }
    job.cluster.join()
    job.weight_sync = build_stages(job.cluster, stages, device=device(job.config))
    job.stages, job.is_built = stages, True
    job.adam_steps = counted_steps(stages)
    job.state, job.lengths = restored_state(checkpoint), restored_lengths(checkpoint)
    job.checkpoint = None if checkpoint is None else checkpoint.path
    job.tried = -1
    job.log.rewind(job.state.step)
