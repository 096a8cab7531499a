"""Where prompts come from, and how they become tokens."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from nereus.config.frozen import BY_KIND, Frozen
from nereus.config.paths import FunctionPath, InputPath


class FileData(Frozen):
    """Prompts from JSONL or parquet: a file, a folder of shards, or a Hugging Face datasets folder."""

    kind: Literal["file"] = "file"
    path: InputPath
    """File or folder."""
    prompt: str = "prompt"
    """Column of the prompt: text, or a list of chat messages with role and content."""
    answer: str | None = None
    """Column of the reference answer; by default the first of ground_truth, answer,
    reward_model.ground_truth.
    """
    suffix: str = ""
    """Text appended to every prompt (for chat prompts, to the last message)."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first so many prompts."""


class PythonData(Frozen):
    """Prompts from a Python function that returns an iterable of records with `prompt` and, if any,
    `answer`.
    """

    kind: Literal["python"] = "python"
    function: FunctionPath
    """`package.module:function` or `path/to/file.py:function`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""


class ReasoningGymData(Frozen):
    """A task of the reasoning-gym package, by name."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: str
    """Name of the task, e.g. `countdown`."""
    size: int = Field(default=1000, ge=1)
    """Number of problems."""
    seed: int = 42
    """Seed of the problems."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Options of the task."""


class LongPrompts(StrEnum):
    """What to do with a prompt above the limit."""

    skip = "skip"
    truncate_left = "truncate_left"


class PromptsConfig(Frozen):
    """Where prompts come from, and how they become tokens."""

    source: Annotated[FileData | PythonData | ReasoningGymData, BY_KIND]
    """The source of prompts."""
    chat_template: bool = False
    """Apply the tokenizer's chat template; otherwise prompts are plain text."""
    max_tokens: int = Field(default=1024, ge=1)
    """Longest prompt, in tokens."""
    too_long: LongPrompts = LongPrompts.skip
    """What to do with longer ones: skip and count them, or keep their last tokens."""
    shuffle: bool = True
    """Shuffle the prompts anew in every epoch, by the campaign's seed."""
