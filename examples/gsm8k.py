"""Reward of GSM8K: the final number, right or wrong.

For the columns question and answer of the original files, or verl's schema; ask for the format in the prompt,
e.g. with `prompts.source.suffix: " Let's think step by step and output the final answer after \"####\"."`
"""

from __future__ import annotations

import re
from decimal import Decimal

FINAL = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")


def reward(response: str, ground_truth: str) -> float:
    """1 if the number after the last "####" of the response is the reference's, else 0.

    The reference may be the whole solution with "#### 72" at its end, or the number alone. Commas are removed
    and numbers compared by value, so 1,000 and 1000.0 are the same.
    """
    wanted = final_number(ground_truth if "####" in ground_truth else f"#### {ground_truth}")
    if wanted is None:
        raise ValueError(f"the reference {ground_truth!r} holds no number after ####")
    return float(final_number(response) == wanted)


def final_number(text: str) -> Decimal | None:
    """The number after the last "####", or None."""
    found = FINAL.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None
