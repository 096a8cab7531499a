"""How long the responses to a prompt were: what says which rows to begin first. Pure.

A row that is begun late and becomes long keeps its unit busy when all others are done. Lengths of one prompt
are alike from one pass over the data to the next, so what it took last tells who should begin early. It goes
into checkpoints, so that a run that continues begins its rows in the same order.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from nereus.emu.batch import PromptBatch

NEWEST = 0.5  # weight of the newest pass in a prompt's mean


@dataclass(kw_only=True)
class LengthHistory:
    """Mean response length by prompt, newest passes first in weight."""

    _means: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, means: Mapping[str, float]) -> LengthHistory:
        """The history that had these `means`."""
        return cls(_means=dict(means))

    @property
    def means(self) -> Mapping[str, float]:
        """Mean length in tokens by the prompt's key: a digest of its tokens."""
        return dict(self._means)

    def longest_first(self, prompts: PromptBatch) -> list[int]:
        """The rows in the order of their expected lengths, those of unknown prompts where the mean of all
        known ones is; as they are where nothing is known.
        """
        keys = _keys(prompts)
        known = [self._means[key] for key in keys if key in self._means]
        usual = sum(known) / len(known) if known else 0.0
        return sorted(range(len(keys)), key=lambda row: -self._means.get(keys[row], usual))

    def add(self, prompts: PromptBatch, lens_b: Tensor) -> None:
        """The response lengths of these rows."""
        lengths: dict[str, list[int]] = {}
        for key, length in zip(_keys(prompts), lens_b.tolist(), strict=True):
            lengths.setdefault(key, []).append(length)
        for key, of_prompt in lengths.items():
            mean = sum(of_prompt) / len(of_prompt)
            self._means[key] = NEWEST * mean + (1 - NEWEST) * self._means.get(key, mean)


def _keys(prompts: PromptBatch) -> Sequence[str]:
    lens = prompts.lens_b.tolist()
    return [_key(tokens[:num]) for tokens, num in zip(prompts.tokens_bs.tolist(), lens, strict=True)]


def _key(tokens: Sequence[int]) -> str:
    packed = struct.pack(f"<{len(tokens)}q", *tokens)
    return hashlib.blake2b(packed, digest_size=10).hexdigest()
