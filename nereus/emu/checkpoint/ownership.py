"""Who writes what: every box of a unit's logical tensors is given to exactly one of its holders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from nereus.emu.layout import Layout, Piece, Rank, shard
from nereus.emu.tensor import Box, ModelSpec, box_size, intersect, whole


def owned_pieces(model: ModelSpec, layout: Layout) -> dict[Rank, tuple[Piece, ...]]:
    """The pieces that each rank of a unit writes.

    A box held once is its holder's. A replicated box (norms, kv heads above tp, ties over pp) goes to the
    holder with the least to write so far, largest boxes first, which keeps the ranks' bytes close.
    Every rank is present, in layout order; pure and equal on every rank.
    """
    holders: dict[tuple[str, Box], list[tuple[Rank, Piece]]] = {}
    for rank in layout.ranks:
        for piece in shard(model, layout, rank).pieces:
            held = holders.setdefault((piece.logical, piece.box), [])
            if all(rank != other for other, _ in held):
                held.append((rank, piece))
    load = dict.fromkeys(layout.ranks, 0)
    owned: dict[Rank, list[Piece]] = {rank: [] for rank in layout.ranks}
    order = sorted(holders.values(), key=lambda held: (len(held) > 1, -box_size(held[0][1].box)))
    for held in order:
        rank, piece = min(held, key=lambda pair: load[pair[0]])
        load[rank] += box_size(piece.box)
        owned[rank].append(piece)
    return {rank: tuple(pieces) for rank, pieces in owned.items()}


def uncovered(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Why the boxes are no exact partition of a tensor of this shape; None when they are one."""
    for a, b in combinations(boxes, 2):
        if box_size(intersect(a, b)):
            return f"boxes {a} and {b} overlap"
    have, need = sum(map(box_size, boxes)), box_size(whole(shape))
    return None if have == need else f"{have} of {need} elements are there"
