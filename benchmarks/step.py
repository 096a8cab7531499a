"""The same GRPO step through TRL's GRPOTrainer and through Nereus, at one worker, in one run.

    python benchmarks/step.py [--steps N] [--length T] [--model count|FOLDER] [--json FILE]

Both train the same model with the same prompts, batch, response length, learning rate and number of threads
on this machine's CPU. Responses have a fixed length (no token stops them), so that both do the same work
whatever they sample. The first two steps of each are left out. Then the overhead of Prefect and Ray is
measured: the part of a Nereus step in which neither worker nor driver works on a stage.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROOT = Path(__file__).resolve().parent.parent
COUNT = ROOT / "examples" / "count"
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """What both sides run. `threads` of torch; `prompts` x `samples` rows a step of `length` new tokens."""

    model: str
    steps: int
    prompts: int
    samples: int
    length: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """Median seconds of a step, tokens of a step (prompt and response), and each step's overhead, if
    measured.
    """

    name: str
    step_s: float
    tokens: int
    overhead_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Prompt and response tokens a second."""
        return self.tokens / self.step_s


def run_trl(job: Job) -> Result:
    """TRL's trainer with its own generation (transformers), in this process."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(job.threads)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    prompts = [chr(ord("a") + i % 16) for i in range(job.prompts * job.steps)]
    stamps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            stamps.append(time.perf_counter())

    def reward(completions: list[str], **_: object) -> list[float]:
        return [float(len(set(text))) for text in completions]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=job.prompts * job.samples,
            num_generations=job.samples,
            max_completion_length=job.length,
            generation_kwargs={"min_new_tokens": job.length},
            learning_rate=1e-6,
            beta=0.0,
            temperature=1.0,
            max_steps=job.steps,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=1,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    steps_s = [b - a for a, b in pairwise(stamps)][WARM_UP - 1 :]
    prompt_tokens = len(tokenizer("a")["input_ids"])
    rows = job.prompts * job.samples
    return Result(name="TRL", step_s=statistics.median(steps_s), tokens=rows * (prompt_tokens + job.length))


def run_nereus(job: Job) -> Result:
    """A campaign on one worker with the embedded default: in-process Prefect server, private Ray."""
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    from nereus.config import CampaignConfig
    from nereus.flows.campaign import campaign
    from nereus.record.metrics import read_records

    with tempfile.TemporaryDirectory() as folder:
        reward = Path(folder) / "reward.py"
        reward.write_text("def reward(response):\n    return float(len(set(response)))\n")
        data = Path(folder) / "prompts.jsonl"
        lines = [json.dumps({"prompt": chr(ord("a") + i % 16)}) for i in range(64)]
        data.write_text("\n".join(lines) + "\n")
        rows = job.prompts * job.samples
        config = CampaignConfig.model_validate(
            {
                "name": "bench",
                "output": folder,
                "steps": job.steps,
                "models": {"actor": job.model},
                "prompts": {"source": {"kind": "file", "path": str(data)}},
                "reward": {"kind": "python", "function": f"{reward}:reward"},
                "algorithm": {"kind": "grpo"},
                "batch": {"prompts": job.prompts, "samples": job.samples, "micro_batch_rows": rows},
                "sampling": {"max_new_tokens": job.length, "ignore_eos": True},
                "optimizer": {"learning_rate": 1e-6},
                "cluster": {"gpus": 1, "device": "cpu", "threads": job.threads},
                "checkpoint": {"every_steps": 0},
                "tracking": "step",
            }
        )
        records = read_records(campaign(config).metrics)[WARM_UP:]
    assert all(record.length_mean == job.length for record in records), "a response stopped early"
    return Result(
        name="Nereus",
        step_s=statistics.median(record.step_s for record in records),
        tokens=records[0].prompt_tokens + records[0].response_tokens,
        overhead_s=statistics.median(record.overhead_s for record in records),
    )


SIDES = {"trl": run_trl, "nereus": run_nereus}


def in_own_process(script: str, side: str, job: DataclassInstance) -> dict[str, Any]:
    """What one side of a script's comparison prints, from a process of its own: neither warms nor slows the
    other.
    """
    command = [sys.executable, script, "--side", side, "--job", json.dumps(asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-4000:]}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def main() -> None:
    """Run both sides alternately and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="count", help="`count` (made if absent) or a Hugging Face folder")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="new tokens of every response")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2, help="times each side runs; the faster one counts")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(asdict(SIDES[arguments.side](Job(**json.loads(arguments.job))))))
        return
    model = arguments.model
    if model == "count":
        subprocess.run([sys.executable, COUNT / "make_model.py"], check=True)
        model = str(COUNT / "model")
    job = Job(
        model=model,
        steps=arguments.steps,
        prompts=arguments.prompts,
        samples=arguments.samples,
        length=arguments.length,
        threads=arguments.threads,
    )
    console = Console(width=None if sys.stdout.isatty() else 120)
    runs: dict[str, list[Result]] = {side: [] for side in SIDES}
    for repeat in range(arguments.repeats):
        for side in SIDES:
            console.print(f"run {repeat + 1}: {side} ...")
            runs[side].append(Result(**in_own_process(__file__, side, job)))
    best = [min(results, key=lambda result: result.step_s) for results in runs.values()]
    console.print(table_of(job, best))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in best], indent=1))


def table_of(job: Job, results: list[Result]) -> Table:
    """One row a side."""
    rows = job.prompts * job.samples
    title = f"GRPO step: {rows} rows x {job.length} new tokens, {job.threads} thread(s), {machine()}"
    table = Table("side", "step, s", "tokens/s", "speed-up", "overhead, ms", title=title)
    for result in results:
        overhead = "-" if result.overhead_s is None else f"{1e3 * result.overhead_s:.1f}"
        ratio = result.tokens_per_s / results[0].tokens_per_s
        table.add_row(
            result.name, f"{result.step_s:.3f}", f"{result.tokens_per_s:,.0f}", f"{ratio:.2f}x", overhead
        )
    return table


def machine() -> str:
    """Processor and cores of this machine."""
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    return f"{name}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
