"""Which ranks each model-stage takes, with every TP group inside a node.

What keeps its GPUs through inference and another stage (generation on GPUs of its own, a critic that
shares its layout) goes to the left end of its pool; everything else is placed stage by stage from the
right end:

    [ generation of its own | shared critic ──▶      free      ◀── everything else of the stage ]

Where the models of a stage run in turn each starts at its end again. Both ends take larger tp first.
Sizes of TP groups divide the node, so each start is aligned to the group that begins there, and one free
stretch is left in the middle: whatever the GPU counts allow can be placed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nereus.errors import InvalidLayout, explain
from nereus.planner.problem import INFERENCE, NUM_STAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """GPUs to place together: `num_gpus` in TP groups of `tp`, on a pool, taken in `stages`."""

    name: str
    tp: int
    num_gpus: int
    pool: int
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """GPUs of a pool and of each of its nodes."""

    num_gpus: int
    gpus_per_node: int


def place(
    blocks: Sequence[Block], pools: Sequence[PoolSize], in_turn: frozenset[int] = frozenset()
) -> dict[str, tuple[int, ...]]:
    """The ranks of every block, by name. Ranks of pool k follow those of the pools before it.

    Blocks of a stage `in_turn` may overlap.

    Assumes that each stage fits its pool by count. Raises InvalidLayout if a TP group would straddle two
    nodes, which powers of two never do.
    """
    placed: dict[str, tuple[int, ...]] = {}
    offset = 0
    for number, pool in enumerate(pools):
        for block, first in _on_pool([block for block in blocks if block.pool == number], pool, in_turn):
            _check(block, first, pool)
            placed[block.name] = tuple(range(offset + first, offset + first + block.num_gpus))
        offset += pool.num_gpus
    return placed


def _on_pool(blocks: Sequence[Block], pool: PoolSize, in_turn: frozenset[int]) -> list[tuple[Block, int]]:
    """Each block with its first GPU in the pool."""
    placed: list[tuple[Block, int]] = []
    wide_first = sorted(blocks, key=lambda block: (-block.tp, block.name))
    lasting = [block for block in wide_first if len(block.stages) > 1 and INFERENCE in block.stages]
    start = 0
    for block in lasting:
        placed.append((block, start))
        start += block.num_gpus
    for stage in range(NUM_STAGES):
        end = pool.num_gpus
        for block in wide_first:
            if block not in lasting and max(block.stages) == stage:
                placed.append((block, end - block.num_gpus))
                end -= 0 if stage in in_turn else block.num_gpus
    return placed


def _check(block: Block, first: int, pool: PoolSize) -> None:
    for group in range(first, first + block.num_gpus, block.tp):
        if group // pool.gpus_per_node != (group + block.tp - 1) // pool.gpus_per_node:
            raise InvalidLayout(
                explain(
                    f"cannot place {block.name}",
                    values=f"tp={block.tp} at GPU {group} of a pool with {pool.gpus_per_node} GPUs a node",
                    rule="a TP group lies inside one node",
                    remedy="fix tp to a power of two",
                )
            )
