"""Step records for the tests: plausible, and settled by the step alone."""

from __future__ import annotations

import dataclasses

from nereus.record.step import StepRecord


def make_record(step: int, **changes: object) -> StepRecord:
    """The record of `step`, with some fields changed."""
    record = StepRecord(
        step=step,
        version=step,
        epoch=0,
        position=8 * (step + 1),
        reward_mean=0.5 + step,
        reward_min=0.0,
        reward_max=1.0 + 2 * step,
        num_missing_rewards=0,
        length_mean=12.5 + step,
        length_p95=20.0 + step,
        length_max=24 + step,
        prompt_tokens=64,
        response_tokens=800,
        stage_s={"generate": 1.0 + 0.05 * step, "learn actor": 2.0},
        step_s=3.25 + 0.05 * step,
        tokens_per_s=864 / (3.25 + 0.05 * step),
        memory_bytes={"worker 0": 2**30, "worker 1": 2**29 + step * 2**20},
        plan={"actor.training": "tp2 pp1 dp1 on 0,1", "actor.generation": "tp1 pp1 dp2 on 2,3"},
        learning_rate=1e-4,
        stats={"loss/actor": 0.25, "kl/actor": 0.01 * step},
        overhead_s=0.02,
    )
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]
