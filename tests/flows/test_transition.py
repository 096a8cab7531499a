"""A live transition as its flow run shows it: operations, their order, their picture; and an aborted one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import TaskRun

from nereus.config import CampaignConfig
from nereus.emu.cluster import Call
from nereus.flows.campaign import campaign
from nereus.flows.post_training import run_steps
from nereus.record.metrics import read_records
from nereus.record.transitions import TransitionRecord, read_transitions
from nereus.tasks.job import open_job
from nereus.tasks.prepare import prepare_campaign
from tests.flows.curves import FOUR_GPUS, SPLIT, SPREAD, check_curve

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
Make = Callable[..., CampaignConfig]


class Messages:
    """A listener that keeps the messages."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_stage(self, step: int, stage: str, seconds: float | None) -> None:
        pass

    def on_step(self, record: object) -> None:
        pass

    def on_message(self, text: str) -> None:
        self.texts.append(text)


def flow_run_of(client: SyncPrefectClient, step: int, since: Any) -> UUID:
    """The newest transition subflow of that step."""
    named = FlowRunFilter.model_validate(
        {"name": {"any_": [f"transition before step {step}"]}, "start_time": {"after_": since}}
    )
    (run,) = client.read_flow_runs(flow_run_filter=named)
    return run.id


def task_runs_of(client: SyncPrefectClient, flow_run: UUID, num: int) -> dict[str, TaskRun]:
    """Its task runs by name; they reach the server a moment after they ended."""
    chosen = TaskRunFilter.model_validate({"flow_run_id": {"any_": [flow_run]}})
    end = time.monotonic() + 30
    while len(runs := client.read_task_runs(task_run_filter=chosen)) < num and time.monotonic() < end:
        time.sleep(0.2)
    return {run.name: run for run in runs}


def waits_of(run: TaskRun) -> set[UUID]:
    return {result.id for result in run.task_inputs.get("wait_for", []) if hasattr(result, "id")}


def check_runs(record: TransitionRecord, runs: Mapping[str, TaskRun]) -> None:
    """There is a task run for every operation, and it waited for those that its graph names."""
    text_of = {operation.id: operation.text for operation in record.operations}
    for operation in record.operations:
        names = {text_of[name] for name in operation.after} or {"begin"}
        assert waits_of(runs[operation.text]) == {runs[name].id for name in names}, operation.text
    others = {run.name for run in runs.values()} - set(text_of.values())
    assert others == {"begin", "vote", "decide", "apply", "rebuild"}


def test_a_transition_is_a_task_run_an_operation_with_the_waits_of_its_graph(make_config: Make) -> None:
    since = datetime.now(UTC)
    changes = [{"before_step": 1, "plan": SPLIT}, {"before_step": 2, "plan": SPREAD}]
    result = campaign(make_config(**FOUR_GPUS, steps=3, changes=changes))
    still = campaign(make_config(**FOUR_GPUS, steps=3, name="still", tracking="step"))
    check_curve(result.metrics, still.metrics)
    first, second = read_transitions(result.run_folder)
    kinds = [(operation.kind, operation.model_stage) for operation in first.operations]
    assert ("split", "actor.training") in kinds
    assert ("merge", "critic.training") in kinds
    assert kinds.count(("destroy", "actor.generation")) == 2, "it shares the training units' weights now"
    assert {operation.kind for operation in second.operations} == {"extend", "merge", "destroy"}
    assert any(operation.after for operation in second.operations)
    with get_client(sync_client=True) as client:
        for record in (first, second):
            moving = [operation for operation in record.operations if operation.carrier is None]
            assert all(operation.bytes == operation.planned_bytes for operation in record.operations)
            assert sum(operation.bytes for operation in moving) == record.bytes == record.lower_bound
            assert all(o.bytes == 0 and "bytes travel with" in o.text for o in record.operations if o.carrier)
            flow_run = flow_run_of(client, record.step, since)
            check_runs(record, task_runs_of(client, flow_run, len(record.operations) + 5))
            assert (result.run_folder / record.picture).read_text().startswith("<svg")
            (artifact,) = client.read_artifacts(
                artifact_filter=ArtifactFilter.model_validate({"flow_run_id": {"any_": [flow_run]}})
            )
            assert "(data:image/svg+xml;base64," in str(artifact.data)


def test_a_failed_operation_aborts_all_and_the_move_is_left_out_for_longer_each_time(
    make_config: Make,
) -> None:
    then = {"actor_training": {"tp": 1, "dp": 2}, "actor_generation": {"tp": 2}}
    config = make_config(steps=7, tracking="step", changes=[{"before_step": 1, "plan": then}])
    failures = [1, 2]
    with open_job(prepare_campaign(config), resume=False) as job:
        listener = job.listener = Messages()
        submit = job.cluster.submit

        def fail(calls: Mapping[int, Call]) -> Any:
            """Leave worker 1 no time for its part of the actor's move, twice."""
            call = calls.get(1)
            if call and call.method == "prepare_operation" and failures:
                order, _ = call.arguments
                if order.target == "actor.training":
                    failures.pop()
                    calls = {**calls, 1: replace(call, arguments=(order, 1e-6))}
            return submit(calls)

        job.cluster.submit = fail  # type: ignore[method-assign]
        run_steps(job)
    done = read_transitions(config.run_folder)
    assert [(r.step, r.outcome, r.retry_step) for r in done] == [
        (1, "abort", 3),
        (3, "abort", 6),
        (6, "commit", None),
    ]
    assert all(re.search(r"\b1\b", record.reason) for record in done[:2]), "by itself or by a peer"
    assert any(operation.reason for operation in done[0].operations)
    stays = [text for text in listener.texts if "is tried again before step" in text]
    assert [text.split(":")[0] for text in stays] == ["before step 2", "before step 4", "before step 5"]
    plans = [record.plan["actor.training"].split(" on ")[0] for record in read_records(job.log.path)]
    assert plans == ["tp2 pp1 dp1"] * 6 + ["tp1 pp1 dp2"]
