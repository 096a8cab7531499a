"""Turns without Ray or processes: engines of this process as units, a function as tools."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from nereus.config import ToolsConfig
from nereus.data.prompt import Prompt
from nereus.emu.batch import PromptBatch, Sampling
from nereus.emu.cluster import Answer, Call
from nereus.emu.engines.torch.generate import TorchGenerator
from nereus.emu.layout import Rank
from nereus.rewards.tools import Observation, ToolRequest, Tools
from nereus.tasks.growing import Growing
from nereus.tasks.job import Job
from nereus.tasks.stages import GENERATION
from nereus.tasks.turns import Turns


class Letters:
    """A tokenizer whose token n is the n-th character from 'A'; ids that join are not what was joined."""

    eos_token_ids = ()

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
        assert not add_special_tokens, "an observation stands in the middle of a text"
        return [tuple(ord(letter) - 65 for letter in text) for text in texts]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(65 + token) for token in token_ids)

    def render(self, messages: Sequence[Any]) -> str:
        raise NotImplementedError


class Tool:
    """Stands for `Tools`: each answer comes after a number of times that it was asked for."""

    def __init__(
        self, function: Callable[[ToolRequest], Observation], delays: random.Random | None = None
    ) -> None:
        self.function, self._delays = function, delays
        self.asked: list[ToolRequest] = []
        self._away: dict[int, tuple[int, Observation]] = {}

    def submit(self, key: int, request: ToolRequest) -> None:
        assert key not in self._away, "a row has one call at a time"
        self.asked.append(request)
        delay = 0 if self._delays is None else self._delays.randrange(6)
        self._away[key] = (delay, self.function(request))

    def results(self, *, wait_s: float) -> dict[int, Observation]:
        found = {key: told for key, (delay, told) in self._away.items() if delay == 0}
        self._away = {key: (delay - 1, told) for key, (delay, told) in self._away.items() if delay > 0}
        return found

    def drop(self) -> None:
        self._away.clear()


class Units:
    """Stands for the cluster: a unit is a generator of this process, and answers come in any order."""

    def __init__(self, generators: Sequence[TorchGenerator], draw: random.Random) -> None:
        self.generators, self._draw = generators, draw
        self.calls: list[tuple[Rank, int, bool]] = []

    def converse(
        self,
        first: Mapping[Rank, Call],
        then: Callable[[Answer], Mapping[Rank, Call]],
        *,
        what: str,
        between: Callable[[bool], Mapping[Rank, Call]] | None = None,
    ) -> None:
        pending = dict(first)
        while True:
            if between is not None:
                more = between(not pending)
                assert not pending.keys() & more.keys(), "a unit works at one call at a time"
                pending |= more
            if not pending:
                return
            rank = self._draw.choice(sorted(pending))
            call = pending.pop(rank)
            _, part, sampling, version, begin, goes_on = call.arguments
            self.calls.append((rank, part.num_rows, goes_on))
            fed = self.generators[rank].feed(part, sampling, version, begin=begin, more=goes_on)
            pending |= then(Answer(rank=rank, call=call, result=fed, seconds=0.0))


def job_with(units: Units) -> Job:
    """A job that has nothing but a generation stage."""
    layouts = tuple(SimpleNamespace(ranks=(rank,)) for rank in range(len(units.generators)))
    stage = SimpleNamespace(units=layouts, engine="torch", resident_rows=None)
    config = SimpleNamespace(sampling=SimpleNamespace(max_rows=None))
    return cast(Job, SimpleNamespace(cluster=units, stages={GENERATION: stage}, config=config))


def turns_of_rows(
    prompts: PromptBatch, sampling: Sampling, tool: Tool | None, *, vocab_size: int, **settings: Any
) -> Turns:
    """Rows that have not begun."""
    of_row = [
        Prompt(sample_id=int(number), token_ids=(), text=f"prompt {number}", ground_truth=int(number))
        for number in prompts.sample_ids_b
    ]
    config = ToolsConfig.model_validate({"function": "tools.py:f"} | settings)
    return Turns(
        growing=Growing(prompts=prompts, max_new_tokens=sampling.max_new_tokens),
        prompt_of_row=of_row,
        tokenizer=Letters(),
        vocab_size=vocab_size,
        config=None if tool is None else config,
        tools=cast(Tools | None, tool),
    )
