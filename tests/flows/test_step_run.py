"""The server hears of a step that is tracked as one task run: how it ended, and no sooner."""

from __future__ import annotations

import time

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.runtime import flow_run

from nereus.errors import WorkerLost
from nereus.flows.step_run import told
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


@pytest.mark.usefixtures("server")
def test_a_step_is_a_task_run_that_ends_as_the_step_does() -> None:
    seen: list[str] = []

    @flow
    def run() -> StepRecord:
        seen.append(str(flow_run.id))
        with pytest.raises(WorkerLost, match="worker 3"), told(4):
            raise WorkerLost("worker 3 is gone")
        with told(5) as outcome:
            outcome.complete(make_record(5))
            return outcome.result()

    assert run().step == 5
    assert states_of(seen[0], 2) == {"step 4": "Failed", "step 5": "Completed"}
