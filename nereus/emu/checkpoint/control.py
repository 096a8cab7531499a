"""The control record: everything a resumed campaign needs besides tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nereus.errors import CheckpointError, explain


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecord:
    """Where one model's optimizer stands: Adam steps taken (for the bias correction), last learning rate."""

    adam_steps: int
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """State of the campaign after `step` completed steps.

    `epoch` and `position` are the data cursor, in prompts. `config_digest` names the configuration that was
    running. `counters` are integers that must not start over (random streams beyond (seed, step), rollouts
    made); `scalars` are slow floats (adaptive KL coefficient, estimator averages). `prompt_lengths` are mean
    response lengths in tokens by a prompt's key (`nereus.tasks.length_history`); checkpoints alone have them.
    """

    step: int
    policy_version: int
    epoch: int
    position: int
    seed: int
    config_digest: str
    optimizers: Mapping[str, OptimizerRecord] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    prompt_lengths: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """A JSON object; floats are written so that they read back to the same bits."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Control:
        """The inverse of `to_json`. Raises CheckpointError for anything else."""
        try:
            raw: dict[str, Any] = json.loads(text)
            records = {name: OptimizerRecord(**record) for name, record in raw.pop("optimizers").items()}
            return cls(optimizers=records, **raw)
        except (json.JSONDecodeError, KeyError, TypeError) as problem:
            raise CheckpointError(
                explain(
                    "cannot read a checkpoint's control record",
                    values=repr(problem),
                    rule="it must hold the fields of this version",
                    remedy="resume with the version that wrote it",
                )
            ) from problem
