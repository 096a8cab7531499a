"""The growing record of a run: metrics.jsonl (one step a line), mirrored to the loggers that are asked for.

The file holds every step once, in order, through crashes and resumes: a resumed run drops the records at or
beyond the step it resumes from, and appending a step that is already there is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from nereus.config import LoggerKind
from nereus.errors import DataError, explain
from nereus.record.loggers import LoggedRun, open_logger
from nereus.record.step import StepRecord, from_json, to_json

METRICS_FILE = "metrics.jsonl"


def read_records(path: Path) -> list[StepRecord]:
    """The records of a metrics.jsonl, in order; empty when there is no file.

    A last line without its line break was cut off by a crash and is left out. Raises DataError, naming the
    line, when another line is not a record or steps do not rise.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    records: list[StepRecord] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = from_json(line)
        except DataError as error:
            raise DataError(f"{path}:{number}: {error}") from error
        if records and record.step <= records[-1].step:
            raise DataError(
                explain(
                    f"cannot read {path}:{number}",
                    values=f"step {record.step} after step {records[-1].step}",
                    rule="steps rise from line to line",
                )
            )
        records.append(record)
    return records


def truncate_records(path: Path, first_step: int) -> list[StepRecord]:
    """Drop the records of `path` at or beyond `first_step`, atomically; return those that stay.

    A crash leaves the old file or the new one, never a part.
    """
    kept = [record for record in read_records(path) if record.step < first_step]
    draft = path.with_suffix(".draft")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(f"{to_json(record)}\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    return kept


def scalars(record: StepRecord) -> Iterator[tuple[str, float]]:
    """The record as (tag, value) pairs; absent values are left out."""
    single: Mapping[str, float | None] = {
        "reward/mean": record.reward_mean,
        "reward/min": record.reward_min,
        "reward/max": record.reward_max,
        "reward/missing": record.num_missing_rewards,
        "length/mean": record.length_mean,
        "length/p95": record.length_p95,
        "length/max": record.length_max,
        "time/step_s": record.step_s,
        "time/overhead_s": record.overhead_s,
        "throughput/tokens_per_s": record.tokens_per_s,
        "throughput/response_tokens": record.response_tokens,
        "optimizer/learning_rate": record.learning_rate,
        "data/epoch": record.epoch,
    }
    yield from ((tag, value) for tag, value in single.items() if value is not None)
    yield from ((f"time/{stage}_s", value) for stage, value in record.stage_s.items())
    yield from ((f"memory/{worker}_gib", value / 2**30) for worker, value in record.memory_bytes.items())
    yield from ((f"train/{name}", value) for name, value in record.stats.items())


class MetricsLog:
    """Appends records to `<folder>/metrics.jsonl`, and mirrors them. One writer at a time."""

    def __init__(
        self,
        folder: Path,
        *,
        first_step: int = 0,
        loggers: Sequence[LoggerKind] = (LoggerKind.tensorboard,),
        name: str = "campaign",
        config: Mapping[str, object] | None = None,
    ) -> None:
        """Open for the steps from `first_step` on: earlier records stay, the others are dropped. `name` and
        `config` are what loggers show of the run. Raises ConfigError for one that is not installed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS_FILE
        self._open(first_step)
        run = LoggedRun(name=name, folder=folder, first_step=first_step, config=config or {})
        self._loggers = [open_logger(kind, run) for kind in loggers]

    def _open(self, first_step: int) -> None:
        self.records = truncate_records(self.path, first_step)
        """Every record of the run so far, in order."""
        self._file = self.path.open("a", encoding="utf-8")
        self._plan: Mapping[str, str] = self.records[-1].plan if self.records else {}

    def append(self, record: StepRecord) -> None:
        """Write one step and flush it. Raises DataError when the step is already there."""
        if self.records and record.step <= self.records[-1].step:
            raise DataError(
                explain(
                    f"cannot append step {record.step} to {self.path}",
                    values=f"its last step is {self.records[-1].step}",
                    rule="a step is recorded once",
                )
            )
        self._file.write(to_json(record) + "\n")
        self._file.flush()
        self.records.append(record)
        if record.plan != self._plan:
            lines = "\n".join(f"- {stage}: {where}" for stage, where in record.plan.items())
            for logger in self._loggers:
                logger.text("plan", lines, record.step)
            self._plan = record.plan
        self.mirror(dict(scalars(record)), record.step)

    def mirror(self, values: Mapping[str, float], step: int) -> None:
        """Show values by tag in the loggers; they stand in a file of their own."""
        for logger in self._loggers:
            logger.scalars(values, step)

    def rewind(self, first_step: int) -> None:
        """Go back to a step: the records at or beyond it are dropped, and it is written next."""
        self._file.close()
        self._open(first_step)
        for logger in self._loggers:
            logger.rewind(first_step)

    def close(self) -> None:
        """Close the file and the loggers; the log takes no further records."""
        self._file.close()
        for logger in self._loggers:
            logger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
