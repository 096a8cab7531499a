"""Choosing tokens: counter-based uniforms, top-p, and a descent by vocabulary blocks.

Letters: b rows, v vocabulary, n positions, d draws a position.

A uniform depends on (seed, stream, step, sample id, position, draw) and nothing else, and blocks are in
vocabulary order, so a sample does not move with the layout, the batch it shares, or the order of rows.

Layouts and batches do differ in the last bits of a logit. Inverting one cumulative sum over the vocabulary
lets that noise move every one of its v boundaries, and samples with them: with noise of 2e-6 in the logits,
50 tokens in a million at v = 512 and 1,600 at v = 49,152. Choosing a block of blocks, then a block, then a
token, each with a uniform of its own, leaves only the boundaries on the way down: 8, and none of 10,000.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nereus.emu.batch import Sampling

GENERATION = 1  # the stream of random numbers that decoding draws from

Words = NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15  # the increment of SplitMix64 (Steele, Lea and Flood 2014)
_BLOCK = 32  # choices at each level of the descent
_MAX_DRAWS = 8  # levels that a position's counter leaves room for: 32^8 tokens
_TRIES = (256, 4096)  # numbers of candidates tried before a row is sorted whole


def num_draws(vocab_size: int) -> int:
    """Uniforms that one token takes: the levels of the descent."""
    levels = 1
    while _BLOCK**levels < vocab_size:
        levels += 1
    return levels


def uniforms(
    sampling: Sampling,
    sample_ids_b: Tensor,
    *,
    first: int,
    num_positions: int,
    draws: int,
    stream: int = GENERATION,
) -> Tensor:
    """Uniform numbers in [0, 1) for positions `first` and on of each sample; float64 [n, d, b].

    Each (seed, stream, step, sample id) starts a SplitMix64 sequence of its own, in which position and draw
    count, so any number is had without those before it.
    """
    assert draws <= _MAX_DRAWS, f"{draws} draws a token"
    positions_n1: Words = np.arange(first, first + num_positions).astype(np.uint64)[:, None]
    return _uniforms(sampling, stream, sample_ids_b, positions_n1, draws).transpose(0, 1)


def uniforms_at(
    sampling: Sampling, sample_ids_b: Tensor, positions_b: Tensor, *, draws: int, stream: int = GENERATION
) -> Tensor:
    """The same numbers for rows that are not at one position; float64 [d, b]."""
    assert draws <= _MAX_DRAWS, f"{draws} draws a token"
    return _uniforms(sampling, stream, sample_ids_b, positions_b.numpy().astype(np.uint64), draws)


def _uniforms(sampling: Sampling, stream: int, ids_b: Tensor, positions: Words, draws: int) -> Tensor:
    """Float64 [d, ...] in the shape of positions and ids together."""
    key: Words = np.zeros(1, dtype=np.uint64)
    for field in (sampling.seed, stream, sampling.step):
        key = _mix(key + _word(field))
    words_b: Words = ids_b.cpu().numpy().astype(np.int64).view(np.uint64)
    starts_b = _mix(key + words_b * np.uint64(_GOLDEN))
    counted = [positions * np.uint64(_MAX_DRAWS) + np.uint64(draw) for draw in range(1, draws + 1)]
    bits: Words = _mix(np.stack([starts_b + counts * np.uint64(_GOLDEN) for counts in counted]))
    # 52 bits, so that a uniform times a float64 total always stays below the total.
    return torch.from_numpy((bits >> np.uint64(12)).astype(np.float64) * 2.0**-52)


def _word(value: int) -> np.uint64:
    return np.uint64((value * _GOLDEN + _GOLDEN) & 0xFFFFFFFFFFFFFFFF)


def _mix(x: Words) -> Words:
    """SplitMix64's output function: a bijection of 64 bits in which every input bit moves every output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: Words = x ^ (x >> np.uint64(31))
    return out


def sample(
    logits_bv: Tensor,
    uniforms_db: Tensor | None,
    greedy_b: Tensor | None = None,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [b] and their float32 log-probabilities [b] under softmax(logits / temperature).

    Rows where `greedy_b` is true, and all rows when `uniforms_db` is None, take the largest logit. Top-k, and
    top-p of what it leaves, narrow the choice and not the log-probabilities. float32 logits are overwritten.
    """
    scaled_bv = logits_bv.float()
    if temperature != 1.0:
        scaled_bv = scaled_bv.div_(temperature)
    peak_b1 = scaled_bv.amax(dim=-1, keepdim=True)
    weights_bv = torch.exp(scaled_bv - peak_b1)
    total_b = weights_bv.sum(dim=-1)
    if uniforms_db is None:
        tokens_b = scaled_bv.argmax(dim=-1)
    else:
        kept_bv = weights_bv if top_k is None else likeliest(weights_bv, top_k)
        if top_p < 1.0:
            kept_bv = nucleus(kept_bv, total_b if top_k is None else kept_bv.sum(dim=-1), top_p)
        tokens_b = descend(kept_bv, uniforms_db)
        if greedy_b is not None:
            tokens_b = torch.where(greedy_b, scaled_bv.argmax(dim=-1), tokens_b)
    chosen_b = scaled_bv.gather(1, tokens_b[:, None])[:, 0]
    return tokens_b, chosen_b - peak_b1[:, 0] - total_b.log()


def likeliest(weights_bv: Tensor, num: int) -> Tensor:
    """The weights with all but the `num` largest of each row set to zero."""
    if num >= weights_bv.shape[1]:
        return weights_bv
    largest_bn, index_bn = weights_bv.topk(num, dim=-1)
    return torch.zeros_like(weights_bv).scatter_(1, index_bn, largest_bn)


def nucleus(weights_bv: Tensor, total_b: Tensor, top_p: float) -> Tensor:
    """The weights with all but the nucleus set to zero.

    The nucleus is the smallest set of most likely tokens whose share reaches `top_p` (Holtzman et al. 2020).
    Sorting a whole vocabulary is slow, so the few largest are tried first; a row that needs more is tried
    again by itself, and its outcome does not depend on the rows beside it.
    """
    width = weights_bv.shape[1]
    kept_bv = torch.zeros_like(weights_bv)
    rest = torch.arange(len(weights_bv), device=weights_bv.device)
    for num in (*(num for num in _TRIES if num < width), width):
        part_bv, reached_b = _keep_largest(weights_bv[rest], total_b[rest], top_p, num)
        kept_bv[rest] = part_bv
        rest = rest[~reached_b]
        if num == width or not len(rest):
            break
    return kept_bv


def _keep_largest(weights_bv: Tensor, total_b: Tensor, top_p: float, num: int) -> tuple[Tensor, Tensor]:
    largest_bn, index_bn = weights_bv.topk(num, dim=-1)
    reached_bn = largest_bn.cumsum(dim=-1, dtype=torch.float64)
    goal_b1 = top_p * total_b.double()[:, None]
    inside_bn = (reached_bn - largest_bn) < goal_b1  # the token that crosses the goal is inside
    kept_bv = torch.zeros_like(weights_bv).scatter_(1, index_bn, largest_bn * inside_bn)
    return kept_bv, reached_bn[:, -1] >= goal_b1[:, 0]


def descend(weights_bv: Tensor, uniforms_db: Tensor) -> Tensor:
    """A token with probability proportional to its weight; int64 [b]. Weights are float32 and not negative.

    From the top: among 32 blocks, the first whose cumulative weight exceeds uniform * total, then inside it.
    A block's sum is rounded, at most one part in a million; a token of weight zero is never chosen.
    """
    levels = [_in_blocks(weights_bv)]
    while levels[-1].shape[1] > 1:
        levels.append(_in_blocks(levels[-1].sum(dim=-1)))
    rows_b = torch.arange(len(weights_bv), device=weights_bv.device)
    chosen_b = torch.zeros_like(rows_b)
    for blocks_bkv, uniforms_b in zip(reversed(levels), uniforms_db, strict=True):
        block_bv = blocks_bkv[:, 0] if blocks_bkv.shape[1] == 1 else blocks_bkv[rows_b, chosen_b]
        reached_bv = block_bv.cumsum(dim=-1, dtype=torch.float64)
        goal_b1 = (uniforms_b * reached_bv[:, -1])[:, None]
        chosen_b = chosen_b * _BLOCK + (reached_bv <= goal_b1).sum(dim=-1)
    return chosen_b


def _in_blocks(x_bv: Tensor) -> Tensor:
    return F.pad(x_bv, (0, -x_bv.shape[1] % _BLOCK)).view(len(x_bv), -1, _BLOCK)
