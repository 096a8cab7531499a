"""Campaigns in fp16, whose loss scale is part of the logical state, and gradients that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from nereus.algorithms.loss_scale import FIRST, LossScale
from nereus.config import CampaignConfig
from nereus.emu.batch import TrainBatch
from nereus.flows.campaign import campaign
from nereus.flows.post_training import run_steps
from nereus.record.metrics import read_records
from nereus.record.transitions import read_transitions
from nereus.tasks import learn
from nereus.tasks.job import open_job
from nereus.tasks.prepare import prepare_campaign
from nereus.tasks.stages import TRAINING
from tests.flows.test_campaign import Watcher

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
Make = Callable[..., CampaignConfig]


@pytest.mark.slow
def test_fp16_follows_fp32_through_a_transition(make_config: Make, model_folder: str) -> None:
    def run(name: str, precision: str) -> CampaignConfig:
        plan = {"actor_training": {"tp": 1, "dp": 2}, "actor_generation": {"tp": 1, "dp": 2}}
        config = make_config(
            name=name,
            steps=2,
            models={"actor": str(model_folder), "precision": precision},
            changes=[{"before_step": 1, "plan": plan}],
        )
        campaign(config)
        return config

    half, exact = run("half", "fp16"), run("exact", "fp32")
    found, wanted = (read_records(config.run_folder / "metrics.jsonl") for config in (half, exact))
    assert [record.stats["loss_scale/actor"] for record in found] == [FIRST, FIRST]
    assert "loss_scale/actor" not in wanted[0].stats
    assert [record.outcome for record in read_transitions(half.run_folder)] == ["commit"]
    assert found[0].stats["gradient_norm/actor"] == pytest.approx(
        wanted[0].stats["gradient_norm/actor"], rel=0.2
    )


@pytest.mark.slow
def test_an_overflow_is_tried_again_with_half_the_scale_which_checkpoints_keep(
    make_config: Make, model_folder: str
) -> None:
    models = {"actor": str(model_folder), "precision": "fp16"}
    config = make_config(
        name="large", steps=2, models=models, plan={"actor_training": {"tp": 2}}, tracking="step"
    )
    with open_job(prepare_campaign(config), resume=False) as job:
        job.state = replace(job.state, loss_scales={TRAINING: LossScale(2.0**40)})
        run_steps(job)
        last = job.state.loss_scales[TRAINING]
    records = read_records(job.log.path)
    used = [record.stats["loss_scale/actor"] for record in records]
    assert used[1] == used[0] == last.value < 2.0**40
    assert last.num_steps == 2
    assert [record.version for record in records] == [0, 1]
    longer = config.model_copy(update={"steps": 3})
    with open_job(prepare_campaign(longer), resume=True) as again:
        assert again.state.loss_scales == {TRAINING: last}


def test_an_update_whose_gradient_is_not_finite_is_left_out_and_told(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = learn.cut_batch

    def poisoned(batch: TrainBatch, rows: object) -> TrainBatch:
        part = cut(batch, rows)  # type: ignore[arg-type]
        assert part.advantages_bt is not None
        return replace(part, advantages_bt=torch.full_like(part.advantages_bt, torch.nan))

    batch = {"prompts": 4, "samples": 4, "mini_batches": 2}
    config = make_config(name="poisoned", steps=3, batch=batch, tracking="step")
    told: list[str] = []

    class Ear(Watcher):
        def on_stage(self, step: int, stage: str, seconds: float | None) -> None:
            monkeypatch.setattr(learn, "cut_batch", poisoned if step == 1 else cut)

        def on_message(self, text: str) -> None:
            told.append(text)

    with open_job(prepare_campaign(config), resume=False) as job:
        job.listener = Ear()
        run_steps(job)
        assert job.adam_steps[TRAINING] == 6
    assert any("step 1: 2 of 2 updates of actor.training left out" in text for text in told)
    records = read_records(job.log.path)
    assert all(record.reward_mean is not None for record in records)
    losses = [record.stats["gradient_norm/actor"] for record in records]
    assert [bool(torch.tensor(loss).isfinite()) for loss in losses] == [True, False, True]
