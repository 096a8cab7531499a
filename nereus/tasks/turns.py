"""The turns of a step's rows: the policy writes, a tool answers, the policy goes on. Here stands the loop.

    engine ── a turn, ended by a stop token ──▶ Growing ── text ──▶ tool process ──▶ observation
       ▲                                           ▲                                    │ encoded
       └────────────── prompt with all tokens ─────┴────────────────────────────────────┘

The policy's tokens stay the engine's own ids; only what a tool says is made from text. A response ends with a
turn of the policy: after the last turn allowed, when the tool returns None or nothing that has a token, or
where an observation would leave no room for a token after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from nereus.config import ToolsConfig
from nereus.data.prompt import Prompt
from nereus.data.tokenizer import Tokenizer
from nereus.emu.batch import PromptBatch, Rollouts
from nereus.errors import DataError, explain
from nereus.rewards.function import Json
from nereus.rewards.pool import WAKE_S
from nereus.rewards.tools import Observation, ToolRequest, Tools
from nereus.tasks.growing import Growing


@dataclass(kw_only=True)
class Turns:
    """Rows in conversation with the tools; `feeding.Rows`. Without tools a row that stops is whole.

    `prompt_of_row` are the prompts of the rows, `vocab_size` is the model's.
    """

    growing: Growing
    prompt_of_row: Sequence[Prompt]
    tokenizer: Tokenizer
    vocab_size: int
    config: ToolsConfig | None = None
    tools: Tools | None = None
    _num_turns: list[int] = field(init=False)
    _states: list[Json] = field(init=False)
    _away: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._num_turns = [0] * len(self.prompt_of_row)
        self._states = [None] * len(self.prompt_of_row)

    @property
    def come_back(self) -> bool:
        """Rows do, where there are tools."""
        return self.tools is not None

    def prompts(self, rows: Sequence[int]) -> PromptBatch:
        """The rows with all of their tokens so far."""
        return self.growing.to_go_on(rows)

    def take(self, rows: Sequence[int], part: Rollouts) -> None:
        """A piece that the policy has drawn of these rows; a tool is called for each turn that it ends."""
        self.growing.add(rows, part)
        for row, stopped in zip(rows, part.stopped_b.tolist(), strict=True):
            self._num_turns[row] += stopped
            if stopped and self._may_go_on(row):
                self._away.add(row)
                self._ask(row)

    def back(self, *, wait: bool) -> Sequence[int]:
        """The rows that have an observation and go on, since this was last asked."""
        if self.tools is None:
            return ()
        while True:
            found = self.tools.results(wait_s=WAKE_S if wait else 0.0)
            rows = [row for row, told in found.items() if self._observe(row, told)]
            self._away -= found.keys()
            if rows or not wait or not self._away:
                return rows

    def settle(self) -> None:
        """Wait until no row waits for a tool."""
        while self._away:
            self.back(wait=True)

    def begin_again(self) -> None:
        """Call the tools anew whose answers were lost in a failure."""
        if self.tools is not None:
            self.tools.drop()
            for row in sorted(self._away):
                self._ask(row)

    def _may_go_on(self, row: int) -> bool:
        """Whether another turn, after an observation of one token, is allowed and has room."""
        if self.config is None:
            return False
        return self._num_turns[row] < self.config.max_turns and self.growing.room(row) > 1

    def _ask(self, row: int) -> None:
        assert self.tools is not None, "who is asked is there"
        prompt, (ids, drawn) = self.prompt_of_row[row], self.growing.response(row)
        turns = tuple(self.tokenizer.decode(part) for part in turns_of(ids, drawn))
        request = ToolRequest(
            sample_id=prompt.sample_id,
            prompt=prompt.text,
            response=self.tokenizer.decode(ids),
            turn=turns[-1],
            turns=turns,
            state=self._states[row],
            ground_truth=prompt.ground_truth,
            extra=prompt.extra,
        )
        self.tools.submit(row, request)

    def _observe(self, row: int, told: Observation) -> bool:
        """Put the observation after the row's turn; whether the row goes on."""
        assert self.config is not None, "tools are configured"
        if told.reason is None:
            self._states[row] = told.state
        if told.text is None:
            return False
        text_ids = self._encoded(self.config.template.replace("{observation}", told.text))
        if len(text_ids) > self.config.max_observation_tokens:
            text_ids = self._cut(told.text)
        if not text_ids or len(text_ids) >= self.growing.room(row):
            return False
        self.growing.observe(row, text_ids)
        return True

    def _cut(self, text: str) -> tuple[int, ...]:
        """An observation that is too long, cut at its end; what stands around it stays whole."""
        assert self.config is not None, "tools are configured"
        before, after = map(self._encoded, self.config.template.split("{observation}"))
        left = max(0, self.config.max_observation_tokens - len(before) - len(after))
        return (*before, *self._encoded(text)[:left], *after)

    def _encoded(self, text: str) -> tuple[int, ...]:
        (ids,) = self.tokenizer.encode([text], add_special_tokens=False)
        if ids and max(ids) >= self.vocab_size:
            raise DataError(
                explain(
                    "cannot use what a tool returned",
                    values=f"{text!r:.80} has token {max(ids)}",
                    rule=f"the model's vocabulary ends at {self.vocab_size - 1}",
                    remedy="set models.tokenizer to the model's own",
                )
            )
        return ids


def turns_of(ids: Sequence[int], drawn: Sequence[bool]) -> list[tuple[int, ...]]:
    """The token ids of each of the policy's turns: the stretches that it drew; one empty turn where it drew
    nothing.
    """
    stretches = groupby(zip(ids, drawn, strict=True), key=lambda pair: pair[1])
    return [tuple(token for token, _ in part) for is_drawn, part in stretches if is_drawn] or [()]


def turn_stats(rollouts: Rollouts) -> dict[str, float]:
    """What a step's record tells of turns: how many a response has, and how long what the policy drew and
    what it observed is, in tokens.
    """
    policy_bt = rollouts.policy_mask()
    begins_bt = policy_bt & ~torch.nn.functional.pad(policy_bt, (1, -1))
    turns_b, drawn_b = begins_bt.sum(dim=-1).float(), policy_bt.sum(dim=-1).float()
    return {
        "turns/mean": float(turns_b.mean()),
        "turns/max": float(turns_b.max()),
        "policy_tokens/mean": float(drawn_b.mean()),
        "observed_tokens/mean": float((rollouts.batch.response_lens_b - drawn_b).mean()),
    }
