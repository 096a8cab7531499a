"""The first part of a step: the rows to learn from, answered; with DAPO until enough groups of them teach.

prompts ─▶ generate ─▶ rewards ─▶ enough groups with unequal rewards? ─▶ rows
   ▲                                             │ no, and not max_batches yet
   └─────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nereus.config import DapoConfig
from nereus.data.order import Cursor
from nereus.data.prompt import Prompt
from nereus.emu.batch import Rollouts
from nereus.emu.stage import StageSpec
from nereus.errors import DataError, explain
from nereus.flows.tracking import Future, Once, Ready
from nereus.tasks.estimate import length_penalty
from nereus.tasks.generate import generate
from nereus.tasks.groups_kept import Answered, Kept, keep_groups
from nereus.tasks.job import Job
from nereus.tasks.score import Rewards, score_rewards


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """The rows to learn from; their rewards may still be on the way. `cursor` is the data's after them.

    `used` are all rows whose prompts the step uses up, None where these are the same. `stage_s` are durations
    of stages that are not the step's own, because they ran ahead of it; `work_s` those of the busiest worker
    by kind of work, with the units and sequences at once of `drawn_by`. `prompts` are those of the rows where
    rewards may be on the way.
    """

    rollouts: Rollouts
    rewards: Future[Rewards]
    cursor: Cursor
    used: Answered | None = None
    stats: Mapping[str, float] = field(default_factory=dict)
    stage_s: Mapping[str, float] = field(default_factory=dict)
    work_s: Mapping[str, float] = field(default_factory=dict)
    drawn_by: StageSpec | None = None
    prompts: Sequence[Prompt] = ()

    def work_under(self, spec: StageSpec) -> Mapping[str, float]:
        """`work_s`, where generation is still as it was when the rows were drawn; else it tells nothing."""
        return self.work_s if self.drawn_by is not None and alike(self.drawn_by, spec) else {}


def alike(one: StageSpec, other: StageSpec) -> bool:
    """Whether generation takes equally long under both."""
    return (one.units, one.resident_rows) == (other.units, other.resident_rows)


def gather(job: Job, once: Once) -> Gathered:
    """Generate the step's rows. Raises DataError when DAPO reaches its bound without a group that teaches."""
    if isinstance(job.config.algorithm, DapoConfig):
        return _until_enough_teach(job, once, job.config.algorithm.max_batches)
    ids, cursor = job.prepared.order.take(job.state.cursor, job.config.batch.prompts)
    prompts = job.prepared.prompts.prompts(ids)
    rollouts = once.start("generate", generate, job, prompts).result()
    rewards = once.start("rewards", score_rewards, job, prompts, rollouts)
    return Gathered(rollouts=rollouts, rewards=rewards, cursor=cursor, prompts=prompts)


def _until_enough_teach(job: Job, once: Once, max_batches: int) -> Gathered:
    size, cursor = job.config.batch, job.state.cursor
    batches: list[Answered] = []
    kept: Kept | None = None
    while len(batches) < max_batches and (kept is None or kept.num_taught < size.prompts):
        ids, cursor = job.prepared.order.take(cursor, size.prompts)
        prompts, number = job.prepared.prompts.prompts(ids), len(batches)
        rollouts = once.start(f"generate {number}", generate, job, prompts).result()
        rewards = once.start(f"rewards {number}", score_rewards, job, prompts, rollouts).result()
        batches.append(Answered(rollouts=rollouts, rewards=rewards))
        kept = keep_groups(batches, samples=size.samples, wanted=size.prompts)
    assert kept is not None, "max_batches is at least one"
    penalty_b = length_penalty(job.config, kept.used.rollouts.policy_lens_b)
    if kept.num_taught == 0:
        raise DataError(
            explain(
                f"cannot learn in step {job.state.step}",
                values=f"all {kept.num_used} groups of {size.samples} responses, from "
                f"algorithm.max_batches = {max_batches} batches of {size.prompts} prompts, "
                "have equal rewards within the group",
                rule="DAPO learns from groups whose rewards differ",
                remedy="use prompts that the model sometimes solves, more batch.samples, a reward with more "
                "values, or a larger algorithm.max_batches",
            )
        )
    return Gathered(
        rollouts=kept.taught.rollouts,
        rewards=Ready(kept.taught.rewards),
        cursor=job.prepared.order.take(job.state.cursor, kept.num_used)[1],
        used=kept.used,
        stats={
            "filter/batches": float(len(batches)),
            "filter/groups_used": float(kept.num_used),
            "filter/groups_kept": float(kept.num_taught),
            "overlong_penalty": float(penalty_b.mean()),
        },
    )
