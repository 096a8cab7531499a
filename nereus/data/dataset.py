"""The prompts of a campaign, tokenized once and addressed by sample id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nereus.config import FileData, LongPrompts, PromptsConfig, PythonData
from nereus.data.files import Record, read_records
from nereus.data.generated import generate_records
from nereus.data.gym import gym_records
from nereus.data.order import PromptOrder
from nereus.data.prompt import Prompt
from nereus.data.schema import Message, Row, parse
from nereus.data.tokenizer import Tokenizer
from nereus.errors import DataError, explain

BATCH = 1024  # rows tokenized at once: the tokenizers library works in parallel inside a batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entry:
    row: Row
    text: str
    token_ids: npt.NDArray[np.int32]  # 4 bytes a token; a tuple of ints takes up to 36


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptDataset:
    """Prompts in the order of their source. What was left out or cut is counted, for the report."""

    entries: tuple[_Entry, ...]
    num_skipped: int
    num_truncated: int

    @property
    def num_prompts(self) -> int:
        """Number of prompts of one epoch."""
        return len(self.entries)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(entry.token_ids) for entry in self.entries)

    @property
    def highest_token_id(self) -> int:
        """The highest id in any prompt: must be below the model's vocabulary size."""
        return max(int(entry.token_ids.max()) for entry in self.entries)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all token ids and answers: a resumed job must meet the same prompts, or its position
        means nothing.
        """
        digest = hashlib.sha256()
        for entry in self.entries:
            digest.update(len(entry.token_ids).to_bytes(8, "little"))
            digest.update(entry.token_ids.astype("<i4").tobytes())
            digest.update(json.dumps(entry.row.ground_truth, sort_keys=True).encode() + b"\n")
        return digest.hexdigest()

    def order(self, *, seed: int, shuffle: bool) -> PromptOrder:
        """The order in which a campaign with this seed uses the prompts."""
        return PromptOrder(num_prompts=self.num_prompts, seed=seed, shuffle=shuffle)

    def prompts(self, sample_ids: Sequence[int]) -> tuple[Prompt, ...]:
        """The prompts of these sample ids (epoch * num_prompts + index), in their order."""
        return tuple(self._prompt(sample_id) for sample_id in sample_ids)

    def _prompt(self, sample_id: int) -> Prompt:
        entry = self.entries[sample_id % self.num_prompts]
        return Prompt(
            sample_id=sample_id,
            token_ids=tuple(entry.token_ids.tolist()),
            text=entry.text,
            ground_truth=entry.row.ground_truth,
            extra=entry.row.extra,
        )


def load_prompts(config: PromptsConfig, tokenizer: Tokenizer) -> PromptDataset:
    """Read, check and tokenize the prompts of a campaign.

    Prompts above `config.max_tokens` are left out, or keep their last tokens, as `config.too_long` says;
    both are counted. Every other defect raises DataError and names the record.
    """
    return tokenize(rows_of(config), config, tokenizer)


def rows_of(config: PromptsConfig) -> Iterator[Row]:
    """The rows of the configured source, in its order."""
    source = config.source
    if isinstance(source, FileData):
        records: Iterable[Record] = read_records(Path(source.path).expanduser())
        for record in islice(records, source.limit):
            yield _with_suffix(parse(record, prompt=source.prompt, answer=source.answer), source.suffix)
        return
    if isinstance(source, PythonData):
        records = generate_records(source.function, source.arguments)
    else:
        records = gym_records(name=source.name, size=source.size, seed=source.seed, config=source.config)
    yield from map(parse, records)


def _with_suffix(row: Row, suffix: str) -> Row:
    if isinstance(row.prompt, str):
        prompt: str | tuple[Message, ...] = row.prompt + suffix
    else:
        last = row.prompt[-1]
        prompt = (*row.prompt[:-1], Message(role=last.role, content=last.content + suffix))
    return Row(where=row.where, prompt=prompt, ground_truth=row.ground_truth, extra=row.extra)


def tokenize(rows: Iterable[Row], config: PromptsConfig, tokenizer: Tokenizer) -> PromptDataset:
    """The data set of these rows. Raises DataError when no prompt is left."""
    entries: list[_Entry] = []
    num_skipped = num_truncated = 0
    rows = iter(rows)
    while batch := list(islice(rows, BATCH)):
        texts = [_text(row, config, tokenizer) for row in batch]
        encoded = tokenizer.encode(texts, add_special_tokens=not config.chat_template)
        for row, text, token_ids in zip(batch, texts, encoded, strict=True):
            if not token_ids:
                raise DataError(explain(f"cannot use {row.where}", values=f"prompt {text!r} has no tokens"))
            if len(token_ids) > config.max_tokens:
                if config.too_long == LongPrompts.skip:
                    num_skipped += 1
                    continue
                num_truncated += 1
            kept = np.array(token_ids[-config.max_tokens :], dtype=np.int32)
            entries.append(_Entry(row=row, text=text, token_ids=kept))
    if not entries:
        raise DataError(
            explain(
                "cannot train without prompts",
                values=f"the source gave {num_skipped}, all above {config.max_tokens} tokens"
                if num_skipped
                else "the source is empty",
                remedy="raise prompts.max_tokens or set prompts.too_long to truncate_left"
                if num_skipped
                else "",
            )
        )
    return PromptDataset(entries=tuple(entries), num_skipped=num_skipped, num_truncated=num_truncated)


def _text(row: Row, config: PromptsConfig, tokenizer: Tokenizer) -> str:
    """What is tokenized: plain text, or the chat rendered by the template (a text prompt is one user's
    turn).
    """
    if config.chat_template:
        turns = (Message(role="user", content=row.prompt),) if isinstance(row.prompt, str) else row.prompt
        return tokenizer.render(turns)
    if not isinstance(row.prompt, str):
        raise DataError(
            explain(
                f"cannot use the prompt of {row.where} as plain text",
                values=f"it has {len(row.prompt)} chat turns",
                remedy="set prompts.chat_template to true",
            )
        )
    return row.prompt
