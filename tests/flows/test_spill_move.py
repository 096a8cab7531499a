"""Where no replica can be left alone, old shards make room by way of the host, and nothing differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from nereus.config import CampaignConfig
from nereus.emu.cluster import Call
from nereus.errors import StateLost
from nereus.flows.campaign import campaign
from nereus.flows.post_training import run_steps
from nereus.flows.recovery import surviving
from nereus.record.emergencies import Way, read_emergencies
from nereus.record.metrics import read_records
from nereus.record.transitions import read_transitions, told
from nereus.tasks.job import Job, open_job
from nereus.tasks.memory_room import held_bytes
from nereus.tasks.plan_move import plan_move
from nereus.tasks.prepare import prepare_campaign
from tests.flows.curves import same_steps

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


def test_the_only_unit_of_a_model_moves_without_room_for_both_of_its_shards(make_config: Make) -> None:
    ample = make_config(name="ample", cluster=CLUSTER, **ONE_UNIT)
    tight = make_config(name="tight", cluster=TIGHT, **ONE_UNIT)
    moved_with_room = read_records(campaign(ample).metrics)
    same_steps(read_records(campaign(tight).metrics), moved_with_room)
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


APART = {
    "lora": {"models": {"lora": {"rank": 4}}},
    "zero1": {"optimizer": {"learning_rate": 1e-3, "zero1": True}},
}


def tightest(config: CampaignConfig) -> float:
    """GB a worker in which a move fits with its largest shard on the host, and not where that stays."""
    with open_job(prepare_campaign(config), resume=False) as job:
        draft = plan_move(job, job.prepared.stages_at(1))
        held = held_bytes(job.stages)
    spared = max(shard for plan in draft.plans.values() for shard in map(plan.held_bytes, plan.ranks))
    beside = {
        rank: sum(plan.peak_bytes(rank) - plan.held_bytes(rank) for plan in draft.plans.values())
        for rank in draft.movers
    }
    most = max(held.get(rank, 0) + amount for rank, amount in beside.items())
    return (most - spared // 2) / 1e9


@pytest.mark.parametrize("kind", APART)
@pytest.mark.parametrize("aborts", [False, True])
def test_what_bounded_mode_cannot_move_goes_by_way_of_the_host(
    make_config: Make, model_folder: str, kind: str, aborts: bool
) -> None:
    """Frozen weights or a slice of the optimizer lie apart; after an abort training goes on with them."""
    parts = ONE_UNIT | APART[kind]
    if "models" in parts:
        parts["models"] = {"actor": str(model_folder)} | parts["models"]
    plan = {"actor_training": {"tp": 2, "dp": 2, "gpus": [0, 1, 2, 3]}, "actor_generation": {"gpus": [4]}}
    change = {"before_step": 1, "plan": plan | {"actor_training": {"tp": 1, "dp": 4}}}
    parts |= {"plan": plan, "changes": [change]}
    cluster = CLUSTER | {"gpus": 5}
    cap = tightest(make_config(name="draft", cluster=cluster | {"gpu_memory_gb": 1}, **parts))
    still = make_config(name="still", cluster=cluster, **(parts | ({"changes": []} if aborts else {})))
    config = make_config(name="tight", cluster=cluster | {"gpu_memory_gb": cap}, **parts)
    with open_job(prepare_campaign(config), resume=False) as job:
        if aborts:
            job.cluster.submit = hurried(job.cluster.submit)  # type: ignore[method-assign]
        run_steps(job)
    found = read_transitions(config.run_folder)
    assert {record.outcome for record in found} == {"abort" if aborts else "commit"}
    assert found[0].spilled_bytes > 0
    assert found[0].bounded == []
    same_steps(read_records(job.log.path), read_records(campaign(still).metrics))


def hurried(submit: Callable[..., Any]) -> Callable[..., Any]:
    """No operation that moves bytes is in time."""

    def too_late(calls: Mapping[int, Call]) -> Any:
        return submit(
            {
                rank: replace(call, arguments=(call.arguments[0], 0.0))
                if call.method == "prepare_operation"
                else call
                for rank, call in calls.items()
            }
        )

    return too_late


def test_an_abort_brings_the_shards_back_and_the_job_goes_on_as_it_was(make_config: Make) -> None:
    still = make_config(name="still", cluster=TIGHT, **(ONE_UNIT | {"changes": []}))
    config = make_config(name="aborted", cluster=TIGHT, **ONE_UNIT)
    with open_job(prepare_campaign(config), resume=False) as job:
        job.cluster.submit = hurried(job.cluster.submit)  # type: ignore[method-assign]
        run_steps(job)
    same_steps(read_records(job.log.path), read_records(campaign(still).metrics))
    found = read_transitions(config.run_folder)
    assert {record.outcome for record in found} == {"abort"}
    assert found[0].operations[0].bytes == found[0].spilled_bytes > 0, "the shards had gone to the host"


def test_a_shard_of_generation_that_did_not_come_back_is_synced_from_training(make_config: Make) -> None:
    parts = ONE_UNIT | {"changes": []}
    config = make_config(name="lost", cluster=CLUSTER, **parts)
    lost = [True]

    def lose(job: Job) -> None:
        if lost and lost.pop():
            job.cluster.run({2: Call("drop", ("actor.generation",))}, what="lose a shard")
            raise StateLost("planted")

    with open_job(prepare_campaign(config), resume=False) as job:
        run_steps(job, 1)
        surviving(job, lose)
        run_steps(job)
    (emergency,) = read_emergencies(config.run_folder)
    assert (emergency.way, emergency.steps_redone) == (Way.TRANSITION, 0)
    still = make_config(name="still", cluster=CLUSTER, **parts)
    same_steps(read_records(job.log.path), read_records(campaign(still).metrics))
