"""A run's numbers as an offline run of Weights & Biases; `wandb sync` sends it, when the user wants that."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import wandb

from nereus.record.loggers import LoggedRun

STEP = "step"


class WandbLogger:
    """Writes to `<run folder>/wandb` and sends nothing. A resumed run carries on under the same id.

    The step is a value of its own: W&B's counter can't go back, and drops what comes with a smaller one.
    """

    def __init__(self, run: LoggedRun) -> None:
        self._run = wandb.init(
            project="nereus",
            name=run.name,
            id=hashlib.sha256(str(run.folder).encode()).hexdigest()[:16],
            dir=str(run.folder),
            config=dict(run.config),
            mode="offline",
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """See `Logger`."""
        self._run.log({**{tag: value for tag, value in values.items() if math.isfinite(value)}, STEP: step})

    def text(self, tag: str, markdown: str, step: int) -> None:
        """As a summary: W&B has no texts over steps."""
        self._run.summary[tag] = markdown

    def rewind(self, first_step: int) -> None:
        """Points come again under their step; the last one counts."""

    def close(self) -> None:
        """See `Logger`."""
        self._run.finish()
