"""Prompts of the calculator task: sums drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterator

from sums import draw_sum


def prompts(num_prompts: int = 512, seed: int = 0) -> Iterator[dict[str, str]]:
    """Records {"prompt": "37+58=", "answer": "095"}."""
    draw = random.Random(seed)
    for _ in range(num_prompts):
        question, answer = draw_sum(draw)
        yield {"prompt": f"{question}=", "answer": answer}
