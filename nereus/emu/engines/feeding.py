"""Answering rows that come a few at a time: what an engine offers whose units take work from a common pool.

driver ── feed(first rows, begin, more) ──▶ engine decodes until slots are free ──▶ Fed: what is whole
       ── feed(next rows, more) ──────────▶ ... goes on with the rows that run ──▶ Fed
       ── feed(last rows, not more) ──────▶ ... to the end ──────────────────────▶ Fed: the rest
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from nereus.emu.batch import PromptBatch, Rollouts, Sampling


@dataclass(frozen=True, kw_only=True)
class Fed:
    """The responses that became whole; `rows_n` are their numbers in the order in which rows were fed."""

    rows_n: Tensor
    rollouts: Rollouts | None
    """None where there are none."""


@runtime_checkable
class FeedEngine(Protocol):
    """A `GenerateEngine` whose cache lives on between calls."""

    def feed(self, prompts: PromptBatch, sampling: Sampling, version: int, *, begin: bool, more: bool) -> Fed:
        """Answer these rows beside those that run. With `more` it returns as soon as there is room for others
        and nobody waits, after a few tokens where no rows came with the call; else when all are whole.

        `begin` starts anew, with as many rows at once as come then; what was running is dropped. Responses do
        not depend on which rows run together. Collective over the unit.
        """
        ...
