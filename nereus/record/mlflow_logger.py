"""A run's numbers in an MLflow store of its own.

To see it: `mlflow ui --backend-store-uri sqlite:///<run folder>/mlflow.db`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from nereus.record.loggers import LoggedRun

STORE_FILE = "mlflow.db"
MAX_BATCH = 1000  # metrics in one call, by MLflow's rule
MAX_PARAM = 6000  # characters, likewise
NOT_ALLOWED = re.compile(r"[^\w\-. :/]")


class MlflowLogger:
    """Writes to `<run folder>/mlflow.db`. A resumed run carries on the run that it finds there."""

    def __init__(self, run: LoggedRun) -> None:
        self._client = MlflowClient(tracking_uri=f"sqlite:///{run.folder / STORE_FILE}")
        experiment = self._client.get_experiment_by_name(run.name)
        if experiment is None:
            place = (run.folder / "mlflow").as_uri()
            self._experiment = self._client.create_experiment(run.name, artifact_location=place)
        else:
            self._experiment = experiment.experiment_id
        self._run = self._found() or self._made(run)

    def _found(self) -> str | None:
        runs = self._client.search_runs([self._experiment], max_results=1)
        if not runs:
            return None
        run_id: str = runs[0].info.run_id
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _made(self, run: LoggedRun) -> str:
        run_id: str = self._client.create_run(self._experiment, run_name=run.name).info.run_id
        params = [Param(name, str(value)[:MAX_PARAM]) for name, value in run.config.items()]
        self._client.log_batch(run_id, params=params)
        return run_id

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """See `Logger`."""
        now_ms = int(time.time() * 1000)
        metrics = [
            Metric(NOT_ALLOWED.sub("_", tag), float(value), now_ms, step)
            for tag, value in values.items()
            if math.isfinite(value)
        ]
        for at in range(0, len(metrics), MAX_BATCH):
            self._client.log_batch(self._run, metrics=metrics[at : at + MAX_BATCH])

    def text(self, tag: str, markdown: str, step: int) -> None:
        """As a tag: MLflow has no texts over steps."""
        self._client.set_tag(self._run, NOT_ALLOWED.sub("_", tag), markdown)

    def rewind(self, first_step: int) -> None:
        """Points come again under their step; MLflow shows both."""

    def close(self) -> None:
        """See `Logger`."""
        self._client.set_terminated(self._run)
