"""Prompts of the count task: letters drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterator

from cycle import LETTERS


def prompts(num_prompts: int = 512, seed: int = 0) -> Iterator[dict[str, str]]:
    """Records {"prompt": letter, "answer": letter}; the tokenizer puts <bos> before and <sep> after the
    letter.
    """
    draw = random.Random(seed)
    for _ in range(num_prompts):
        letter = draw.choice(LETTERS)
        yield {"prompt": letter, "answer": letter}
