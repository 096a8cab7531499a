"""The closed loop live, as a program: a PPO job whose answers grow and whose pool goes 4, 8, 3, 6 GPUs.

    python -m tests.flows.live_pool FOLDER [--steps N]

Nodes are logical ones of this machine (`ray.cluster_utils.Cluster`), workers are processes with gloo. One
node is killed without warning while it generates, one is drained with a deadline. The same campaign runs
undisturbed first. Writes the figures of both to FOLDER/figures.json;
logs to stderr.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from prefect.testing.utilities import prefect_test_harness
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster as RayCluster

from nereus.config import CampaignConfig
from nereus.emu.layout import Rank
from nereus.flows.post_training import run_steps
from nereus.record.decisions import read_decisions
from nereus.record.emergencies import read_emergencies
from nereus.record.metrics import read_records
from nereus.record.report import write_report
from nereus.record.step import StepRecord
from nereus.record.transitions import read_transitions
from nereus.rewards.function import RewardFunction, RewardRequest, RewardResult
from nereus.tasks.job import Job, open_job
from nereus.tasks.prepare import prepare_campaign

COUNT = Path(__file__).resolve().parents[2] / "examples" / "count"
PREEMPTION = 2  # Ray's reason for a drain that cannot be refused
DRAIN_S = 8.0
GROW, EARLIEST_KILL, PAUSE = 5, 9, 2


@dataclass(kw_only=True)
class Nodes:
    """The logical nodes, by name. `kill` and `drain` are what a provider does."""

    ray: RayCluster
    by_name: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, num_gpus: int) -> None:
        self.by_name[name] = started(lambda: self.ray.add_node(num_cpus=1, num_gpus=num_gpus))

    def kill(self, name: str, pids: Sequence[int]) -> None:
        """End the node and its workers (`pids`) at once."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.ray.remove_node(self.by_name.pop(name), allow_graceful=False)

    def drain(self, name: str, seconds: float) -> None:
        deadline_ms = int((time.time() + seconds) * 1000)
        node = self.by_name[name].node_id
        accepted, why = GcsClient(address=self.ray.address).drain_node(
            node, PREEMPTION, "reclaimed", deadline_ms
        )
        assert accepted, why


@dataclass(kw_only=True)
class Watched:
    """The reward function; keeps the sample ids that it was asked for, by step."""

    inner: RewardFunction
    step: Callable[[], int]
    samples: dict[int, list[int]] = field(default_factory=dict)

    def score(self, requests: Sequence[RewardRequest]) -> tuple[RewardResult, ...]:
        self.samples.setdefault(self.step(), []).extend(request.sample_id for request in requests)
        return self.inner.score(requests)

    def close(self) -> None:
        self.inner.close()


@dataclass(kw_only=True)
class Events:
    """A listener that changes the pool at its steps."""

    job: Job
    nodes: Nodes | None
    used_since: int | None = None
    struck_step: int | None = None
    drained_at_s: float | None = None
    left_at_s: float | None = None
    left_step: int | None = None

    def on_stage(self, step: int, stage: str, seconds: float | None) -> None:
        if self.nodes is None or stage != "generate" or seconds is not None:
            return
        if self.drained_at_s is not None and self.left_at_s is None and not self._uses("b"):
            self.left_at_s, self.left_step = time.time(), step
        if self.struck_step is not None or not self._uses("c"):
            return
        self.used_since = step if self.used_since is None else self.used_since
        if step > max(self.used_since, EARLIEST_KILL):  # a step on all GPUs is on record
            self.struck_step = step
            threading.Timer(0.1, self.nodes.kill, ("c", self._pids("c"))).start()

    def _change_pool(self, step: int, nodes: Nodes) -> None:
        """Before `step` begins; Ray starts nodes from the main thread only."""
        if step == GROW:
            nodes.add("c", 3)
            nodes.add("d", 1)
        if self.struck_step is not None and step == self.struck_step + PAUSE:
            self.drained_at_s = time.time()
            nodes.drain("b", DRAIN_S)
        if self.left_step is not None and step == self.left_step + PAUSE:
            nodes.add("e", 3)
        over = self.drained_at_s is not None and time.time() > self.drained_at_s + DRAIN_S
        if over and "b" in nodes.by_name:
            nodes.kill("b", ())

    def _ranks(self, name: str) -> list[Rank]:
        """The live workers on a node."""
        assert self.nodes is not None, "the pool changes"
        cluster, node = self.job.cluster, self.nodes.by_name.get(name)
        return [rank for rank in cluster.ranks if node is not None and cluster._nodes[rank] == node.node_id]

    def _uses(self, name: str) -> bool:
        """Whether a model-stage lies on a node."""
        return any(set(self._ranks(name)) & set(spec.ranks) for spec in self.job.stages.values())

    def _pids(self, name: str) -> list[int]:
        actors = self.job.cluster._actors
        return [ray.get(actors[rank].call.remote("ping"))[0] for rank in self._ranks(name)]

    def on_step(self, record: StepRecord) -> None:
        say(
            f"step {record.step:2d} {record.step_s:5.2f} s  length {record.length_mean:5.1f} "
            f"(max {record.length_max}) reward {record.reward_mean:.3f}  {dict(record.plan)}"
        )
        if self.nodes is not None:
            self._change_pool(record.step + 1, self.nodes)

    def on_message(self, text: str) -> None:
        say(text)


def started(start: Callable[[], Any]) -> Any:
    """A node that has started. Ray gives one 30 s, which a busy machine may exceed: then another is tried."""
    for left in reversed(range(5)):
        try:
            return start()
        except Exception as error:  # Ray raises no narrower one
            if not left or "timed out during startup" not in str(error):
                raise
            say(f"a node did not start in time: {error}")
    raise AssertionError("the last try returns or raises")


def say(text: str) -> None:
    """A line of the log."""
    print(text, file=sys.stderr, flush=True)


def config_of(folder: Path, name: str, steps: int, parts: dict[str, Any]) -> CampaignConfig:
    """The count task with PPO."""
    base = {
        "name": name,
        "output": str(folder),
        "seed": 2,
        "steps": steps,
        "models": {"actor": str(COUNT / "model")},
        "prompts": {"source": {"kind": "python", "function": f"{COUNT / 'prompts.py'}:prompts"}},
        "reward": {"kind": "python", "function": f"{COUNT / 'reward.py'}:reward"},
        "algorithm": {"kind": "ppo", "gamma": 1.0, "lam": 0.95, "critic_learning_rate": 1e-3},
        "batch": {"prompts": 8, "samples": 16, "micro_batch_rows": 64},
        "sampling": {"max_new_tokens": 128},
        "optimizer": {"learning_rate": 2.5e-4, "beta2": 0.95},
        "checkpoint": {"every_steps": 5},
        "tracking": "step",
    }
    return CampaignConfig.model_validate(base | parts)


def run(config: CampaignConfig, nodes: Nodes | None) -> tuple[Events, Watched, float]:
    """Run a campaign to its end; with `nodes` the pool changes on the way."""
    started = time.perf_counter()
    with open_job(prepare_campaign(config), resume=False) as job:
        assert job.reward is not None, "the count task has a reward function"
        watched = Watched(inner=job.reward, step=lambda: job.state.step)
        events = Events(job=job, nodes=nodes)
        job.reward, job.listener = watched, events
        run_steps(job)
        write_report(config.run_folder, config)
    return events, watched, time.perf_counter() - started


def main() -> None:
    """Run both and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=26)
    arguments = parser.parse_args()
    subprocess.run([sys.executable, COUNT / "make_model.py"], check=True, stdout=sys.stderr)
    cluster = RayCluster()
    started(lambda: cluster.add_node(num_cpus=2, num_gpus=0))
    nodes = Nodes(ray=cluster)
    nodes.add("a", 2)
    nodes.add("b", 2)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    try:
        with prefect_test_harness(server_startup_timeout=120):
            plan = {"actor_training": {"dp": 2}, "critic_training": {"dp": 2, "gpus": [2, 3]}}
            four = {"gpus": 4, "device": "cpu", "timeout_s": 60}
            still = config_of(arguments.folder, "still", arguments.steps, {"plan": plan, "cluster": four})
            moving = config_of(
                arguments.folder,
                "moving",
                arguments.steps,
                {
                    "cluster": four | {"max_gpus": 8, "gpu_memory_gb": 0.62},
                    "adaptation": {"drain_margin_s": 3.0},
                },
            )
            _, calm, still_s = run(still, None)
            events, disturbed, moving_s = run(moving, nodes)
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]
    found = figures(still, moving, calm, disturbed, events) | {"still_s": still_s, "moving_s": moving_s}
    (arguments.folder / "figures.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


def figures(
    still: CampaignConfig, moving: CampaignConfig, calm: Watched, disturbed: Watched, events: Events
) -> dict[str, Any]:
    """Both runs as plain JSON values."""
    one, two = (read_records(config.run_folder / "metrics.jsonl") for config in (still, moving))
    transitions = read_transitions(moving.run_folder)
    kinds = [operation.kind for record in transitions for operation in record.operations]
    return {
        "versions": [[r.version for r in records] for records in (one, two)],
        "positions": [[(r.epoch, r.position) for r in records] for records in (one, two)],
        "samples": [sorted_samples(watched) for watched in (calm, disturbed)],
        "rewards": [[r.reward_mean for r in records] for records in (one, two)],
        "lengths": [[r.length_mean for r in records] for records in (one, two)],
        "gpus": [len(r.memory_bytes) for r in two],
        "plans": [dict(r.plan) for r in two],
        "transitions": [
            {
                "step": t.step,
                "outcome": t.outcome,
                "seconds": t.seconds,
                "bytes": t.bytes,
                "bound": t.lower_bound,
            }
            for t in transitions
        ],
        "decisions": [
            {
                "step": d["change"]["step"],
                "admit": d["admit"],
                "cause": d["change"]["trigger"]["cause"],
                "why": d["why"],
            }
            for d in read_decisions(moving.run_folder)
        ],
        "operations": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "emergencies": [
            {
                "step": e.step,
                "gone": list(e.gone),
                "way": str(e.way),
                "seconds": e.seconds,
                "redone": e.steps_redone,
            }
            for e in read_emergencies(moving.run_folder)
        ],
        "left_before_deadline_s": None
        if events.left_at_s is None or events.drained_at_s is None
        else events.drained_at_s + DRAIN_S - events.left_at_s,
    }


def sorted_samples(watched: Watched) -> list[list[int]]:
    """The sample ids of every step, in order of the steps."""
    return [sorted(watched.samples[step]) for step in sorted(watched.samples)]


if __name__ == "__main__":
    main()
