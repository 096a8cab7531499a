"""When an evaluation is due, and what its numbers are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError

from nereus.config import EvaluationConfig
from nereus.tasks.evaluate import is_due, mean_pass_at

SOURCE = {"kind": "python", "function": "p.py:f"}


def due_steps(evaluation: EvaluationConfig | None, steps: int) -> list[int]:
    def job(step: int) -> Any:
        config = SimpleNamespace(evaluation=evaluation, steps=steps)
        return cast(Any, SimpleNamespace(config=config, state=SimpleNamespace(step=step)))

    return [step for step in range(steps + 1) if is_due(job(step))]


def make(**values: Any) -> EvaluationConfig:
    return EvaluationConfig.model_validate({"source": SOURCE} | values)


def test_it_is_due_before_the_first_step_every_so_many_and_after_the_last() -> None:
    assert due_steps(make(every_steps=3), 8) == [0, 3, 6, 8]
    assert due_steps(make(every_steps=3, at_start=False), 6) == [3, 6]
    assert due_steps(None, 6) == []


def test_pass_at_k_is_the_mean_over_prompts() -> None:
    passed_b = torch.tensor([True, False, False, False, True, True, True, True, False, False, False, False])
    assert mean_pass_at(passed_b, 4, 1) == pytest.approx((0.25 + 1 + 0) / 3)
    assert mean_pass_at(passed_b, 4, 4) == pytest.approx(2 / 3)
    assert mean_pass_at(passed_b, 1, 1) == pytest.approx(5 / 12)


def test_more_cannot_be_drawn_than_there_are_samples() -> None:
    with pytest.raises(ValidationError, match=r"pass_at has \[8\].*samples = 4"):
        make(samples=4, pass_at=(1, 8))
