"""A campaign that a worker of a real Prefect server runs is cancelled in every stage, or loses its processes.

The campaign stands still in the wanted stage because its Ray workers are frozen there: whatever a stop needs,
it may not need them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL
from prefect.states import AwaitingRetry

from nereus.cli import intervene as command
from nereus.config import CampaignConfig
from nereus.flows.campaign import campaign
from nereus.record.metrics import read_records
from tests.flows.conftest import COUNT
from tests.flows.databases import on_both_databases, on_postgres
from tests.flows.held_prompts import FIRST_STAGES
from tests.flows.test_deploy import post, put, state_of, wait_for, worker  # noqa: F401

pytestmark = [pytest.mark.usefixtures("server"), pytest.mark.slow, pytest.mark.timeout(1500)]
MakeConfig = Callable[..., CampaignConfig]
StartWorker = Callable[[], "subprocess.Popen[bytes]"]

HELD = Path(__file__).with_name("held_prompts.py")
CHANGE = {"before_step": 1, "plan": {"actor_training": {"tp": 1, "dp": 2}, "actor_generation": {"tp": 2}}}
ENDED = {"Completed", "Failed", "Crashed", "Cancelled"}
CANCEL_S = 10.0


def busyness() -> float:
    """How many times longer things take here than on a machine that does nothing else."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Held:
    """A campaign in a worker of the server, which stands still in `stage` of `step`."""

    def __init__(
        self,
        make_config: MakeConfig,
        tmp_path: Path,
        stage: str,
        step: int,
        *,
        slow_s: float = 0.0,
        **parts: Any,
    ) -> None:
        self.marker, self.stage = tmp_path / "held", stage
        arguments = {"marker": str(self.marker), "stage": stage, "step": step, "slow_s": slow_s}
        source = {"kind": "python", "function": f"{HELD}:prompts", "arguments": arguments}
        self.config = make_config(name=f"held-{stage.replace(' ', '-')}", prompts={"source": source}, **parts)
        put()
        with get_client(sync_client=True) as client:
            self.deployment = client.read_deployment_by_name("campaign/campaign").id

    def start(self) -> str:
        """Start the run over REST; returns its id."""
        parameters = {"config": self.config.model_dump(mode="json")}
        run: str = post(f"/deployments/{self.deployment}/create_flow_run", {"parameters": parameters})["id"]
        return run

    def wait(self, run: str) -> tuple[int, list[int]]:
        """Wait until it stands still; the pids of the flow's process and of its Ray workers."""
        end = time.monotonic() + 60 * busyness()
        while not self.marker.exists() or not self.marker.read_text():
            assert state_of(run) not in ENDED, f"{state_of(run)} before it stood still"
            assert time.monotonic() < end, f"{state_of(run)}, but not at its stage"
            time.sleep(0.2)
        flow, *workers = map(int, self.marker.read_text().split())
        assert workers or self.stage in FIRST_STAGES
        return flow, workers

    def check_nothing_is_left(self, pids: list[int], *, limit_s: float) -> None:
        """Every process of the job ends, frozen workers and Ray's own included."""
        _, alive = psutil.wait_procs(living(pids), timeout=limit_s)
        assert not alive, [" ".join(process.cmdline())[:80] for process in alive]

    def steps(self) -> list[int]:
        path = self.config.run_folder / "metrics.jsonl"
        return [record.step for record in read_records(path)] if path.exists() else []


def living(pids: list[int]) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def family(pid: int) -> list[int]:
    """The process and all that it started: Ray's store, its head, its workers, the reward's processes."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


KL = {"kind": "grpo", "kl": {"coefficient": 0.01}}
PPO = {"kind": "ppo"}
CORRECTED = {"kind": "grpo", "correction": {"high": 2.0}}
HELD_OUT = {
    "kind": "python",
    "function": f"{COUNT / 'prompts.py'}:prompts",
    "arguments": {"num_prompts": 3},
}
APART = {
    "asynchrony": {"staleness": 1},
    "changes": [],
    "cluster": {"gpus": 3, "device": "cpu", "timeout_s": 60},
    "plan": {"actor_training": {"tp": 2}, "actor_generation": {"gpus": [2]}},
}
ENDLESS = "import time\ndef reward(response):\n    time.sleep(3600)\n"


STAGES = {
    "wait": ("wait", 0, {"cluster": {"gpus": 2, "device": "cpu", "gpu_limit": "taken"}}),
    "start": ("start", 0, {}),
    "generate": ("generate", 1, {}),
    "reference": ("score reference", 1, {"algorithm": KL}),
    "policy": ("score policy", 1, {"algorithm": CORRECTED}),
    "values": ("score values", 1, {"algorithm": PPO}),
    "rewards": ("score rewards", 0, {}),
    "critic": ("learn critic.training", 1, {"algorithm": PPO}),
    "actor": ("learn actor.training", 1, {}),
    "publish": ("publish", 1, {}),
    "move": ("move", 1, {}),
    "rebuild": ("rebuild", 1, {}),
    "checkpoint": ("checkpoint", 2, {}),
    "evaluate": ("evaluate", 1, {"evaluation": {"source": HELD_OUT, "every_steps": 1}}),
    "generate-ahead": ("generate", 2, APART),
    "learn-while-ahead": ("learn actor.training", 1, APART),
}


@pytest.mark.parametrize("case", list(STAGES))
def test_a_campaign_that_is_cancelled_ends_cancelled_in_ten_seconds_whatever_stage_runs(
    make_config: MakeConfig,
    tmp_path: Path,
    worker: StartWorker,  # noqa: F811
    case: str,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("cancelled_s", cancelled_s(make_config, tmp_path, worker, case))


@on_postgres
@pytest.mark.parametrize("case", ["wait", "generate", "move"])
def test_so_it_does_on_postgres(
    make_config: MakeConfig,
    tmp_path: Path,
    worker: StartWorker,  # noqa: F811
    case: str,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("cancelled_s", cancelled_s(make_config, tmp_path, worker, case))


def cancelled_s(make_config: MakeConfig, tmp_path: Path, start_worker: StartWorker, case: str) -> float:
    """Cancel a campaign that stands in a stage, and check how it ends; the seconds that took."""
    stage, step, parts = STAGES[case]
    parts = {"steps": 4, "changes": [CHANGE]} | parts
    if stage == "score rewards":  # computed by processes of their own, which freeze no less
        (tmp_path / "endless.py").write_text(ENDLESS)
        function = f"{tmp_path / 'endless.py'}:reward"
        parts["reward"] = {"kind": "python", "function": function, "timeout_s": 3600}
    if stage == "wait":
        with get_client(sync_client=True) as client:
            client.upsert_global_concurrency_limit_by_name("taken", 2)
            client.increment_concurrency_slots(["taken"], 2, "concurrency")
    held = Held(make_config, tmp_path, stage, step, **parts)
    run = held.start()
    start_worker()
    flow, _ = held.wait(run)
    pids = family(flow)
    began, allowed_s = time.monotonic(), CANCEL_S * busyness()
    post(f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    final = wait_for(run, ENDED, limit_s=allowed_s)
    took_s = time.monotonic() - began
    orderly = Path(f"{held.marker}.ended").exists()
    how = "in good order" if orderly else "by force"
    print(f"\n{case}: {final} after {took_s:.1f} s {how}, at {busyness():.1f} times the load")
    assert final == "Cancelled"
    held.check_nothing_is_left(pids, limit_s=allowed_s)
    # The server's worker ends a process by force that has not ended after 30 s, which a busy machine takes.
    assert orderly or busyness() > 3, "it was ended by force"
    return round(took_s, 1)


@on_both_databases
@pytest.mark.parametrize("stands", ["Paused", "Suspended"])
def test_a_campaign_that_is_cancelled_while_it_waits_for_a_person_leaves_nothing(
    make_config: MakeConfig,
    tmp_path: Path,
    worker: StartWorker,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    stands: str,
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", str(PREFECT_API_URL.value()))
    held = Held(make_config, tmp_path, "never", -1, slow_s=0.3, steps=50)
    run = held.start()
    worker()
    limit_s = 60 * busyness()
    end = time.monotonic() + limit_s
    while not held.steps():
        assert time.monotonic() < end, "no step"
        time.sleep(0.5)
    pids = family(int(Path(f"{held.marker}.pid").read_text()))
    if stands == "Paused":
        post(f"/flow_runs/{run}/set_state", {"state": {"type": "PAUSED", "name": "Paused"}})
        wait_for(run, {"Pausing"} | ENDED, limit_s=limit_s)  # it still runs
    else:
        command.suspend(run)
    assert wait_for(run, {stands} | ENDED, limit_s=limit_s) == stands
    post(f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    allowed_s = CANCEL_S * busyness()
    assert wait_for(run, ENDED, limit_s=allowed_s) == "Cancelled"
    held.check_nothing_is_left(pids, limit_s=allowed_s)


def go_on(run: str) -> None:
    """Run a crashed run again, as the UI's retry does."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(run), AwaitingRetry(), force=True)


@on_both_databases
@pytest.mark.parametrize("victims", ["flow", "worker", "both"])
def test_a_campaign_that_loses_its_processes_goes_on_at_the_next_step_and_has_every_sample_once(
    make_config: MakeConfig,
    tmp_path: Path,
    worker: StartWorker,  # noqa: F811
    victims: str,
) -> None:
    held = Held(make_config, tmp_path, "generate", 3, steps=4)
    run = held.start()
    server_worker = worker()
    flow, _ = held.wait(run)
    pids = family(flow)
    assert held.steps() == [0, 1, 2]
    if victims != "flow":
        server_worker.kill()
        server_worker.wait(30)
    if victims != "worker":
        os.kill(flow, signal.SIGKILL)
    began = time.monotonic()
    # With nobody left to report it, the silence of three heartbeats does.
    silence_s = 180.0 if victims == "both" else 0.0
    final = wait_for(run, ENDED, limit_s=silence_s + 60 * busyness())
    print(f"\n{victims}: {final} after {time.monotonic() - began:.1f} s at {busyness():.1f} times the load")
    assert final == "Crashed"
    # Ray's agents, whose raylet and whose server died at once, try to report that for half a minute.
    held.check_nothing_is_left(pids, limit_s=90 * busyness())

    go_on(run)
    if victims != "flow":
        worker()
    assert wait_for(run, ENDED - {"Crashed"}, limit_s=120 * busyness()) == "Completed"
    assert held.steps() == [0, 1, 2, 3]
    whole = campaign(make_config(name="whole", steps=4))
    undisturbed, found = (read_records(x) for x in (whole.metrics, held.config.run_folder / "metrics.jsonl"))
    assert [(r.epoch, r.position, r.version) for r in found] == [
        (r.epoch, r.position, r.version) for r in undisturbed
    ]
    assert [r.response_tokens for r in found] == [r.response_tokens for r in undisturbed]
    assert [r.reward_mean for r in found] == pytest.approx([r.reward_mean for r in undisturbed], abs=1e-6)
