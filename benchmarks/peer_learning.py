"""Reward and tokens a second at equal samples: TRL's GRPO and RLOO beside Nereus's, in one run.

    python benchmarks/peer_learning.py [--steps 30] [--length 64] [--seeds 0 1 2] [--json FILE]

Both train the model of examples/count from the same weights with its own reward: the same number of prompts,
samples, tokens and updates a step, the same loss, learning rate, betas, clip and gradient norm, one thread,
one worker, on this machine's CPU. They draw from different random numbers, so rewards are compared as means
over seeds beside their spread. Sides take turns, each in a process of its own; Ray's workers keep its
niceness (`RAY_worker_niceness=0`). Each side makes its forward and backward passes over the number of rows
that is faster for it (`--trl-rows`, `--nereus-rows`); the step is the same. Tokens a second are prompt and
response tokens over the seconds from one step's end to the next, records and all: the median step after the
first two, median over seeds. On a machine that is not idle the CPU seconds of these steps say more: those of
the side's process and all that it has started (workers, rewards, Ray, the Prefect server). `--merge FILES`
prints the table of earlier runs' `--json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from operator import truediv
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from step import COUNT, WARM_UP, in_own_process, machine

ALGORITHMS = ("grpo", "rloo")
LEARNING_RATE, BETA2, CLIP, GRADIENT_NORM = 2e-4, 0.95, 0.2, 1.0
AGGREGATION = {"grpo": "token-mean", "rloo": "seq-mean-token-sum"}
"""How TRL's trainers make one loss of the tokens' losses, and so how Nereus does beside them."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training: `prompts` x `samples` responses of at most `length` tokens a step."""

    algorithm: str
    seed: int
    steps: int
    prompts: int
    samples: int
    length: int
    threads: int
    pass_rows: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """Mean reward of every step, and prompt and response tokens a second, and a CPU second, after the first
    steps.
    """

    rewards: list[float]
    tokens_per_s: float
    tokens_per_cpu_s: float

    def last(self) -> float:
        """Mean reward over the last fifth of the steps."""
        return statistics.fmean(self.rewards[-max(1, len(self.rewards) // 5) :])


def prompts_of(job: Job) -> list[dict[str, str]]:
    """The task's records, enough for every step once."""
    sys.path.insert(0, str(COUNT))
    from prompts import prompts

    return list(prompts(job.prompts * job.steps, job.seed))


def run_trl(job: Job) -> Result:
    """TRL's trainer with its own generation (transformers), in this process."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    torch.set_num_threads(job.threads)
    records = prompts_of(job)
    from reward import reward

    tokenizer = AutoTokenizer.from_pretrained(COUNT / "model")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(COUNT / "model", dtype=torch.float32)
    prompt_tokens = len(tokenizer(records[0]["prompt"])["input_ids"])
    stamps: list[Stamp] = []
    rewards: list[float] = []
    tokens: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            stamps.append(Stamp.now())

    def score(completion_ids: list[list[int]], answer: list[str], **_: object) -> list[float]:
        values = [reward(ids, truth) for ids, truth in zip(completion_ids, answer, strict=True)]
        rewards.append(statistics.fmean(values))
        tokens.append(sum(prompt_tokens + len(ids) for ids in completion_ids))
        return values

    rows = job.prompts * job.samples
    common: dict[str, Any] = {
        "per_device_train_batch_size": job.pass_rows,
        "gradient_accumulation_steps": rows // job.pass_rows,
        "num_generations": job.samples,
        "max_completion_length": job.length,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_beta2": BETA2,
        "max_grad_norm": GRADIENT_NORM,
        "weight_decay": 0.0,
        "beta": 0.0,
        "epsilon": CLIP,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_steps": job.steps,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "seed": job.seed,
    }
    sides = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}
    config_of, trainer_of = sides[job.algorithm]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(
            model=model,
            reward_funcs=score,
            args=config_of(output_dir=folder, **common),
            train_dataset=Dataset.from_list(records),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    return result_of(rewards, tokens[: job.steps], stamps)


@dataclass(frozen=True, slots=True)
class Stamp:
    """The end of a step: wall clock, and CPU seconds of this process and its descendants so far."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Stamp:
        """Read both; processes that have ended are not in it."""
        parent_of: dict[int, int] = {}
        ticks_of: dict[int, int] = {}
        for file in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = file.read_text().rpartition(")")[2].split()
                parent_of[int(file.parent.name)] = int(fields[1])
                ticks_of[int(file.parent.name)] = int(fields[11]) + int(fields[12])
        mine, found = {os.getpid()}, {os.getpid()}
        while found:
            found = {pid for pid, parent in parent_of.items() if parent in mine} - mine
            mine |= found
        ticks = sum(ticks_of.get(pid, 0) for pid in mine)
        return cls(time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"))


def result_of(rewards: list[float], tokens: Sequence[int], stamps: Sequence[Stamp]) -> Result:
    """The rates of the steps after the first ones."""
    seconds = [later.wall_s - earlier.wall_s for earlier, later in pairwise(stamps)]
    rates = map(truediv, tokens[WARM_UP:], seconds[WARM_UP - 1 :])
    cpu_s = stamps[-1].cpu_s - stamps[WARM_UP - 1].cpu_s
    return Result(
        rewards=rewards,
        tokens_per_s=statistics.median(rates),
        tokens_per_cpu_s=sum(tokens[WARM_UP:]) / cpu_s,
    )


def run_nereus(job: Job) -> Result:
    """A campaign on one worker with the embedded default: in-process Prefect server, private Ray."""
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("RAY_worker_niceness", "0")
    from nereus.config import CampaignConfig
    from nereus.flows.campaign import campaign
    from nereus.record.listener import current_listener
    from nereus.record.metrics import read_records

    stamps: list[Stamp] = []

    class Clock:
        def on_stage(self, *_: object) -> None:
            pass

        def on_step(self, *_: object) -> None:
            stamps.append(Stamp.now())

        def on_message(self, *_: object) -> None:
            pass

    current_listener.set(Clock())
    with tempfile.TemporaryDirectory() as folder:
        config = CampaignConfig.model_validate(
            {
                "name": "peer",
                "output": folder,
                "seed": job.seed,
                "steps": job.steps,
                "models": {"actor": str(COUNT / "model")},
                "prompts": {"source": {"kind": "python", "function": f"{COUNT / 'prompts.py'}:prompts"}},
                "reward": {"kind": "python", "function": f"{COUNT / 'reward.py'}:reward", "workers": 1},
                "algorithm": {
                    "kind": job.algorithm,
                    "aggregation": AGGREGATION[job.algorithm],
                    "clip_low": CLIP,
                    "clip_high": CLIP,
                    "dual_clip": None,
                },
                "batch": {
                    "prompts": job.prompts,
                    "samples": job.samples,
                    "micro_batch_rows": job.pass_rows,
                },
                "sampling": {"max_new_tokens": job.length},
                "optimizer": {
                    "learning_rate": LEARNING_RATE,
                    "beta2": BETA2,
                    "weight_decay": 0.0,
                    "max_gradient_norm": GRADIENT_NORM,
                },
                "cluster": {"gpus": 1, "device": "cpu", "threads": job.threads},
                "checkpoint": {"every_steps": 0},
                "tracking": "step",
            }
        )
        records = read_records(campaign(config).metrics)
    tokens = [record.prompt_tokens + record.response_tokens for record in records]
    return result_of([record.reward_mean or 0.0 for record in records], tokens, stamps)


SIDES = {"trl": run_trl, "nereus": run_nereus}


def main() -> None:
    """Run both sides in turn, seed by seed, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="most new tokens of a response")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trl-rows", type=int, default=64, help="rows of a pass of TRL")
    parser.add_argument("--nereus-rows", type=int, default=16, help="rows of a pass of Nereus")
    parser.add_argument("--merge", nargs="+", type=Path, help="print the table of these results")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(asdict(SIDES[arguments.side](Job(**json.loads(arguments.job))))))
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    results: dict[tuple[str, str], list[Result]] = {}
    if arguments.merge:
        for file in arguments.merge:
            for name, of in json.loads(file.read_text()).items():
                algorithm, side = name.split()
                results.setdefault((algorithm, side), []).extend(Result(**one) for one in of)
        console.print(table_of(arguments, results))
        return
    subprocess.run([sys.executable, COUNT / "make_model.py"], check=True)
    for algorithm in ALGORITHMS:
        for seed in arguments.seeds:
            for side in SIDES:
                job = Job(
                    algorithm=algorithm,
                    seed=seed,
                    steps=arguments.steps,
                    prompts=arguments.prompts,
                    samples=arguments.samples,
                    length=arguments.length,
                    threads=arguments.threads,
                    pass_rows={"trl": arguments.trl_rows, "nereus": arguments.nereus_rows}[side],
                )
                result = Result(**in_own_process(__file__, side, job))
                results.setdefault((algorithm, side), []).append(result)
                words = f"{algorithm} {side} seed {seed}"
                rates = f"{result.tokens_per_s:,.0f} tokens/s, {result.tokens_per_cpu_s:,.0f} a CPU second"
                console.print(f"{words}: {result.last():.3f}, {rates}")
    console.print(table_of(arguments, results))
    if arguments.json:
        named = {" ".join(key): [asdict(result) for result in of] for key, of in results.items()}
        arguments.json.write_text(json.dumps(named, indent=1))


def table_of(arguments: argparse.Namespace, results: dict[tuple[str, str], list[Result]]) -> Table:
    """One row an algorithm and side: rewards as mean and range over the seeds."""
    rows = arguments.prompts * arguments.samples
    title = f"count, {arguments.steps} steps of {rows} responses, {arguments.threads} thread(s), {machine()}"
    columns = ("algorithm", "side", "reward: first 2 steps", "last fifth", "its seeds")
    table = Table(*columns, "tokens/s", "ratio", "tokens/CPU s", "ratio", title=title)
    for (algorithm, side), of in results.items():
        last = sorted(result.last() for result in of)
        base = results[algorithm, "trl"]
        table.add_row(
            algorithm,
            side,
            f"{statistics.fmean(value for result in of for value in result.rewards[:2]):.3f}",
            f"{statistics.fmean(last):.3f}",
            f"{last[0]:.3f} to {last[-1]:.3f}",
            *beside([result.tokens_per_s for result in of], [result.tokens_per_s for result in base]),
            *beside([result.tokens_per_cpu_s for result in of], [result.tokens_per_cpu_s for result in base]),
        )
    return table


def beside(rates: Sequence[float], base: Sequence[float]) -> tuple[str, str]:
    """The median over the seeds, and what it is of the base's."""
    median = statistics.median(rates)
    return f"{median:,.0f}", f"{median / statistics.median(base):.2f}x"


if __name__ == "__main__":
    main()
