"""A KV cache of fixed size holds one sequence at least, and else keeps its limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nereus.emu.serving import BLOCK_TOKENS, cache_bytes
from tests.emu.engines.conformance import MODEL


@given(st.integers(1, 4096), st.integers(1, 512), st.integers(1, 1 << 34))
def test_the_cache_holds_one_sequence_and_else_keeps_its_limit(longest: int, rows: int, limit: int) -> None:
    layers = MODEL.num_layers
    size = cache_bytes(MODEL, 2, layers, longest_tokens=longest, rows=rows, limit_bytes=limit)
    token = 2 * 1 * MODEL.head_dim * 4 * layers  # keys and values of the one kv head of a rank
    one = cache_bytes(MODEL, 2, layers, longest_tokens=longest, rows=1, limit_bytes=1)
    assert one >= longest * token
    assert one <= (longest + 2 * BLOCK_TOKENS) * token
    assert size == one or one < size <= limit
    assert size <= rows * one
