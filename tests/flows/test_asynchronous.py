"""Campaigns whose generation runs ahead of training: nothing is lost, doubled, or staler than allowed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import ray

from nereus.config import CampaignConfig
from nereus.config.changes import Changes
from nereus.data.order import Cursor
from nereus.emu.checkpoint.source import open_checkpoint
from nereus.errors import DataError
from nereus.flows.campaign import campaign
from nereus.flows.intervene import change
from nereus.flows.post_training import run_steps
from nereus.flows.rollout_queue import RolloutQueue
from nereus.record.emergencies import read_emergencies
from nereus.record.metrics import read_records
from nereus.record.step import StepRecord
from nereus.record.transitions import read_transitions
from nereus.tasks.job import Job, open_job
from nereus.tasks.prepare import prepare_campaign
from tests.flows.striker import Striker

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
Make = Callable[..., CampaignConfig]

APART: dict[str, Any] = {
    "cluster": {"gpus": 4, "device": "cpu", "timeout_s": 60},
    "plan": {"actor_training": {"tp": 2}, "actor_generation": {"dp": 2, "gpus": [2, 3]}},
    "tracking": "step",
    "steps": 5,
    "checkpoint": {"every_steps": 2},
}
ONE_OFF = {"staleness": 1}


def numbers(record: StepRecord) -> StepRecord:
    """A record without what is measured with a clock, and without what only asynchronous runs report."""
    stats = {
        name: value
        for name, value in record.stats.items()
        if "_s/" not in name and not name.startswith("staleness/") and not name.endswith("_processes")
    }
    return replace(
        record, stage_s={}, step_s=0.0, tokens_per_s=0.0, overhead_s=0.0, memory_bytes={}, stats=stats
    )


def drawn(record: StepRecord) -> tuple[int, int, int, float | None]:
    """What the responses of a step amount to."""
    return record.step, record.prompt_tokens, record.response_tokens, record.reward_mean


@pytest.mark.slow
def test_staleness_0_is_the_synchronous_campaign_bit_for_bit(make_config: Make) -> None:
    turns = campaign(make_config(name="turns", **APART))
    ahead = campaign(make_config(name="ahead", asynchrony={"staleness": 0}, **APART))
    assert [numbers(record) for record in read_records(ahead.metrics)] == [
        numbers(record) for record in read_records(turns.metrics)
    ]
    assert (ahead.model / "model.safetensors").read_bytes() == (
        turns.model / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_one_step_off_takes_every_sample_once_under_the_version_before(make_config: Make) -> None:
    turns = read_records(campaign(make_config(name="turns", **APART)).metrics)
    ahead = read_records(campaign(make_config(name="ahead", asynchrony=ONE_OFF, **APART)).metrics)
    assert [record.version for record in ahead] == [0, 0, 1, 2, 3]
    assert [record.stats["staleness/max"] for record in ahead] == [0, 1, 1, 1, 1]
    assert [(r.step, r.epoch, r.position) for r in ahead] == [(r.step, r.epoch, r.position) for r in turns]
    assert [r.prompt_tokens for r in ahead] == [r.prompt_tokens for r in turns]
    assert drawn(ahead[0]) == drawn(turns[0])


@pytest.mark.slow
def test_a_step_learns_while_the_next_one_is_drawn(make_config: Make) -> None:
    events: list[tuple[int, str, bool]] = []
    with open_job(prepare_campaign(make_config(asynchrony=ONE_OFF, **APART)), resume=False) as job:

        class Watcher(Striker):
            def on_stage(self, step: int, stage: str, seconds: float | None) -> None:
                events.append((step, stage, seconds is None))

        job.listener = Watcher(lambda step, stage: None)
        run_steps(job)
    for step in (1, 2, 3):
        begins = events.index((step + 1, "generate", True))
        assert begins < events.index((step, "learn actor.training", False))


@pytest.mark.slow
def test_responses_drawn_in_segments_go_on_across_weight_syncs(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12 tokens in segments of 2 the last 6 are drawn after the sync that a step ends with."""
    boundary, met = RolloutQueue.boundary, Counter[int]()

    def late(queue: RolloutQueue[object]) -> int:
        step = queue._next
        met[step] += 1
        while step > 0 and met[step] == 4 and not queue._num_holds:
            time.sleep(0.01)  # training is on its way to its sync
        return boundary(queue)

    monkeypatch.setattr(RolloutQueue, "boundary", late)
    parts = APART | {"sampling": {"max_new_tokens": 12, "ignore_eos": True}}
    config = make_config(asynchrony={"staleness": 1, "segment_tokens": 2}, **parts)
    records = read_records(campaign(config).metrics)
    assert [record.version for record in records] == [0, 0, 1, 2, 3]
    assert [record.stats["staleness/versions"] for record in records] == [1, 2, 2, 2, 2]
    assert [record.stats["staleness/max"] for record in records] == [0, 1, 1, 1, 1]
    assert [record.stats["staleness/mean"] for record in records] == [0, 0.5, 0.5, 0.5, 0.5]
    assert all(record.length_mean == 12 for record in records)


@pytest.mark.slow
def test_whole_responses_are_never_older_than_the_bound(make_config: Make) -> None:
    config = make_config(
        asynchrony={"staleness": 3}, algorithm={"kind": "grpo", "correction": {"high": 2.0}}, **APART
    )
    records = read_records(campaign(config).metrics)
    assert [record.step for record in records] == [0, 1, 2, 3, 4]
    assert all(0 <= record.stats["staleness/max"] <= 3 for record in records)
    assert all(record.stats["staleness/versions"] == 1 for record in records)
    assert all("correction_weight/actor" in record.stats for record in records)


@pytest.mark.parametrize(
    ("victim", "stage", "asynchrony"),
    [
        pytest.param(3, "generate", {"staleness": 1}, marks=pytest.mark.slow),
        pytest.param(3, "learn actor.training", {"staleness": 1}, marks=pytest.mark.slow),
        pytest.param(0, "learn actor.training", {"staleness": 1}, marks=pytest.mark.slow),
        pytest.param(3, "generate", {"staleness": 2, "segment_tokens": 2}, marks=pytest.mark.slow),
        pytest.param(0, "publish", {"staleness": 2, "segment_tokens": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_dies_costs_no_step_and_no_sample(
    make_config: Make, victim: int, stage: str, asynchrony: dict[str, int]
) -> None:
    parts = APART | {"plan": {"actor_training": {"dp": 2}, "actor_generation": {"dp": 2, "gpus": [2, 3]}}}
    still = read_records(campaign(make_config(name="still", asynchrony=asynchrony, **parts)).metrics)
    prepared = prepare_campaign(make_config(name="struck", asynchrony=asynchrony, **parts))
    victims = [victim]
    with open_job(prepared, resume=False) as job:

        def strike(step: int, name: str) -> None:
            if (step, name) == (2, stage) and victims:
                ray.kill(job.cluster._actors[victims.pop()])

        job.listener = Striker(strike)
        run_steps(job)
        assert not victims
        assert len(job.cluster.ranks) == 3
        training, generation = (set(job.stages[f"actor.{one}"].ranks) for one in ("training", "generation"))
        assert not training & generation
        assert job.checkpoint is not None
        control = open_checkpoint(job.checkpoint).control
    assert (control.step, control.optimizers["actor"].adam_steps) == (5, 5)
    struck = read_records(job.log.path)
    assert len(read_emergencies(job.config.run_folder)) == 1
    assert [(r.step, r.epoch, r.position) for r in struck] == [(r.step, r.epoch, r.position) for r in still]
    assert [r.prompt_tokens for r in struck] == [r.prompt_tokens for r in still]
    assert all(0 <= r.stats["staleness/max"] <= asynchrony["staleness"] for r in struck)


@pytest.mark.slow
def test_a_resumed_run_takes_every_sample_once(make_config: Make) -> None:
    whole = read_records(campaign(make_config(name="whole", asynchrony=ONE_OFF, **APART)).metrics)
    config = make_config(name="parted", asynchrony=ONE_OFF, **APART)
    campaign(config, max_steps=3)
    parted = read_records(campaign(config, resume=True).metrics)
    assert [(r.step, r.epoch, r.position, r.prompt_tokens) for r in parted] == [
        (r.step, r.epoch, r.position, r.prompt_tokens) for r in whole
    ]
    assert [numbers(record) for record in parted[:3]] == [numbers(record) for record in whole[:3]]
    assert parted[3].version == 3  # drawn anew by the policy of the checkpoint


@pytest.mark.slow
def test_steps_that_are_asked_for_later_are_drawn_as_if_they_had_been_asked_for_at_once(
    make_config: Make,
) -> None:
    whole = read_records(campaign(make_config(name="whole", asynchrony=ONE_OFF, **APART)).metrics)
    config = make_config(name="longer", asynchrony=ONE_OFF, **APART | {"steps": 3})

    def ask(job: Job) -> None:
        if job.state.step == 2:  # the responses of the last step are drawn
            change(job, Changes(steps=4), "pause")

    with open_job(prepare_campaign(config), resume=False) as job:
        run_steps(job, between=ask)
    longer = read_records(job.log.path)
    assert [numbers(record) for record in longer] == [numbers(record) for record in whole[:4]]


@pytest.mark.slow
def test_a_finished_campaign_goes_on_up_to_more_steps(make_config: Make) -> None:
    whole = read_records(campaign(make_config(name="whole", asynchrony=ONE_OFF, **APART)).metrics)
    short, long = (
        make_config(name="finished", asynchrony=ONE_OFF, **APART | {"steps": steps}) for steps in (3, 5)
    )
    first = read_records(campaign(short).metrics)
    records = read_records(campaign(long, continuing=True).metrics)
    assert [numbers(record) for record in records[:3]] == [numbers(record) for record in first]
    assert [(r.step, r.epoch, r.position, r.prompt_tokens) for r in records] == [
        (r.step, r.epoch, r.position, r.prompt_tokens) for r in whole
    ]


@pytest.mark.slow
def test_an_end_that_comes_nearer_drops_what_was_drawn_beyond_it(make_config: Make) -> None:
    config = make_config(name="shorter", asynchrony={"staleness": 2}, **APART)

    def ask(job: Job) -> None:
        if job.state.step == 2:
            change(job, Changes(steps=3), "pause")

    with open_job(prepare_campaign(config), resume=False) as job:
        run_steps(job, between=ask)
        assert job.state.cursor == job.prepared.order.take(Cursor(), 3 * 4)[1]
    assert [record.step for record in read_records(job.log.path)] == [0, 1, 2]


@pytest.mark.slow
def test_an_error_in_generation_ends_the_campaign_with_that_error(make_config: Make) -> None:
    with open_job(prepare_campaign(make_config(asynchrony=ONE_OFF, **APART)), resume=False) as job:

        def strike(step: int, stage: str) -> None:
            if (step, stage) == (2, "generate"):
                raise DataError("no more prompts")

        job.listener = Striker(strike)
        with pytest.raises(DataError, match="no more prompts"):
            run_steps(job)
        assert job.state.step == 2


@pytest.mark.slow
def test_a_training_error_ends_generation_too(make_config: Make) -> None:
    with open_job(prepare_campaign(make_config(asynchrony=ONE_OFF, **APART)), resume=False) as job:

        def strike(step: int, stage: str) -> None:
            if (step, stage) == (1, "learn actor.training"):
                raise DataError("training is broken")

        job.listener = Striker(strike)
        with pytest.raises(DataError, match="training is broken"):
            run_steps(job)
        assert (job.state.step, job.state.cursor.position) == (1, 4)


@pytest.mark.slow
def test_training_moves_while_generation_runs_on(make_config: Make) -> None:
    change = {
        "before_step": 2,
        "plan": {"actor_training": {"dp": 2}, "actor_generation": {"dp": 2, "gpus": [2, 3]}},
    }
    still = read_records(campaign(make_config(name="still", asynchrony=ONE_OFF, **APART)).metrics)
    prepared = prepare_campaign(make_config(name="moved", asynchrony=ONE_OFF, changes=[change], **APART))
    moved, in_time = threading.Event(), []
    with open_job(prepared, resume=False) as job:

        class Watcher(Striker):
            def on_stage(self, step: int, stage: str, seconds: float | None) -> None:
                if (step, stage, seconds) == (3, "generate", None):
                    in_time.append(moved.wait(100))
                if stage == "move" and seconds is not None:
                    moved.set()

        job.listener = Watcher(lambda step, stage: None)
        run_steps(job)
    records = read_records(job.log.path)
    assert in_time == [True]
    assert [done.outcome for done in read_transitions(job.config.run_folder)] == ["commit"]
    assert [drawn(record) for record in records] == [drawn(record) for record in still]
    assert [record.version for record in records] == [record.version for record in still]
    # Another layout sums in another order; everything else is the same.
    assert [r.stats["loss/actor"] for r in records] == pytest.approx(
        [r.stats["loss/actor"] for r in still], abs=1e-4
    )


@pytest.mark.slow
def test_generation_moves_between_two_batches(make_config: Make) -> None:
    change = {
        "before_step": 2,
        "plan": {"actor_training": {"tp": 2}, "actor_generation": {"tp": 2, "gpus": [2, 3]}},
    }
    moved = campaign(make_config(name="moved", asynchrony=ONE_OFF, changes=[change], **APART))
    records = read_records(moved.metrics)
    assert [done.outcome for done in read_transitions(moved.run_folder)] == ["commit"]
    assert [record.version for record in records] == [0, 0, 1, 2, 3]
    assert records[-1].plan["actor.generation"] == "tp2 pp1 dp1 on 2,3"
