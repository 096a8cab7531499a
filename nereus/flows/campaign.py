"""The flow `campaign`, which deployments point to; `post_training` is what it does.

Importing it is cheap: to end a cancelled run Prefect imports it once more, in a process of its own, before
the run counts as cancelled.
"""

from __future__ import annotations

import atexit
import gc
import sys
from dataclasses import dataclass
from pathlib import Path

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from nereus.config import CampaignConfig

MAX_CONCURRENT = 8


@atexit.register
def end_soon() -> None:
    """Spare the end of the process its collections of garbage over all that the libraries hold, a second or
    two, for which a cancelled run would wait.
    """
    if "triton" not in sys.modules:  # nanobind, with which it is built, reports what is left uncollected
        gc.freeze()


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignResult:
    """Where a finished campaign left its things."""

    steps: int
    run_folder: Path
    model: Path
    checkpoint: Path
    metrics: Path
    report: Path


@flow(
    name="campaign",
    flow_run_name="{config.name}",
    task_runner=ThreadPoolTaskRunner(max_workers=MAX_CONCURRENT),  # type: ignore[arg-type]
)
def campaign(
    config: CampaignConfig, resume: bool = False, continuing: bool = False, max_steps: int | None = None
) -> CampaignResult:
    """Post-train the actor for `config.steps` steps.

    Args:
        config: The whole campaign: models, prompts, reward, algorithm, batch, parallelism, cluster.
        resume: Continue from the run's newest checkpoint instead of starting anew.
        continuing: Continue from the newest checkpoint if there is one, else start anew: for schedules. A
            flow run that is run again after a crash does so in any case.
        max_steps: End after so many steps with a checkpoint, from which the next run continues.

    Raises ConfigError, ModelError, DataError or CheckpointError before any actor starts; StageFailed or
    WorkerLost from a step, whose effects are then in no checkpoint.
    """
    from nereus.flows.post_training import post_train

    return post_train(config, resume=resume, continuing=continuing, max_steps=max_steps)
