"""The seam of places that show a run's numbers: what they are given, and which there are.

The run's own files are the record; these mirror it. A package that is not installed is an error before
anything is started, with the command that installs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from nereus.config import LoggerKind
from nereus.errors import ConfigError, explain


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """What a logger is told of the run."""

    name: str
    folder: Path
    """The run folder; loggers write below it and nowhere else."""
    first_step: int = 0
    """The step from which the run goes on: points at or beyond it are of an earlier try."""
    config: Mapping[str, object] = field(default_factory=dict)


class Logger(Protocol):
    """Shows numbers of one run."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Show these values, by tag, at a step."""
        ...

    def text(self, tag: str, markdown: str, step: int) -> None:
        """Show a text at a step, where the place can."""
        ...

    def rewind(self, first_step: int) -> None:
        """The run goes back: points at or beyond this step come again."""
        ...

    def close(self) -> None:
        """Write what is left; no further calls."""
        ...


def check_installed(kinds: Sequence[LoggerKind]) -> None:
    """Raises ConfigError for a logger whose package is absent."""
    for kind in kinds:
        if find_spec(kind.value) is None:
            raise ConfigError(
                explain(
                    f"cannot log to {kind.value}",
                    values=f"the package {kind.value} is not installed",
                    remedy=f"pip install 'nereus-rl[{kind.value}]', or leave it out of loggers",
                )
            )


def open_logger(kind: LoggerKind, run: LoggedRun) -> Logger:
    """Start showing the run there. The package is imported only now."""
    check_installed([kind])
    match kind:
        case LoggerKind.tensorboard:
            from nereus.record.tensorboard_logger import TensorboardLogger

            return TensorboardLogger(run)
        case LoggerKind.wandb:
            from nereus.record.wandb_logger import WandbLogger

            return WandbLogger(run)
        case LoggerKind.mlflow:
            from nereus.record.mlflow_logger import MlflowLogger

            return MlflowLogger(run)
