"""Reward of the count task: how far the answer goes on correctly."""

from __future__ import annotations

from collections.abc import Sequence

from cycle import EOS, MAX_NEW_TOKENS, continuation

PENALTY = 0.25  # of each token from the first wrong one on


def reward(response_token_ids: Sequence[int], ground_truth: str) -> float:
    """(correct tokens before the first wrong one - 0.25 x the tokens from it on) / 128, at least -1.

    A final <eos> is no token of the answer. By token ids and not by text, so that a special token counts as
    wrong.
    """
    body = list(response_token_ids)
    if body and body[-1] == EOS:
        body.pop()
    good = 0
    for token, wanted in zip(body, continuation(ground_truth, len(body)), strict=True):
        if token != wanted:
            break
        good += 1
    return max(-1.0, (good - PENALTY * (len(body) - good)) / MAX_NEW_TOKENS)
