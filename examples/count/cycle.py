"""The count task: a prompt names a letter of a cycle of 16, the answer goes on from it for as long as it can.

Chosen because its responses grow about 16-fold while it is learned: from the 8 tokens of the warm start to
the limit of 128. A vocabulary of 32 and a model of 367,232 parameters make a step cost a fraction of a CPU
second.
"""

from __future__ import annotations

PAD, BOS, EOS, SEP = range(4)
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<sep>")
LETTERS = "abcdefghijklmnop"
FIRST_LETTER = 4  # token id of "a"
VOCAB_SIZE = 32
MAX_NEW_TOKENS = 128


def continuation(letter: str, length: int) -> list[int]:
    """Token ids of the `length` letters that follow `letter` in the cycle."""
    start = LETTERS.index(letter)
    return [FIRST_LETTER + (start + 1 + i) % len(LETTERS) for i in range(length)]
