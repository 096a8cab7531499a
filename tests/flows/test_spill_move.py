"""Where no replica can be left alone, old shards make room by way of the host, and nothing differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from nereus.config import CampaignConfig
from nereus.emu.cluster import Call
from nereus.flows.campaign import campaign
from nereus.flows.post_training import run_steps
from nereus.record.metrics import read_records
from nereus.record.step import StepRecord
from nereus.record.transitions import read_transitions, told
from nereus.tasks.job import open_job
from nereus.tasks.prepare import prepare_campaign

pytestmark = [pytest.mark.usefixtures("server", "ray_pool"), pytest.mark.slow]
Make = Callable[..., CampaignConfig]
CLUSTER = {"gpus": 3, "device": "cpu", "timeout_s": 60}
GENERATION = {"dp": 1, "gpus": [2]}
# A training rank holds 134 KB with its gradients; both shards take 344 KB, the new one and the rest 243 KB.
TIGHT = CLUSTER | {"gpu_memory_gb": 2.8e-4}
CHANGE = {"before_step": 1, "plan": {"actor_training": {"pp": 2}, "actor_generation": GENERATION}}
ONE_UNIT = {
    "plan": {"actor_training": {"tp": 2, "gpus": [0, 1]}, "actor_generation": GENERATION},
    "changes": [CHANGE],
    "tracking": "step",
    "checkpoint": {"every_steps": 0},
    "steps": 3,
}


def same(ours: list[StepRecord], theirs: list[StepRecord], *, abs_tolerance: float) -> None:
    for record in ("step", "version", "position", "response_tokens"):
        assert [getattr(r, record) for r in ours] == [getattr(r, record) for r in theirs]
    # Another layout sums in another order; everything else is the same.
    assert [r.stats["loss/actor"] for r in ours] == pytest.approx(
        [r.stats["loss/actor"] for r in theirs], abs=abs_tolerance
    )


def test_the_only_unit_of_a_model_moves_without_room_for_both_of_its_shards(make_config: Make) -> None:
    ample = make_config(name="ample", cluster=CLUSTER, **ONE_UNIT)
    tight = make_config(name="tight", cluster=TIGHT, **ONE_UNIT)
    moved_with_room = read_records(campaign(ample).metrics)
    same(read_records(campaign(tight).metrics), moved_with_room, abs_tolerance=0)
    (shadow,) = read_transitions(ample.run_folder)
    (found,) = read_transitions(tight.run_folder)
    assert [operation.kind for operation in shadow.operations] == ["merge"]
    spill, merge = found.operations
    assert (spill.kind, merge.kind, list(merge.after)) == ("spill", "merge", [spill.id])
    assert (found.outcome, found.bounded, found.bytes) == ("commit", [], shadow.bytes)
    assert spill.bytes == found.spilled_bytes > shadow.spilled_bytes == 0
    assert merge.bytes == merge.planned_bytes == found.bytes, "what went to the host was sent from there"
    assert "MB spilled" in told(found)
    assert f"copied {spill.bytes} B" in told(found)
    assert (tight.run_folder / found.picture).read_text().count("Spill") >= 1


def test_an_abort_brings_the_shards_back_and_the_job_goes_on_as_it_was(make_config: Make) -> None:
    still = make_config(name="still", cluster=TIGHT, **(ONE_UNIT | {"changes": []}))
    config = make_config(name="aborted", cluster=TIGHT, **ONE_UNIT)
    with open_job(prepare_campaign(config), resume=False) as job:
        submit = job.cluster.submit

        def too_late(calls: Mapping[int, Call]) -> Any:
            """No operation that moves bytes is in time."""
            hurried = {
                rank: replace(call, arguments=(call.arguments[0], 0.0))
                if call.method == "prepare_operation"
                else call
                for rank, call in calls.items()
            }
            return submit(hurried)

        job.cluster.submit = too_late  # type: ignore[method-assign]
        run_steps(job)
    same(read_records(job.log.path), read_records(campaign(still).metrics), abs_tolerance=0)
    found = read_transitions(config.run_folder)
    assert {record.outcome for record in found} == {"abort"}
    assert found[0].operations[0].bytes == found[0].spilled_bytes > 0, "the shards had gone to the host"
