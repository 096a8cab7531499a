"""When generation and inference are over, with scoring after generation and on units that end before others.

    .venv/bin/python -m benchmarks.early [--units 4] [--prompts 32] [--samples 4] [--slots 8] [--out FILE]

Every worker has a unit of generation, of the reference and of the critic, all of one size. Response lengths
are those of benchmarks/tail.py. Engines are real and in this process; a worker's clock is the CPU time of its
own calls, so workers run at the same time as on devices of their own, and a busy machine does not move the
numbers. The code that decides who scores what is a running job's (`nereus.tasks.feeding`, `early`, `score`).

after  inference begins when the last response is whole
early  a worker whose unit has no more rows scores those that are whole
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks import tail
from benchmarks.generation import SMALL
from nereus.config import BatchConfig
from nereus.emu.batch import PromptBatch, Sampling, Scores
from nereus.emu.cluster import Answer, Call
from nereus.emu.decoder import decoder_spec
from nereus.emu.engines.torch import decode
from nereus.emu.engines.torch.engine import TorchEngine
from nereus.emu.engines.torch.generate import TorchGenerator
from nereus.emu.layout import Layout, Rank
from nereus.emu.source import fill
from nereus.emu.unit_groups import UnitGroups
from nereus.tasks.early import EARLY, Early
from nereus.tasks.generate import answers
from nereus.tasks.job import Job
from nereus.tasks.length_history import LengthHistory
from nereus.tasks.score import score_stage
from nereus.tasks.scoring import OF_REFERENCE, OF_VALUES
from nereus.tasks.stages import CRITIC, GENERATION, REFERENCE
from tests.emu.engines.torch_cases import Random

KINDS = (OF_REFERENCE, OF_VALUES)


@dataclass(kw_only=True)
class Clocks:
    """Stands for the cluster: calls run here, one after the other, each on its worker's clock."""

    generators: Sequence[TorchGenerator]
    scorers: Mapping[str, TorchEngine]
    clock_s: list[float] = field(init=False)
    num_halts: int = 0
    begins_s: float = 0.0
    """When the conversation, or the calls, that come next begin."""

    def __post_init__(self) -> None:
        self.clock_s = [0.0] * len(self.generators)

    def converse(
        self,
        first: Mapping[Rank, Call],
        then: Callable[[Answer], Mapping[Rank, Call]],
        *,
        what: str,
        between: object = None,
    ) -> None:
        """As `Cluster.converse`, answers in the order in which workers would give them."""
        number, pending = itertools.count(), []

        def send(calls: Mapping[Rank, Call], now_s: float) -> None:
            for rank, call in calls.items():
                answer = self._worked(rank, call, now_s)
                heapq.heappush(pending, (self.clock_s[rank], next(number), answer))

        send(first, self.begins_s)
        while pending:
            now_s, _, answer = heapq.heappop(pending)
            send(then(answer), now_s)

    def run(self, calls: Mapping[Rank, Call], *, what: str) -> dict[Rank, Any]:
        """As `Cluster.run`."""
        return {rank: self._worked(rank, call, self.begins_s).result for rank, call in calls.items()}

    def add_busy_s(self, what: str, seconds: float) -> None:
        """Nobody asks."""

    def _worked(self, rank: Rank, call: Call, now_s: float) -> Answer:
        start = time.process_time()
        if call.method == "feed":
            _, part, sampling, version, begin, more = call.arguments
            result: Any = self.generators[rank].feed(part, sampling, version, begin=begin, more=more)
        else:
            stage, batch, rows, temperature, tokens, _ = call.arguments
            result = self.scorers[stage].score(
                batch, micro_batch_rows=rows, micro_batch_tokens=tokens, temperature=temperature
            )
        seconds = time.process_time() - start
        self.clock_s[rank] = max(self.clock_s[rank], now_s) + seconds
        return Answer(rank=rank, call=call, result=result, seconds=seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=int, default=4)
    parser.add_argument(
        "--slots", type=int, default=8, help="rows that a unit decodes at once, in the second case"
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch of scoring")
    parser.add_argument("--median", type=float, default=40.0)
    parser.add_argument("--between", type=float, default=0.8)
    parser.add_argument("--within", type=float, default=0.6)
    parser.add_argument("--limit", type=int, default=1024)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    setattr(decode, "Draw", tail.PlannedDraw)  # noqa: B010  # the class that the loop makes
    generators = [tail.make_generator() for _ in range(options.units)]
    scorers = {stage: make_scorer(stage) for stage in (REFERENCE, CRITIC)}
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        for slots in (None, options.slots):
            case = "all rows at once" if slots is None else f"{slots} at once, longest first"
            numbers = one_seed(generators, scorers, options, seed, slots)
            found.setdefault(case, []).append(numbers)
            print(f"seed {seed}, {case}: {numbers['gain']:.3f}x", flush=True)
    tail.conclude(found, table, options)


def one_seed(
    generators: Sequence[TorchGenerator],
    scorers: Mapping[str, TorchEngine],
    options: argparse.Namespace,
    seed: int,
    slots: int | None,
) -> dict[str, float]:
    """Both ways over the same rows, which find the same numbers."""
    before_b, tail.planned_b = tail.planned_lengths(options, seed)
    prompts = tail.prompt_rows(options.prompts, options.samples, seed)
    history = LengthHistory()
    if slots is not None:
        history.add(prompts, before_b)
    runs = {}
    for way in ("warm", "after", "early"):
        clocks = Clocks(generators=generators, scorers=scorers)
        job = job_of(clocks, history, options.rows, slots)
        runs[way] = (*step(job, clocks, prompts, options.limit, seed, early=way != "after"), job)
    (generated_s, over_s, after), (_, early_over_s, early) = (runs[way][:3] for way in ("after", "early"))
    for one, other in zip(after, early, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)  # sums of other micro-batches
    stats = cast(Early, runs["early"][3].done[EARLY]).stats()
    return {
        "generation_s": generated_s,
        "after_s": over_s - generated_s,
        "early_s": early_over_s - runs["early"][0],
        "late_s": runs["early"][0] - generated_s,
        "share": statistics.fmean(stats.values()),
        "gain": over_s / early_over_s,
    }


def step(
    job: Job, clocks: Clocks, prompts: PromptBatch, limit: int, seed: int, *, early: bool
) -> tuple[float, float, list[torch.Tensor]]:
    """When generation and when inference are over, and what inference found."""
    sampling = Sampling(max_new_tokens=limit, stop_token_ids=(tail.STOP,), seed=seed)
    beside = Early(job) if early else None
    rollouts = answers(job, prompts, [], sampling, 0, early=beside)
    generated_s = clocks.begins_s = max(clocks.clock_s)
    if beside is not None:
        job.done[EARLY] = beside
    found: list[Scores] = [score_stage(job, kind, rollouts.batch) for kind in KINDS]
    values = [one.logprobs_bt if one.logprobs_bt is not None else one.values_bt for one in found]
    return generated_s, max(clocks.clock_s), [value for value in values if value is not None]


def job_of(clocks: Clocks, history: LengthHistory, rows: int, slots: int | None) -> Job:
    """What the tasks read of a job whose workers each have a unit of every model-stage."""
    units = tuple(unit_on(rank) for rank in range(len(clocks.generators)))
    stage = SimpleNamespace(
        units=units, ranks=range(len(units)), score_rows=None, resident_rows=None, engine="torch"
    )
    config = SimpleNamespace(
        batch=BatchConfig(micro_batch_rows=rows),
        prompts=SimpleNamespace(max_tokens=tail.PROMPT_TOKENS),
        sampling=SimpleNamespace(max_new_tokens=1024, temperature=1.0, max_rows=slots),
        algorithm=SimpleNamespace(kind="ppo", kl=object()),
        reward=SimpleNamespace(kind="python"),
        scores_reference_frozen=False,
        rescores=False,
    )
    stages = dict.fromkeys((GENERATION, REFERENCE, CRITIC), stage)
    return cast(
        Job,
        SimpleNamespace(cluster=clocks, stages=stages, config=config, lengths=history, tools=None, done={}),
    )


def unit_on(rank: Rank) -> Layout:
    """A unit of one worker."""
    return Layout.make(decoder_spec(SMALL), tp=1, pp=1, ranks=(rank,))


def make_scorer(stage: str) -> TorchEngine:
    """The engine of every unit of a model-stage: all compute alike."""
    config = SMALL.with_head("value") if stage == CRITIC else SMALL
    engine = TorchEngine(config, unit_on(0), UnitGroups.alone(unit_on(0)), optimizer=None)
    fill(engine.state, Random(config), {"theta": "theta"})
    return engine


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """The medians, one case a row."""
    lines = [
        "| rows | generation | inference after it | early: left of it | generation later by | early | gain |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for case, it in found.items():
        lines.append(
            f"| {case} | {it['generation_s']:.2f} s | {it['after_s']:.2f} s | {it['early_s']:.2f} s | "
            f"{1000 * it['late_s']:.0f} ms | {it['share']:.0%} | {it['gain']:.2f} x |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
