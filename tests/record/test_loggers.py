"""What each logger is told, by clients that only keep it; and the real ones where they are installed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nereus.config import LoggerKind
from nereus.errors import ConfigError
from nereus.record.loggers import LoggedRun, check_installed, open_logger
from nereus.record.metrics import MetricsLog
from tests.record.records import make_record


class Kept:
    """Answers every method call with another of its kind, and keeps names and arguments."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]], path: str = "") -> None:
        self.calls, self.path = calls, path
        self.summary: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((f"{self.path}{name}", args, kwargs))
            return Kept(self.calls, f"{self.path}{name}.")

        return call


@pytest.fixture
def fake_wandb(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[tuple[str, tuple[Any, ...], dict[str, Any]]]]:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    module = ModuleType("wandb")
    module.__dict__.update(
        init=Kept(calls).init, Settings=lambda **values: values, __spec__=SimpleNamespace(name="wandb")
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delitem(sys.modules, "nereus.record.wandb_logger", raising=False)
    yield calls
    sys.modules.pop("nereus.record.wandb_logger", None)


class FakeMlflow:
    """The few methods of `MlflowClient` that are used, on a list of runs that outlives a client."""

    runs: list[str] = []  # noqa: RUF012
    metrics: list[tuple[str, str, float, int]] = []  # noqa: RUF012
    params: dict[str, str] = {}  # noqa: RUF012
    tags: dict[str, str] = {}  # noqa: RUF012
    status: str = ""
    uri: str = ""

    def __init__(self, tracking_uri: str) -> None:
        type(self).uri = tracking_uri

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7") if self.runs else None

    def create_experiment(self, name: str, artifact_location: str) -> str:
        return "7"

    def search_runs(self, experiments: list[str], max_results: int) -> list[Any]:
        assert experiments == ["7"]
        return [SimpleNamespace(info=SimpleNamespace(run_id=run)) for run in self.runs[-max_results:]]

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.runs.append(run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

    def update_run(self, run: str, status: str) -> None:
        type(self).status = status

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(metrics) <= 1000
        self.metrics.extend((run, *metric) for metric in metrics)
        self.params.update(params)

    def set_tag(self, run: str, name: str, value: str) -> None:
        self.tags[name] = value

    def set_terminated(self, run: str) -> None:
        type(self).status = "FINISHED"


@pytest.fixture
def fake_mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeMlflow]]:
    class Fake(FakeMlflow):
        runs: list[str] = []  # noqa: RUF012
        metrics: list[tuple[str, str, float, int]] = []  # noqa: RUF012
        params: dict[str, str] = {}  # noqa: RUF012
        tags: dict[str, str] = {}  # noqa: RUF012

    package, entities, tracking = (ModuleType(f"mlflow{end}") for end in ("", ".entities", ".tracking"))
    package.__dict__["__spec__"] = SimpleNamespace(name="mlflow")
    entities.__dict__.update(
        Metric=lambda key, value, timestamp, step: (key, value, step), Param=lambda key, value: (key, value)
    )
    tracking.__dict__.update(MlflowClient=Fake)
    for module in (package, entities, tracking):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "nereus.record.mlflow_logger", raising=False)
    yield Fake
    sys.modules.pop("nereus.record.mlflow_logger", None)


def logged_run(folder: Path) -> LoggedRun:
    return LoggedRun(name="run", folder=folder, config={"seed": 3, "models": {"actor": "a"}})


def test_wandb_is_offline_in_the_run_folder_and_steps_may_go_back(
    fake_wandb: list[tuple[str, tuple[Any, ...], dict[str, Any]]], tmp_path: Path
) -> None:
    logger = open_logger(LoggerKind.wandb, logged_run(tmp_path))
    logger.scalars({"reward/mean": 0.5, "loss": math.nan}, 4)
    logger.rewind(2)
    logger.scalars({"reward/mean": 0.25}, 2)
    logger.close()
    (init, _, how), *calls = fake_wandb
    assert init == "init"
    assert (how["mode"], how["dir"], how["resume"], how["name"]) == ("offline", str(tmp_path), "allow", "run")
    assert how["config"] == {"seed": 3, "models": {"actor": "a"}}
    again = open_logger(LoggerKind.wandb, logged_run(tmp_path))
    assert fake_wandb[len(calls) + 1][2]["id"] == how["id"]  # a resumed run is the same one
    again.close()
    told = [(args[0], kwargs) for name, args, kwargs in calls if name == "init.log"]
    assert told == [({"reward/mean": 0.5, "step": 4}, {}), ({"reward/mean": 0.25, "step": 2}, {})]
    assert ("init.define_metric", ("*",), {"step_metric": "step"}) in calls
    assert calls[-1][0] == "init.finish"


def test_mlflow_keeps_a_store_in_the_run_folder_and_carries_on_in_it(
    fake_mlflow: type[FakeMlflow], tmp_path: Path
) -> None:
    logger = open_logger(LoggerKind.mlflow, logged_run(tmp_path))
    assert fake_mlflow.uri == f"sqlite:///{tmp_path}/mlflow.db"
    logger.scalars({f"a/{n}": float(n) for n in range(1500)} | {"p@1": 1.0, "nan": math.nan}, 4)
    logger.text("plan", "- a", 4)
    logger.close()
    assert len(fake_mlflow.metrics) == 1501
    assert ("run", "p_1", 1.0, 4) in fake_mlflow.metrics
    assert fake_mlflow.params == {"seed": "3", "models": "{'actor': 'a'}"}
    assert fake_mlflow.tags == {"plan": "- a"}
    assert fake_mlflow.status == "FINISHED"
    open_logger(LoggerKind.mlflow, logged_run(tmp_path))
    assert fake_mlflow.runs == ["run"]
    assert fake_mlflow.status == "RUNNING"


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_is_an_error_with_its_remedy(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nereus.record.loggers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"{kind} is not installed.*pip install 'nereus-rl\[{kind}\]'"):
        check_installed([LoggerKind(kind)])


def test_a_log_without_loggers_writes_only_its_file(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, loggers=()) as log:
        log.append(make_record(0))
        log.mirror({"evaluation/reward_mean": 1.0}, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_importing_the_metrics_loads_no_logger() -> None:
    import subprocess

    program = "import sys, nereus.record.metrics; print({'torch', 'wandb', 'mlflow'} & set(sys.modules))"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_itself_writes_an_offline_run(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, loggers=[LoggerKind.wandb], name="run", config={"seed": 3}) as log:
        log.append(make_record(0))
        log.append(make_record(1))
        log.rewind(1)
        log.append(make_record(1))
    (stored,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"reward/mean" in stored.read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_itself_keeps_every_step_through_a_resume(tmp_path: Path) -> None:
    for first_step in (0, 1):
        with MetricsLog(tmp_path, first_step=first_step, loggers=[LoggerKind.mlflow], name="run") as log:
            log.append(make_record(first_step))
            log.append(make_record(first_step + 1))
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("run")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert {point.step: point.value for point in history} == {0: 0.5, 1: 1.5, 2: 2.5}
    assert run.info.status == "FINISHED"
