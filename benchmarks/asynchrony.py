"""What drawing ahead is worth: one campaign in turns and asynchronously, at equal samples, on two devices.

    python benchmarks/asynchrony.py [--steps 20] [--seeds 0 1 2] [--length 64] [--output FOLDER]

GRPO on examples/count. A device is a core of this machine: a worker of one thread. Ways:

together          training and generation on both devices (dp 2), in turns
apart, in turns   training on one device, generation on the other, in turns
one step behind   apart; the next step's responses are drawn while a step learns
in segments       the same; a weight sync may come after every `length` / 4 tokens, and responses go on

Ways take turns, seed by seed. A step is as long as its own record says: the median after the first three,
median over seeds. Rewards are means over the last fifth of the steps. `busy` is the share of a step that the
two stages last; generation ahead of training has waits for weight syncs in it. The driver, Ray and Prefect
need some of the same two cores: run it where nothing else runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.learning import ONE, Task, prepare, start_ray, tasks

if TYPE_CHECKING:
    from nereus.config import CampaignConfig
    from nereus.record.step import StepRecord

WARM_UP = 3
TOGETHER = {"actor_training": {"dp": 2}, "actor_generation": {"dp": 2}}
CORRECTED = {"kind": "grpo", "correction": {"weight": "token", "high": 2.0}}


@dataclass(frozen=True, kw_only=True)
class Way:
    """How training and generation share two devices."""

    name: str
    plan: dict[str, Any]
    staleness: int | None = None
    segments: int | None = None

    def config(self, task: Task, output: Path, *, seed: int, steps: int, length: int) -> CampaignConfig:
        """The campaign."""
        from nereus.config import CampaignConfig

        ahead: dict[str, Any] | None = None
        if self.staleness is not None:
            ahead = {"staleness": self.staleness}
            if self.segments is not None:
                ahead["segment_tokens"] = length // self.segments
        return CampaignConfig.model_validate(
            {
                "name": f"{self.name.replace(', ', '-').replace(' ', '-')}-{seed}",
                "output": str(output),
                "seed": seed,
                "steps": steps,
                "models": {"actor": str(task.folder)},
                "prompts": {"source": {"kind": "python", "function": f"{task.prompts}:prompts"}},
                "reward": {"kind": "python", "function": f"{task.reward}:reward", "workers": 1},
                "algorithm": {"kind": "grpo"} if ahead is None else CORRECTED,
                "asynchrony": ahead,
                "batch": {"prompts": 8, "samples": 8, "micro_batch_rows": 16},
                "sampling": {"max_new_tokens": length},
                "optimizer": {"learning_rate": task.learning_rate, "beta2": 0.95},
                "plan": self.plan,
                "cluster": {"gpus": 2, "device": "cpu", "timeout_s": 120},
                "checkpoint": {"every_steps": 0, "keep_last": 1},
                "tracking": "step",
            }
        )


WAYS = (
    Way(name="together", plan=TOGETHER),
    Way(name="apart, in turns", plan=ONE),
    Way(name="one step behind", plan=ONE, staleness=1),
    Way(name="in segments", plan=ONE, staleness=1, segments=4),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One campaign. Seconds are the median step's, `generates` and `learns` shares of it."""

    step_s: float
    tokens_per_s: float
    reward: float
    generates: float
    learns: float

    @classmethod
    def of(cls, records: list[StepRecord]) -> Measured:
        """What the steps say."""
        late = records[WARM_UP:]
        last = records[-max(1, len(records) // 5) :]

        def share(prefix: str) -> float:
            return statistics.median(
                sum(took for name, took in record.stage_s.items() if name.startswith(prefix)) / record.step_s
                for record in late
            )

        return cls(
            step_s=statistics.median(record.step_s for record in late),
            tokens_per_s=statistics.median(record.tokens_per_s for record in late),
            reward=statistics.fmean(record.reward_mean or 0.0 for record in last),
            generates=share("generate"),
            learns=share("learn"),
        )


def measure(output: Path, seeds: list[int], steps: int, length: int) -> dict[str, list[Measured]]:
    """Run all ways, seed by seed."""
    prepare(output)
    import ray

    from nereus.flows.campaign import campaign
    from nereus.record.metrics import read_records

    task = tasks(output)[0]
    task.make_model()
    start_ray(num_gpus=2)
    found: dict[str, list[Measured]] = {way.name: [] for way in WAYS}
    for seed in seeds:
        for way in WAYS:
            result = campaign(way.config(task, output, seed=seed, steps=steps, length=length))
            found[way.name].append(Measured.of(read_records(result.metrics)))
            one = found[way.name][-1]
            print(f"seed {seed}, {way.name}: {one.step_s:.3f} s a step, reward {one.reward:.3f}", flush=True)
    ray.shutdown()
    return found


def show(found: dict[str, list[Measured]], length: int) -> None:
    """Print the table; speed-ups are over training and generation apart, in turns."""
    base = statistics.median(one.step_s for one in found["apart, in turns"])
    table = Table(title=f"GRPO on count, 64 responses of at most {length} tokens a step, two cores")
    for name in (
        "way",
        "s a step",
        "speed-up",
        "tokens/s",
        "reward",
        "its seeds",
        "busy: generation, training",
    ):
        table.add_column(name, justify="left" if name == "way" else "right")
    for name, runs in found.items():
        step_s, rate, reward, generates, learns = (
            statistics.median(getattr(one, field) for one in runs)
            for field in ("step_s", "tokens_per_s", "reward", "generates", "learns")
        )
        rewards = sorted(one.reward for one in runs)
        table.add_row(
            name,
            f"{step_s:.3f}",
            f"{base / step_s:.2f}x",
            f"{rate:,.0f}",
            f"{reward:.3f}",
            f"{rewards[0]:.3f} to {rewards[-1]:.3f}",
            f"{generates:.0%}, {learns:.0%}",
        )
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    Console(width=130).print(table, f"{os.cpu_count()} CPUs, load {load}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--length", type=int, default=64, help="most new tokens of a response")
    parser.add_argument("--output", type=Path, help="keep the runs here; a temporary folder otherwise")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.output or Path(folder), options.seeds, options.steps, options.length)
    show(found, options.length)


if __name__ == "__main__":
    main()
