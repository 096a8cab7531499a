"""Rows dealt in turning order. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def in_turning_order(rows: Sequence[int], num_parts: int) -> list[list[int]]:
    """Rows to parts 0 1 2 2 1 0 ..., so that sums are close where rows come longest first."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for place, row in enumerate(rows):
        turn, part = divmod(place, num_parts)
        parts[part if turn % 2 == 0 else num_parts - 1 - part].append(row)
    return parts
