"""The server hears of steps that are tracked as one task run: how they ended, and no sooner."""

from __future__ import annotations

import time
from functools import partial

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.runtime import flow_run

from nereus.errors import WorkerLost
from nereus.flows.step_run import StepRuns
from nereus.record.step import StepRecord
from tests.record.records import make_record


def states_of(flow_run_id: str, wanted: int) -> dict[str, str | None]:
    """The states of a flow run's task runs by name, once so many have ended; the server is told of them by
    and by.
    """
    with get_client(sync_client=True) as client:
        for _ in range(100):
            runs = client.read_task_runs(
                flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))  # type: ignore[list-item]
            )
            ended = {run.name: run.state.name for run in runs if run.state and run.state.is_final()}
            if len(ended) == wanted:
                return ended
            time.sleep(0.1)
    raise AssertionError(f"{ended} after 10 s")


def fail() -> StepRecord:
    raise WorkerLost("worker 3 is gone")


@pytest.mark.usefixtures("server")
def test_steps_are_task_runs_that_end_as_the_steps_do() -> None:
    seen: list[str] = []

    @flow
    def run() -> list[int]:
        seen.append(str(flow_run.id))
        runs = StepRuns()
        with pytest.raises(WorkerLost, match="worker 3"):
            runs.step(4, 1, fail)
        taken = [runs.step(number, 3, partial(make_record, number)).step for number in range(4, 8)]
        with pytest.raises(WorkerLost, match="worker 3"):
            runs.step(8, 3, fail)
        taken.append(runs.step(8, 3, partial(make_record, 8)).step)
        runs.close()
        return taken

    assert run() == [4, 5, 6, 7, 8]
    assert states_of(seen[0], 4) == {
        "step 4": "Failed",
        "steps 4 to 6": "Completed",
        "steps 7 to 9": "Failed",
        "steps 8 to 10": "Completed",
    }


def test_outside_of_a_flow_run_a_step_is_just_taken() -> None:
    runs = StepRuns()
    assert runs.step(5, 1, partial(make_record, 5)).step == 5
    runs.close()
