"""Learning curves: every algorithm on two tasks, over seeds, without and with four forced transitions.

    python benchmarks/learning.py run    [--output FOLDER] [--only WORD ...] [--seeds 0 1 2] [--moved-seeds 0]
    python benchmarks/learning.py report [--output FOLDER] [--images docs/images]

`run` does what is missing, in an order that completes one algorithm after the other, and can be stopped and
started again: a finished run is never repeated, an unfinished one begins anew. `report` draws what there is
and prints the tables of docs/learning.md. Two logical GPUs (with asynchrony four, since training and
generation may share none); a run moves through tp 2, dp 2, pp 2 and back.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nereus.config import CampaignConfig
    from nereus.record.step import StepRecord

ROOT = Path(__file__).resolve().parent.parent
COUNT = ROOT / "examples" / "count"
KL = {"where": "loss", "estimator": "k3-unbiased", "coefficient": 1e-3}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"kind": "grpo", "kl": KL},
    "ppo": {"kind": "ppo", "kl": KL, "lam": 0.95, "critic_learning_rate": 1e-3},
    "remax": {"kind": "remax", "kl": KL},
    "rloo": {"kind": "rloo", "kl": KL},
    "reinforce_pp": {"kind": "reinforce_pp", "kl": KL},
    "grpo_async": {"kind": "grpo", "kl": KL, "correction": {"weight": "token", "high": 2.0}},
}
ASYNCHRONOUS = {"grpo_async": {"staleness": 1}}
"""Those whose next responses are drawn while they learn, one step behind."""
ONE = {"actor_training": {"gpus": [0]}, "actor_generation": {"gpus": [1]}}
MOVES: tuple[dict[str, Any], ...] = (
    {"actor_training": {"tp": 2}, "actor_generation": {"dp": 2}},
    {"actor_training": {"dp": 2}, "actor_generation": {"tp": 2}},
    {"actor_training": {"pp": 2}, "actor_generation": {"dp": 2}},
    {"actor_training": {"gpus": [1]}, "actor_generation": {"gpus": [0]}},
)
MOVES_APART: tuple[dict[str, Any], ...] = (
    {"actor_training": {"tp": 2, "gpus": [0, 2]}, "actor_generation": {"dp": 2, "gpus": [1, 3]}},
    {"actor_training": {"dp": 2, "gpus": [0, 2]}, "actor_generation": {"tp": 2, "gpus": [1, 3]}},
    {"actor_training": {"pp": 2, "gpus": [0, 2]}, "actor_generation": {"dp": 2, "gpus": [1, 3]}},
    {"actor_training": {"gpus": [2]}, "actor_generation": {"gpus": [3]}},
)
"""The same layouts where training and generation may share no GPU."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task and how long it is trained; the transitions divide its steps into five parts."""

    name: str
    folder: Path
    prompts: Path
    reward: Path
    steps: int
    batch: dict[str, int]
    max_new_tokens: int
    learning_rate: float

    def make_model(self) -> None:
        """Make the model's folder unless it is there."""
        script = COUNT / "make_model.py" if self.name == "count" else ROOT / "benchmarks" / "learning_sort.py"
        words = ["--output", str(self.folder)] if self.name == "count" else [str(self.folder)]
        subprocess.run([sys.executable, str(script), *words], check=True)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One campaign of the benchmark."""

    task: Task
    algorithm: str
    seed: int
    moves: bool

    @property
    def name(self) -> str:
        """Names the run's folder."""
        return f"{self.task.name}-{self.algorithm}-{self.seed}-{'moved' if self.moves else 'still'}"

    def records(self, output: Path) -> list[StepRecord]:
        """The run's steps if it is finished, else none."""
        from nereus.record.metrics import read_records

        if not (output / self.name / "report.html").is_file():
            return []
        return read_records(output / self.name / "metrics.jsonl")

    def config(self, output: Path) -> CampaignConfig:
        """The campaign."""
        from nereus.config import CampaignConfig

        task, asynchrony = self.task, ASYNCHRONOUS.get(self.algorithm)
        changes = [
            {"before_step": task.steps * (i + 1) // (len(MOVES) + 1), "plan": plan}
            for i, plan in enumerate(MOVES_APART if asynchrony else MOVES)
        ]
        return CampaignConfig.model_validate(
            {
                "name": self.name,
                "output": str(output),
                "seed": self.seed,
                "steps": task.steps,
                "models": {"actor": str(task.folder)},
                "prompts": {"source": {"kind": "python", "function": f"{task.prompts}:prompts"}},
                "reward": {"kind": "python", "function": f"{task.reward}:reward", "workers": 1},
                "algorithm": ALGORITHMS[self.algorithm],
                "asynchrony": asynchrony,
                "batch": task.batch,
                "sampling": {"max_new_tokens": task.max_new_tokens},
                "optimizer": {"learning_rate": task.learning_rate},
                "plan": ONE,
                "changes": changes if self.moves else [],
                "cluster": {"gpus": 4 if asynchrony else 2, "device": "cpu", "timeout_s": 300},
                "checkpoint": {"every_steps": 0, "keep_last": 1},
                "tracking": "step",
            }
        )


def tasks(output: Path) -> tuple[Task, ...]:
    """The two tasks."""
    sort = ROOT / "benchmarks" / "learning_sort.py"
    return (
        Task(
            name="count",
            folder=output / "model-count",
            prompts=COUNT / "prompts.py",
            reward=COUNT / "reward.py",
            steps=20,
            batch={"prompts": 8, "samples": 8, "micro_batch_rows": 32},
            max_new_tokens=64,
            learning_rate=2e-4,
        ),
        Task(
            name="sort",
            folder=output / "model-sort",
            prompts=sort,
            reward=sort,
            steps=60,
            batch={"prompts": 16, "samples": 8, "micro_batch_rows": 64},
            max_new_tokens=8,
            learning_rate=2e-4,
        ),
    )


def all_runs(output: Path, seeds: Sequence[int], moved: Sequence[int]) -> Iterator[Run]:
    """Task by task and algorithm by algorithm: first all seeds without transitions, then those with."""
    for task in tasks(output):
        for algorithm in ALGORITHMS:
            for moves in (False, True):
                for seed in moved if moves else seeds:
                    yield Run(task=task, algorithm=algorithm, seed=seed, moves=moves)


def prepare(output: Path) -> None:
    """Make the folder, and let this process run campaigns in it. Prefect must not be loaded before."""
    from nereus.cli.embedded import prepare_environment

    output.mkdir(parents=True, exist_ok=True)
    prepare_environment(output)


def start_ray(*, num_gpus: int) -> None:
    """A private Ray of two cores and so many logical GPUs, for all campaigns of a benchmark."""
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=num_gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def run(output: Path, seeds: Sequence[int], moved: Sequence[int], only: Sequence[str]) -> None:
    """Do the runs that are missing and whose names contain every word of `only`."""
    prepare(output)
    import ray

    from nereus.flows.campaign import campaign

    wanted = [one for one in all_runs(output, seeds, moved) if all(word in one.name for word in only)]
    for task in {one.task.name: one.task for one in wanted}.values():
        task.make_model()
    start_ray(num_gpus=4)
    for one in wanted:
        if one.records(output):
            continue
        shutil.rmtree(output / one.name, ignore_errors=True)
        started = time.perf_counter()
        campaign(one.config(output))
        rewards = [record.reward_mean or 0.0 for record in one.records(output)]
        took_s = time.perf_counter() - started
        print(f"{one.name}: reward {rewards[0]:.3f} -> {rewards[-1]:.3f} in {took_s:.0f} s", flush=True)
    ray.shutdown()


Finished = dict[int, list["StepRecord"]]
"""The records of the finished runs, by seed."""
QUANTITIES: dict[str, Callable[[StepRecord], float]] = {
    "reward": lambda record: record.reward_mean or 0.0,
    "kl": lambda record: record.stats["kl/actor"],
}


def report(output: Path, images: Path, seeds: Sequence[int]) -> None:
    """Draw a figure for every task and print the tables."""
    for task in tasks(output):
        both: dict[str, tuple[Finished, Finished]] = {}
        for name in ALGORITHMS:
            still, moved = (finished(output, task, name, seeds, moves) for moves in (False, True))
            if still:
                both[name] = (still, moved)
        if both:
            draw(task, both, images / f"learning-{task.name}.png")
            print(f"\n{task.name}, {task.steps} steps\n")
            print("\n".join(table(output, task, both)))


def finished(output: Path, task: Task, algorithm: str, seeds: Sequence[int], moves: bool) -> Finished:
    """The runs that are finished."""
    found = {
        seed: Run(task=task, algorithm=algorithm, seed=seed, moves=moves).records(output) for seed in seeds
    }
    return {seed: records for seed, records in found.items() if records}


def table(output: Path, task: Task, both: dict[str, tuple[Finished, Finished]]) -> Iterator[str]:
    """Markdown: first and last reward, and what the transitions changed, run by run of one seed."""
    yield (
        "| algorithm | seeds still + moved | reward: first 2 steps | last fifth, still | last fifth, moved "
        "| transitions | steps in the band: reward, KL | steps with the same responses "
        "| largest change: reward, KL |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    last = max(1, task.steps // 5)
    for name, (still, moved) in both.items():
        cells = [name, f"{len(still)} + {len(moved)}", f"{mean_reward(still, 0, 2):.3f}"]
        cells += [f"{mean_reward(runs, -last, None):.3f}" if runs else "–" for runs in (still, moved)]
        cells += list(changes(output, task, name, still, moved)) if moved else ["–"] * 4
        yield f"| {' | '.join(cells)} |"


def mean_reward(runs: Finished, start: int, end: int | None) -> float:
    """Mean over the seeds and over some steps."""
    return statistics.fmean(
        QUANTITIES["reward"](record) for records in runs.values() for record in records[start:end]
    )


def changes(output: Path, task: Task, name: str, still: Finished, moved: Finished) -> Iterator[str]:
    """What differs between the runs of one seed without and with transitions, as four cells."""
    from nereus.record.transitions import read_transitions

    runs = [Run(task=task, algorithm=name, seed=seed, moves=True) for seed in moved]
    done = [record for run in runs for record in read_transitions(output / run.name)]
    yield f"{sum(record.outcome == 'commit' for record in done)} of {len(runs) * len(MOVES)}"
    yield ", ".join(f"{share_in_band(still, moved, value):.0%}" for value in QUANTITIES.values())
    pairs = [pair for seed in moved if seed in still for pair in zip(still[seed], moved[seed], strict=True)]
    same = sum(a.response_tokens == b.response_tokens and a.reward_mean == b.reward_mean for a, b in pairs)
    yield f"{same} of {len(pairs)}"
    yield ", ".join(f"{max(abs(value(a) - value(b)) for a, b in pairs):.0e}" for value in QUANTITIES.values())


def share_in_band(still: Finished, moved: Finished, value: Callable[[StepRecord], float]) -> float:
    """Share of steps at which the mean over moved seeds lies between the least and the greatest still one."""
    inside = 0
    steps = list(zip(*moved.values(), strict=True))
    for records, of_still in zip(steps, zip(*still.values(), strict=True), strict=True):
        band = [value(record) for record in of_still]
        # A millionth of slack: another layout rounds otherwise, also where all three seeds agree.
        inside += min(band) - 1e-6 <= statistics.fmean(map(value, records)) <= max(band) + 1e-6
    return inside / len(steps)


def draw(task: Task, both: dict[str, tuple[Finished, Finished]], path: Path) -> None:
    """Reward above, KL below, an algorithm a column: the band of the still seeds, and the moved ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (3.2 * len(both), 5)
    figure, axes = pyplot.subplots(2, len(both), figsize=size, sharex=True, sharey="row", squeeze=False)
    for column, (name, (still, moved)) in enumerate(both.items()):
        for row, (quantity, value) in enumerate(QUANTITIES.items()):
            axis = axes[row][column]
            by_step = [[value(record) for record in records] for records in zip(*still.values(), strict=True)]
            low, high = [min(values) for values in by_step], [max(values) for values in by_step]
            axis.fill_between(range(len(low)), low, high, alpha=0.25, label="still, band of seeds")
            axis.plot([statistics.fmean(values) for values in by_step], label="still, mean")
            for number, records in enumerate(moved.values()):
                label = "moved, each seed" if number == 0 else None
                curve = [value(record) for record in records]
                axis.plot(curve, color="tab:red", linewidth=0.7, alpha=0.7, label=label)
            for move in range(1, len(MOVES) + 1):
                axis.axvline(
                    task.steps * move // (len(MOVES) + 1), color="grey", linewidth=0.5, linestyle=":"
                )
            axis.set_title(name if row == 0 else "")
            axis.set_ylabel(quantity if column == 0 else "")
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"{task.name}: dotted lines are the transitions of the moved runs")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--output", type=Path, default=Path("runs/learning"), help="folder of the runs")
    parser.add_argument("--only", nargs="*", default=[], help="words that a run's name must contain")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--moved-seeds", nargs="*", type=int, default=[0, 1, 2], help="with transitions")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    arguments = parser.parse_args()
    output = arguments.output.absolute()
    if arguments.what == "run":
        run(output, arguments.seeds, arguments.moved_seeds, arguments.only)
    else:
        report(output, arguments.images, arguments.seeds)


if __name__ == "__main__":
    main()
