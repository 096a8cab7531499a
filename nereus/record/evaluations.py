"""evaluations.jsonl: one line for every evaluation, in the order of steps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

EVALUATIONS_FILE = "evaluations.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """One evaluation on held-out prompts. A response without a reward counts in no mean, and has not
    passed.
    """

    step: int
    """Steps that were completed before it."""
    version: int
    """Version of the policy that answered."""
    num_prompts: int
    num_samples: int
    """Responses a prompt; one is greedy."""
    reward_mean: float | None
    """Mean over the rewards that are present; None when every one is missing."""
    num_missing_rewards: int
    pass_at: Mapping[str, float]
    """pass@k by k, mean over the prompts."""
    length_mean: float
    """Mean length of the responses, tokens."""
    num_cut: int
    """Responses that reached the length limit."""
    seconds: float


def scalars(record: EvaluationRecord) -> Iterator[tuple[str, float]]:
    """The record as (tag, value) pairs; an absent value is left out."""
    if record.reward_mean is not None:
        yield "evaluation/reward_mean", record.reward_mean
    yield from ((f"evaluation/pass_at_{k}", value) for k, value in record.pass_at.items())
    yield "evaluation/length_mean", record.length_mean
    yield "evaluation/cut", record.num_cut
    yield "evaluation/missing", record.num_missing_rewards
    yield "evaluation/seconds", record.seconds


def append_evaluation(run_folder: Path, record: EvaluationRecord) -> None:
    """Add a line, atomically. Those at or beyond its step are dropped: a run that went back measures
    again.
    """
    path = run_folder / EVALUATIONS_FILE
    kept = [earlier for earlier in read_evaluations(run_folder) if earlier.step < record.step]
    draft = path.with_suffix(".draft")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(asdict(each))}\n" for each in (*kept, record))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_evaluations(run_folder: Path) -> list[EvaluationRecord]:
    """All of a run, in order; empty where there were none."""
    path = run_folder / EVALUATIONS_FILE
    if not path.exists():
        return []
    return [EvaluationRecord(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
