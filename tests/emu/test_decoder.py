"""A model's config is read in both dialects, and what the engine cannot compute is refused."""

from __future__ import annotations

from typing import Any

import pytest

from nereus.emu.decoder import DecoderConfig, Rope, decoder_spec
from nereus.errors import ModelError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}


def test_both_dialects_of_rope_and_dtype_mean_the_same() -> None:
    published = LLAMA | {"rope_theta": 5e5, "rope_scaling": SCALING, "torch_dtype": "bfloat16"}
    modern = LLAMA | {"rope_parameters": SCALING | {"rope_theta": 5e5}, "dtype": "bfloat16"}
    assert DecoderConfig.from_hf(published) == DecoderConfig.from_hf(modern)
    rope = DecoderConfig.from_hf(modern).rope
    assert (rope.theta, rope.kind, rope.original_max_positions) == (5e5, "llama3", 64)


def test_what_is_written_reads_back_the_same() -> None:
    config = DecoderConfig.from_hf(
        LLAMA | {"rope_theta": 5e5, "rope_scaling": SCALING, "eos_token_id": [2, 3], "head_dim": 32}
    )
    assert DecoderConfig.from_hf(config.to_hf()) == config


def test_an_old_config_without_head_dim_and_kv_heads_gets_both() -> None:
    config = DecoderConfig.from_hf({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"})
    assert (config.head_dim, config.num_kv_heads, config.rope) == (16, 4, Rope(original_max_positions=512))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gemma"}, "model_type='gemma'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
    ],
)
def test_what_the_engine_cannot_compute_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        DecoderConfig.from_hf(LLAMA | change)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ModelError, match="missing vocab_size"):
        DecoderConfig.from_hf({k: v for k, v in LLAMA.items() if k != "vocab_size"})


def test_a_tied_embedding_counts_once_and_a_value_head_replaces_the_language_head() -> None:
    untied = DecoderConfig.from_hf(LLAMA)
    tied = DecoderConfig.from_hf(LLAMA | {"tie_word_embeddings": True})
    assert untied.num_parameters - tied.num_parameters == 512 * 64
    names = set(decoder_spec(tied.with_head("value")).by_name)
    assert "score.weight" in names
    assert "lm_head.weight" not in names
