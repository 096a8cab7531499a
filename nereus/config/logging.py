"""Where a run's numbers are mirrored to, beside its own files."""

from __future__ import annotations

from enum import StrEnum


class LoggerKind(StrEnum):
    """A place that shows numbers of runs."""

    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"
