"""A run's numbers as TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from nereus.record.loggers import LoggedRun

TENSORBOARD_FOLDER = "tensorboard"


class TensorboardLogger:
    """Writes to `<run folder>/tensorboard`. Readers drop points that come again after a rewind."""

    def __init__(self, run: LoggedRun) -> None:
        self._folder = str(run.folder / TENSORBOARD_FOLDER)
        self._writer = SummaryWriter(self._folder, purge_step=run.first_step)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """See `Logger`."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def text(self, tag: str, markdown: str, step: int) -> None:
        """See `Logger`."""
        self._writer.add_text(tag, markdown, step)

    def rewind(self, first_step: int) -> None:
        """See `Logger`."""
        self._writer.close()
        self._writer = SummaryWriter(self._folder, purge_step=first_step)

    def close(self) -> None:
        """See `Logger`."""
        self._writer.close()
