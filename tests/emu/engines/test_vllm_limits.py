"""What vLLM cannot run is refused with the way out; the KV cache is bounded. Needs no vLLM."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engines.vllm.limits import BLOCK_TOKENS, cache_bytes, check_runs
from nereus.emu.layout import Layout
from nereus.errors import InvalidLayout
from tests.emu.engines.conformance import MODEL, ONE_KV_HEAD


def layout(config: DecoderConfig, tp: int = 1, pp: int = 1) -> Layout:
    return Layout.make(decoder_spec(config), tp=tp, pp=pp, ranks=tuple(range(tp * pp)))


@pytest.mark.parametrize(
    ("config", "tp", "why"),
    [
        (replace(MODEL, head_dim=8), 1, "head_dim"),
        (replace(MODEL, num_heads=6, num_kv_heads=3), 2, "kv_heads=3"),
        (replace(MODEL, intermediate_size=51), 2, "intermediate_size=51"),
        (replace(MODEL, num_heads=6, num_kv_heads=3, intermediate_size=48), 3, "power of two"),
    ],
)
def test_what_vllm_cannot_run_is_refused(config: DecoderConfig, tp: int, why: str) -> None:
    with pytest.raises(InvalidLayout, match=why) as refused:
        check_runs(config, layout(config, tp), on_cpu=True)
    assert "Remedy" in str(refused.value)


@pytest.mark.parametrize(("config", "tp", "pp"), [(MODEL, 2, 1), (MODEL, 1, 3), (ONE_KV_HEAD, 4, 1)])
def test_what_vllm_can_run_is_let_through(config: DecoderConfig, tp: int, pp: int) -> None:
    check_runs(config, layout(config, tp, pp), on_cpu=True)


def test_small_heads_are_a_limit_of_cpus_alone() -> None:
    check_runs(replace(MODEL, head_dim=8), layout(MODEL), on_cpu=False)


@given(st.integers(1, 4096), st.integers(1, 512), st.integers(1, 1 << 34))
def test_the_cache_holds_one_sequence_and_else_keeps_its_limit(longest: int, rows: int, limit: int) -> None:
    size = cache_bytes(MODEL, layout(MODEL, 2), longest_tokens=longest, rows=rows, limit_bytes=limit)
    token = 2 * 1 * MODEL.head_dim * 4 * MODEL.num_layers  # keys and values of the one kv head of a rank
    one = cache_bytes(MODEL, layout(MODEL, 2), longest_tokens=longest, rows=1, limit_bytes=1)
    assert one >= longest * token
    assert one <= (longest + 2 * BLOCK_TOKENS) * token
    assert size == one or one < size <= limit
    assert size <= rows * one
