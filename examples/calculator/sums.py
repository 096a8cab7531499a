"""The calculator task: add two numbers. The model cannot, but it may ask a tool.

    prompt  37+58=        asks  37+58= (37+58) 095= 095<eos>     guesses  37+58= 140<eos>
                                       ~~~~~~~ what the model writes is between, the tool says 095=

A turn that ends with `)` is a question. Numbers have two digits and sums three, so that what is to be copied
is always at the same distance: a model of two layers learns it in seconds.
"""

from __future__ import annotations

import random

PAD, BOS, EOS = range(3)
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "0123456789+=()"
VOCAB_SIZE = 20
CALL_END = len(SPECIAL_TOKENS) + CHARACTERS.index(")")  # 16: sampling.stop_token_ids


def encode(text: str) -> list[int]:
    """Token ids, a character each."""
    return [len(SPECIAL_TOKENS) + CHARACTERS.index(character) for character in text]


def draw_sum(draw: random.Random) -> tuple[str, str]:
    """A question such as `37+58` and its answer, `095`."""
    a, b = draw.randrange(100), draw.randrange(100)
    return f"{a:02d}+{b:02d}", f"{a + b:03d}"
