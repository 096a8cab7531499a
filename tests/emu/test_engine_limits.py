"""What an engine cannot run is refused with the way out; what it can run is let through. Needs no engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereus.emu.decoder import DecoderConfig, Experts, decoder_spec
from nereus.emu.engine_limits import EngineName, check_layout, problem_with
from nereus.emu.layout import Layout
from nereus.errors import InvalidLayout
from tests.emu.engines.conformance import MODEL, ONE_KV_HEAD

THREE = replace(MODEL, num_heads=6, num_kv_heads=3)
MIXTURE = replace(MODEL, family="mixtral", experts=Experts(num=4, per_token=2))


def layout(config: DecoderConfig, tp: int = 1, pp: int = 1) -> Layout:
    return Layout.make(decoder_spec(config), tp=tp, pp=pp, ranks=tuple(range(tp * pp)))


@pytest.mark.parametrize(
    ("engine", "config", "tp", "pp", "why"),
    [
        ("vllm", replace(MODEL, head_dim=8), 1, 1, "head_dim"),
        ("vllm", replace(MODEL, intermediate_size=51), 2, 1, "intermediate_size=51"),
        ("vllm", THREE, 3, 1, "power of two"),
        ("megatron", MODEL, 4, 1, "equally many whole kv heads"),
        ("megatron", replace(MODEL, intermediate_size=51), 2, 1, "51 feed-forward columns"),
        ("megatron", replace(MODEL, qkv_bias=True, attention_out_bias=True), 1, 1, "attention_bias"),
        ("deepspeed", MODEL, 4, 1, "equally many whole kv heads"),
        ("deepspeed", MODEL, 1, 2, "PipelineModule"),
        ("megatron", MIXTURE, 1, 1, "dense decoders only"),
        ("vllm", MIXTURE, 1, 1, "dense decoders only"),
    ],
)
def test_what_an_engine_cannot_cut_is_refused(
    engine: EngineName, config: DecoderConfig, tp: int, pp: int, why: str
) -> None:
    with pytest.raises(InvalidLayout, match=why) as refused:
        check_layout(engine, config, layout(config, tp, pp), on_cpu=True)
    assert "Remedy" in str(refused.value)


def test_vllm_takes_a_tp_that_divides_the_kv_heads_or_is_a_multiple_of_them() -> None:
    assert problem_with("vllm", THREE, 2, 1) is not None
    assert [tp for tp in (1, 2, 4) if problem_with("vllm", ONE_KV_HEAD, tp, 1) is None] == [1, 2, 4]


@pytest.mark.parametrize(
    ("engine", "config", "tp", "pp"),
    [
        ("vllm", MODEL, 2, 1),
        ("vllm", MODEL, 1, 3),
        ("vllm", ONE_KV_HEAD, 4, 1),
        ("megatron", MODEL, 2, 3),
        ("deepspeed", MODEL, 2, 1),
        ("torch", ONE_KV_HEAD, 4, 3),
    ],
)
def test_what_an_engine_can_run_is_let_through(
    engine: EngineName, config: DecoderConfig, tp: int, pp: int
) -> None:
    check_layout(engine, config, layout(config, tp, pp), on_cpu=True)


def test_small_heads_are_a_limit_of_cpus_alone() -> None:
    check_layout("vllm", replace(MODEL, head_dim=8), layout(MODEL), on_cpu=False)


@pytest.mark.parametrize("engine", ["vllm", "megatron", "deepspeed"])
def test_ep_and_cp_are_the_torch_engines_and_cp_is_not_for_generation(engine: EngineName) -> None:
    spec = decoder_spec(MODEL)
    ring = Layout.make(spec, tp=1, pp=1, cp=2, ranks=(0, 1))
    experts = Layout.make(decoder_spec(MIXTURE), tp=1, pp=1, ep=2, ranks=(0, 1))
    with pytest.raises(InvalidLayout, match="tensor, pipeline and data parallelism only"):
        check_layout(engine, MODEL, ring)
    check_layout("torch", MODEL, ring)
    check_layout("torch", MIXTURE, experts, generates=True)
    with pytest.raises(InvalidLayout, match=r"cp=2.*divides no sequence"):
        check_layout("torch", MODEL, ring, generates=True)
