"""`nereus run` around the flow: what it shows, keeps and exits with. The flow itself is a stand-in here."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from nereus.cli import run as command
from nereus.cli.app import main
from nereus.config import CampaignConfig
from nereus.errors import Cancelled, CheckpointError, StageFailed, WorkerLost
from nereus.record.listener import NullListener, current_listener
from nereus.record.metrics import METRICS_FILE
from nereus.record.report import write_report
from nereus.record.step import to_json
from tests.record.records import make_record

Run = Callable[..., tuple[object, str, str]]


@dataclass
class StandIn:
    """Does a campaign's visible work: `num_steps` steps, then the outcome."""

    num_steps: int = 3
    outcome: BaseException | None = None
    resumed: bool = False
    config: CampaignConfig | None = None

    def __call__(self, config: CampaignConfig, progress: object, *, resume: bool) -> Path:
        self.config, self.resumed = config, resume
        folder = config.run_folder
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / METRICS_FILE).open("w") as file:
            for step in range(self.num_steps):
                file.write(to_json(make_record(step)) + "\n")
                current_listener.get().on_step(make_record(step))
        if self.outcome is not None:
            raise self.outcome
        write_report(folder, config)
        return folder / "model"


@pytest.fixture
def flow(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(command, "_campaign", stand_in)
    return stand_in


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    path = tmp_path / "a.yaml"
    path.write_text(
        "name: a\nsteps: 3\nmodels: {actor: model}\nprompts: {source: {kind: file, path: p}}\n"
        'reward: {kind: python, function: "r.py:f"}\n'
    )
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["run", "a.yaml", *arguments])
        told = capsys.readouterr()
        return ended.value.code, told.out, told.err

    return call


def test_a_finished_run_tells_where_its_results_are(flow: StandIn, run: Run, tmp_path: Path) -> None:
    code, out, _ = run()
    assert code == 0
    assert "step 3/3" in out
    assert "0.5 → 2.5" in out
    for name in ("model", "report.html", METRICS_FILE):
        assert str(tmp_path / "runs" / "a" / name) in out
    assert isinstance(current_listener.get(), NullListener), "the listener is taken away again"


def test_options_and_overrides_reach_the_flow(flow: StandIn, run: Run) -> None:
    run("seed=7", "--resume", "--tracking", "step")
    assert flow.config is not None
    assert (flow.config.seed, flow.config.tracking.value, flow.resumed) == (7, "step", True)


def test_quiet_shows_nothing_but_errors(flow: StandIn, run: Run) -> None:
    assert run("--quiet") == (0, "", "")
    flow.outcome = StageFailed("learn failed")
    assert "learn failed" in run("--quiet")[2]


@pytest.mark.parametrize(
    "outcome", [StageFailed("generate failed"), WorkerLost("worker 3 died"), ValueError("odd")]
)
def test_a_failed_run_ends_with_1_and_keeps_report_and_traceback(
    flow: StandIn, run: Run, tmp_path: Path, outcome: Exception
) -> None:
    flow.outcome = outcome
    code, _, err = run("seed=7")
    folder = tmp_path / "runs" / "a"
    assert code == 1
    assert str(outcome) in err
    assert "Traceback" not in err
    assert "3 of 3 steps" in (folder / "report.html").read_text()
    assert type(outcome).__name__ in (folder / "traceback.txt").read_text()
    assert "There is no checkpoint yet" in err


def test_traceback_is_shown_on_request(flow: StandIn, run: Run) -> None:
    flow.outcome = StageFailed("generate failed")
    assert "Traceback (most recent call last)" in run("--traceback")[2]


@pytest.mark.parametrize("outcome", [KeyboardInterrupt(), Cancelled("stopped")], ids=["ctrl-c", "cancelled"])
def test_an_interrupted_run_ends_with_130_and_says_how_to_continue(
    flow: StandIn, run: Run, tmp_path: Path, outcome: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "runs" / "a" / "checkpoints" / "step-000002"
    monkeypatch.setattr("nereus.emu.checkpoint.folder.latest", lambda root: saved)
    flow.outcome = outcome
    code, _, err = run("plan.actor_training={tp: 1}")
    assert code == 130
    assert "interrupted" in err
    assert f"checkpoint: {saved}" in err
    assert "nereus run a.yaml 'plan.actor_training={tp: 1}' --resume" in err


def test_sigterm_is_an_interruption(flow: StandIn, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminated(StandIn):
        def __call__(self, config: CampaignConfig, progress: object, *, resume: bool) -> Path:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().__call__(config, progress, resume=resume)

    monkeypatch.setattr(command, "_campaign", Terminated())
    before = signal.getsignal(signal.SIGTERM)
    assert run()[0] == 130
    assert signal.getsignal(signal.SIGTERM) == before


def test_bad_input_found_by_the_flow_ends_with_2(flow: StandIn, run: Run) -> None:
    flow.outcome = CheckpointError("cannot resume: there is no checkpoint")
    code, _, err = run("--resume")
    assert code == 2
    assert "cannot resume" in err
    assert "traceback" not in err
