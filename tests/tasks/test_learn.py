"""An optimizer step under a loss scale, and the metrics of steps of which some changed nothing."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from nereus.algorithms.loss_scale import FIRST, LossScale
from nereus.emu.batch import TrainMetrics
from nereus.tasks.job import CampaignState
from nereus.tasks.learn import _scaled, mean_metrics
from nereus.tasks.stages import CRITIC, TRAINING


def metrics(norm: float, loss: float = 1.0) -> TrainMetrics:
    seconds = {"reduce": 0.5, **({"optimizer": 0.25} if math.isfinite(norm) else {})}
    return TrainMetrics(loss=loss, gradient_norm=norm, learning_rate=0.1, stats={"kl": loss}, seconds=seconds)


def test_a_step_is_tried_until_its_gradient_is_finite_and_the_scale_is_kept() -> None:
    job: Any = SimpleNamespace(state=CampaignState(loss_scales={CRITIC: LossScale(8.0)}))
    tried: list[float] = []

    def take(loss_scale: float) -> TrainMetrics:
        tried.append(loss_scale)
        return metrics(math.inf if loss_scale > FIRST / 4 else 3.0)

    found = _scaled(job, TRAINING, take)
    assert tried == [FIRST, FIRST / 2, FIRST / 4]
    assert found.stats == {"kl": 1.0, "loss_scale": FIRST / 4}
    assert job.state.loss_scales == {CRITIC: LossScale(8.0), TRAINING: LossScale(FIRST / 4, 1)}
    assert _scaled(job, TRAINING, take).stats["loss_scale"] == FIRST / 4, "the next step begins there"


def test_a_gradient_that_no_scale_saves_ends_the_tries_at_one() -> None:
    job: Any = SimpleNamespace(state=CampaignState(loss_scales={TRAINING: LossScale(4.0)}))
    tried: list[float] = []

    def take(loss_scale: float) -> TrainMetrics:
        tried.append(loss_scale)
        return metrics(math.nan)

    assert not _scaled(job, TRAINING, take).updated
    assert tried == [4.0, 2.0, 1.0]


def test_means_are_those_of_the_steps_that_changed_something() -> None:
    found = mean_metrics([metrics(2.0, 1.0), metrics(math.nan, math.nan), metrics(4.0, 3.0)])
    assert (found.loss, found.gradient_norm, found.stats) == (2.0, 3.0, {"kl": 2.0})
    assert found.seconds == pytest.approx({"reduce": 1.5, "optimizer": 0.5}), "all of them took their time"
    assert not mean_metrics([metrics(math.nan)]).updated
