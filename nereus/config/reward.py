"""Where the reward of a response comes from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nereus.config.frozen import Frozen
from nereus.config.paths import FunctionPath, InputPath


class PythonReward(Frozen):
    """A reward from a Python function, run in processes of its own with a time limit."""

    kind: Literal["python"] = "python"
    function: FunctionPath
    """`package.module:function` or `path/to/file.py:function`."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of one call, seconds. A call over it is a missing reward."""
    workers: int = Field(default=1, ge=1)
    """Number of reward processes."""
    batched: bool = False
    """Call the function once with lists instead of once a response."""


class ReasoningGymReward(Frozen):
    """The score that the reasoning-gym task itself gives; prompts must come from reasoning-gym."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of one score, seconds."""
    workers: int = Field(default=1, ge=1)
    """Number of reward processes."""


class ModelReward(Frozen):
    """A reward model: the value of its scalar head at the last token of the response."""

    kind: Literal["model"] = "model"
    path: InputPath
    """Folder of the reward model."""
