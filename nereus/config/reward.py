"""Where the reward of a response comes from."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, model_validator

from nereus.config.frozen import Frozen
from nereus.config.paths import FunctionPath, InputPath


class PythonReward(Frozen):
    """A reward from a Python function, run in processes of its own with a time limit."""

    kind: Literal["python"] = "python"
    function: FunctionPath
    """`package.module:function` or `path/to/file.py:function`."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of one call, seconds. A call over it is a missing reward."""
    workers: int | None = Field(default=None, ge=1)
    """Number of reward processes; null: as many as end before they are waited for, chosen between steps from
    what was measured.
    """
    batched: bool = False
    """Call the function once with lists instead of once a response."""


class ReasoningGymReward(Frozen):
    """The score that the reasoning-gym task itself gives; prompts must come from reasoning-gym."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of one score, seconds."""
    workers: int | None = Field(default=None, ge=1)
    """Number of reward processes; null: as many as end before they are waited for, chosen between steps from
    what was measured.
    """


class ModelReward(Frozen):
    """A reward model: the value of its scalar head at the last token of the response."""

    kind: Literal["model"] = "model"
    path: InputPath
    """Folder of the reward model."""


class CodeReward(Frozen):
    """Run the program in a response against the prompt's tests, in a sandbox of its own (Linux)."""

    kind: Literal["code"] = "code"
    tests: str | None = None
    """Column of the tests; by default the reference answer. A list of {input, output}, an object
    {inputs, outputs}, or Python code that asserts.
    """
    program: Literal["block", "continuation"] = "block"
    """Where the program is: the last fenced block of the response (else all of it), or prompt and response
    together.
    """
    counts: Literal["all", "share"] = "all"
    """1 where all tests pass, else 0; or the share of tests that pass."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of all tests of one response, seconds. A program over it passes nothing more."""
    memory_gb: float = Field(default=1.0, ge=0.0625)
    """Address space of each process of the program, GB."""
    processes: int = Field(default=8, ge=1)
    """Processes and threads that a program may have at once."""
    isolation: Literal["namespaces", "limits"] = "namespaces"
    """namespaces: the program sees no network, no file of yours and no other process. limits: for machines
    that forbid namespaces; only time, memory and file size are limited, and it may do whatever the user who
    runs the job may do.
    """
    workers: int | None = Field(default=None, ge=1)
    """Responses that are tested at the same time; null: as many as end before they are waited for, chosen
    between steps from what was measured.
    """


class JudgeReward(Frozen):
    """Ask a language model for a score, at an address that speaks OpenAI's chat completions."""

    kind: Literal["judge"] = "judge"
    url: str = Field(pattern=r"^https?://[^\s/@]+(/[^\s?@]*)?$")
    """Base address without credentials, e.g. `https://api.openai.com/v1`; `/chat/completions` is added."""
    model_name: str
    """Name of the model that judges, as the address knows it."""
    prompt: str = (
        "Grade how well the answer solves the task.\n\n<task>\n{prompt}\n</task>\n\n"
        "<reference>\n{ground_truth}\n</reference>\n\n<answer>\n{response}\n</answer>\n\n"
        "Explain briefly, then end with a line `Score: N`, where N is from 0 (useless) to 10 (perfect)."
    )
    """What the judge is asked; {prompt}, {response} and {ground_truth} are filled in."""
    score: str = r"(?i)score\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the score; its last match in the judge's answer counts."""
    lowest: float = 0.0
    """The score that is reward 0."""
    highest: float = 10.0
    """The score that is reward 1; a score outside is a missing reward."""
    api_key_variable: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the environment variable that holds the key, never the key itself."""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 512})
    """Further fields of every request."""
    concurrency: int = Field(default=16, ge=1)
    """Requests under way at the same time."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one request, seconds."""
    retries: int = Field(default=4, ge=0)
    """Further tries of a request that timed out, was refused for its rate, or failed on the judge's side."""

    @model_validator(mode="after")
    def _can_be_read(self) -> JudgeReward:
        if "{response}" not in self.prompt:
            raise ValueError("reward.prompt has no {response}; the judge must see what it grades")
        try:
            num_groups = re.compile(self.score).groups
        except re.error as error:
            raise ValueError(f"reward.score is no regular expression: {error}") from error
        if num_groups < 1:
            raise ValueError(f"reward.score = {self.score!r} has no group; put the number into parentheses")
        if not self.lowest < self.highest:
            raise ValueError(
                f"reward.lowest = {self.lowest:g} is not below reward.highest = {self.highest:g}"
            )
        return self
