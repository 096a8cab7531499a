"""A campaign's main path. The driver runs it; it is the only one who decides.

    prepare ─▶ open job ─▶ (move if called for ─▶ step ─▶ checkpoint if due) ... ─▶ final model, report

Our checkpoint, not Prefect's state, is the truth about the next step: a stop, a crash or a rerun continues
from it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial

from prefect.runtime import flow_run

from nereus.config import CampaignConfig
from nereus.flows.adapt import adapt
from nereus.flows.asynchronous import generating
from nereus.flows.campaign import CampaignResult
from nereus.flows.intervene import boundary, resumed_config, was_suspended
from nereus.flows.live import shown_live
from nereus.flows.orphan import ended_with_worker
from nereus.flows.recovery import surviving
from nereus.flows.row_source import current_source
from nereus.flows.run_log import logged
from nereus.flows.step import Tracker
from nereus.flows.tracking import unseen
from nereus.flows.transition import follow_plan
from nereus.record.report import write_report
from nereus.tasks.checkpoint import export_model, save_checkpoint
from nereus.tasks.evaluate import evaluate, is_due, is_recorded
from nereus.tasks.gpu_limit import gpus_held
from nereus.tasks.job import Job, open_job
from nereus.tasks.peer_copy import copy_to_peers
from nereus.tasks.prepare import prepare_campaign
from nereus.tasks.processes import size_processes
from nereus.tasks.resume import newest_checkpoint
from nereus.tasks.share import gpus_shared
from nereus.tasks.trace import traced


def post_train(
    config: CampaignConfig, *, resume: bool, continuing: bool, max_steps: int | None
) -> CampaignResult:
    """The campaign from its first or its newest step to its last; see the flow."""
    config = resumed_config(config)
    prepared = prepare_campaign(config)
    resume = resume or ((continuing or is_rerun()) and newest_checkpoint(config) is not None)
    with (
        logged(),
        ended_with_worker(),
        shown_live(config),
        gpus_held(config),
        gpus_shared(config) as share,
        open_job(prepared, resume=resume) as job,
        traced(job),
        boundary() as between,
    ):
        job.share = share
        run_steps(job, None if max_steps is None else job.state.step + max_steps, between)
        assert job.checkpoint is not None, "a finished run has a checkpoint"
        return CampaignResult(
            steps=job.state.step,
            run_folder=config.run_folder,
            model=export_model(unseen(job)),
            checkpoint=job.checkpoint,
            metrics=job.log.path,
            report=write_report(config.run_folder, config),
        )


def is_rerun() -> bool:
    """Whether this flow run has run before: it crashed, or was suspended."""
    return int(flow_run.run_count or 0) > 1 or was_suspended()


def last_step(job: Job, stop: int | None) -> int:
    """Where this run ends: after `stop` steps, if the campaign has as many."""
    return job.config.steps if stop is None else min(job.config.steps, stop)


def run_steps(job: Job, stop: int | None = None, between: Callable[[Job], None] = lambda job: None) -> None:
    """Run every step up to `stop`, the campaign's last by default. Workers that die are done without. Before
    a step, `between` may pause the run and change it.

    Where the campaign is asynchronous, the rows of later steps are drawn meanwhile.
    """
    with generating(job, end=lambda: last_step(job, stop)), closing(Tracker(job.config.tracking)) as tracker:
        if not is_recorded(job):
            surviving(job, evaluate_if_due)
        while job.state.step < last_step(job, stop):
            surviving(job, between)
            surviving(job, follow_plan if job.adapter is None else adapt)
            record = surviving(job, tracker.step)
            job.finish_step(record)
            size_processes(job, record)
            surviving(job, partial(save_if_due, last=last_step(job, stop)))
            surviving(job, copy_if_due)
            surviving(job, evaluate_if_due)


def save_if_due(job: Job, *, last: int) -> None:
    """Save a checkpoint every so many steps and after the last, unless this state is saved."""
    step, every = job.state.step, job.config.checkpoint.every_steps
    is_due = step == last or (every > 0 and step % every == 0)
    if step > 0 and is_due and not job.is_saved:
        save_checkpoint(unseen(job))


def evaluate_if_due(job: Job) -> None:
    """Measure the policy on held-out prompts where that is due."""
    if is_due(job):
        source = current_source()
        with source.at_rest():
            evaluate(unseen(job), source.version(job))


def copy_if_due(job: Job) -> None:
    """Copy the trained models to peers every so many steps, unless this state is copied."""
    step, every = job.state.step, job.config.checkpoint.peer_copy_steps
    is_copied = job.copies is not None and job.copies.step == step
    if every > 0 and 0 < step < job.config.steps and step % every == 0 and not is_copied:
        with current_source().at_rest():
            copy_to_peers(job)
