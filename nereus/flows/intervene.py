"""Between two steps: pause or suspend if that is asked for, and go on with what a person has changed.

    asked ─▶ pause (GPUs stay)        ─▶ input ─▶ validated ─▶ applied to the running job, or refused
          ─▶ checkpoint ─▶ suspend (process and GPUs go)  ═▶ input ─▶ next process ─▶ configuration with it

Both wait on the server with a form; it checks the input's types and bounds, `with_changes` all else. What was
taken is in `interventions.jsonl`, from which a run that continues takes its configuration, unless that was
edited since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal
from uuid import UUID, uuid4

from prefect.context import FlowRunContext
from prefect.flow_runs import pause_flow_run, suspend_flow_run
from prefect.input import RunInput
from prefect.input.run_input import keyset_from_base_key

from nereus.config import CampaignConfig
from nereus.config.changes import Changes, settings, still_meant, with_changes
from nereus.errors import ConfigError, Infeasible
from nereus.flows import events
from nereus.flows.requests import Asked, Requests, heard
from nereus.flows.tracking import unseen
from nereus.flows.transition import move_to
from nereus.planner.adapt import first
from nereus.planner.seating import Seated
from nereus.record.interventions import (
    INTERVENTIONS_FILE,
    InterventionRecord,
    append_intervention,
    read_interventions,
)
from nereus.record.listener import current_listener
from nereus.tasks.adapt import gpus_of, request_of, seated_stages
from nereus.tasks.checkpoint import save_checkpoint
from nereus.tasks.job import Job
from nereus.tasks.pool import beyond

WAIT_S = 30 * 86400  # a pause that nobody ends by then fails the run
LOOK_S = 2


class ChangesInput(RunInput, Changes):
    """The form with which a paused or suspended campaign is resumed. All of it may be left empty."""


@contextmanager
def boundary() -> Iterator[Callable[[Job], None]]:
    """What to do between two steps of the current flow run, while the block runs."""
    with heard(_flow_run_id()) as requests:
        yield partial(intervene, requests=requests)


def was_suspended() -> bool:
    """Whether the current flow run was paused or suspended before this process began."""
    context = FlowRunContext.get()
    return bool(context and context.flow_run and context.flow_run.empirical_policy.pause_keys)


def intervene(job: Job, requests: Requests) -> None:
    """Pause or suspend where somebody asks for it. Returns when the run goes on.

    Raises Prefect's `Pause` when the run is suspended: everything is saved, and it is run again from the top.
    """
    asked = requests.take()
    if asked is None:
        return
    key = f"step-{job.state.step}-{uuid4().hex[:8]}"
    form = ChangesInput.with_initial_data(description=_told(job))
    if asked is Asked.SUSPEND and _is_deployed():
        if not job.is_saved and job.state.step > 0:
            save_checkpoint(unseen(job))
        waits = f"{_flow_run_id()} {key}"
        record = InterventionRecord(step=job.state.step, kind="suspend", changes={}, taken=False, waits=waits)
        append_intervention(job.config.run_folder, record)
        job.listener.on_message(f"suspended before step {job.state.step}")
        suspend_flow_run(wait_for_input=form, timeout=WAIT_S, key=key)
        raise AssertionError("a suspended run ends")
    job.listener.on_message(f"paused before step {job.state.step}; its {len(job.cluster.ranks)} GPUs stay")
    changes = pause_flow_run(wait_for_input=form, timeout=WAIT_S, poll_interval=LOOK_S, key=key)
    change(job, _plain(changes), "pause")


def change(job: Job, changes: Changes, kind: Literal["pause", "suspend"]) -> None:
    """Let the running job go on with the changes; what cannot be is refused as a whole, and said.

    Raises WorkerLost when a worker dies in a move that was forced; the changes hold.
    """
    if changes.is_empty:
        job.listener.on_message(f"goes on unchanged from step {job.state.step}")
        return
    step, why, before = job.state.step, "", job.config
    seated: Seated | None = None
    try:
        seated = _apply(job, with_changes(job.config, changes, step=step))
    except (ConfigError, Infeasible) as error:
        why = str(error)
    record = _record(before, changes, step, kind, why)
    append_intervention(job.config.run_folder, record)
    events.intervened(job, not why, kind, dict(record.changes), why)
    said = f"refused: {why}" if why else f"changed {record.changes}"
    job.listener.on_message(f"before step {step}: {said}")
    if seated is not None and move_to(job, seated_stages(job.stages, seated)):
        assert job.adapter is not None, "the planner chose"
        job.adapter.seated = seated


def _apply(job: Job, config: CampaignConfig) -> Seated | None:
    """Give the job its new configuration; returns the plan that its planner then moves to, profitable or not.

    Raises ConfigError or Infeasible, and then nothing has changed.
    """
    prepared, adaptation = replace(job.prepared, config=config), job.config.adaptation
    if job.adapter is None or config.adaptation is None or adaptation is None:
        prepared.stages_at(job.state.step)
        job.prepared = prepared  # a plan that was forced is the next step's, which the job moves to
        return None
    request = request_of(config, prepared.models, prepared.prompts.longest)
    controller = replace(job.adapter.controller, request=request)
    leaving = beyond(job, config.cluster.max_gpus or config.cluster.gpus)
    staying = tuple(gpu for gpu in gpus_of(job.cluster.pool()) if gpu.id not in leaving)
    seated, _ = first(controller, replace(job.adapter.last, step=job.state.step, pool=staying))
    job.prepared, job.adapter.controller = prepared, controller
    job.cluster.release(leaving)
    return None if config.adaptation.fixed == adaptation.fixed else seated


def resumed_config(config: CampaignConfig) -> CampaignConfig:
    """The configuration with all changes that people made in this run before, but for settings that were
    edited in the configuration since.

    The input of a suspension that has ended is fetched first, and recorded.
    """
    records = read_interventions(config.run_folder)
    if records and records[-1].waits:
        run_id, key = records[-1].waits.split()
        keyset = keyset_from_base_key(f"suspended-{key}")
        given = ChangesInput.load(keyset, UUID(run_id))
        assert isinstance(given, ChangesInput), "loaded outside an event loop"
        changes = _plain(given)
        records.append(_resumed(_replayed(config, records), changes, records[-1].step))
        append_intervention(config.run_folder, records[-1])
    after = _replayed(config, records)
    configured = settings(config)
    if changed := {name: value for name, value in settings(after).items() if value != configured[name]}:
        current_listener.get().on_message(
            f"goes on as it was changed before: {changed} ({INTERVENTIONS_FILE})"
        )
    return after


def _resumed(config: CampaignConfig, changes: Changes, step: int) -> InterventionRecord:
    """What became of the input with which a suspended run was resumed."""
    why = ""
    try:
        with_changes(config, changes, step=step)
    except ConfigError as error:
        why = str(error)
    return _record(config, changes, step, "suspend", why)


def _record(
    before: CampaignConfig, changes: Changes, step: int, kind: Literal["pause", "suspend"], why: str
) -> InterventionRecord:
    """The line of changes to the configuration `before`; `why` they were refused, if they were."""
    values = changes.model_dump(mode="json", exclude_defaults=True)
    over = {name: value for name, value in settings(before).items() if name in values}
    return InterventionRecord(step=step, kind=kind, changes=values, taken=not why, over=over, why=why)


def _replayed(config: CampaignConfig, records: list[InterventionRecord]) -> CampaignConfig:
    for record in records:
        if record.taken:
            changes = still_meant(Changes.model_validate(record.changes), record.over, config)
            config = with_changes(config, changes, step=record.step)
    return config


def _plain(changes: Changes) -> Changes:
    """The changes alone, without what Prefect adds to an input."""
    return Changes.model_validate(changes.model_dump())


def _told(job: Job) -> str:
    config = job.config
    return (
        f"{config.name} stands before step {job.state.step} of {config.steps}, with "
        f"{len(job.cluster.ranks)} GPUs and learning rate {config.optimizer.learning_rate:g}. "
        "Leave empty what is to stay as it is."
    )


def _is_deployed() -> bool:
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None


def _flow_run_id() -> UUID:
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None, "a campaign is a flow run"  # noqa: PT018
    return context.flow_run.id
