"""Built-in shapes are the published ones; local folders are read; errors help."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nereus.emu.decoder import DecoderConfig
from nereus.errors import ConfigError, ModelError
from nereus.planner.models import builtin_models, builtin_parameters, model_shape
from nereus.planner.shard_size import total_parameters


@pytest.mark.parametrize("name", builtin_models())
def test_shape_has_the_published_number_of_weights(name: str) -> None:
    assert total_parameters(model_shape(name)) == builtin_parameters(name)


def test_list_equals_the_published_configs(shared_data: Path) -> None:
    published = json.loads((shared_data / "real" / "model_configs.json").read_text())["models"]
    assert len(published) == sum(model_shape(name).experts is None for name in builtin_models())
    for name, entry in published.items():
        theirs, ours = DecoderConfig.from_hf(entry["config"]), model_shape(name)
        for field in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
            assert getattr(ours, field) == getattr(theirs, field), f"{name} {field}"
        assert (ours.tied, ours.qkv_bias, ours.qk_norm) == (theirs.tied, theirs.qkv_bias, theirs.qk_norm)


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-8B", "llama-3.1-8b", "meta-llama/Meta-Llama-3.1-8B-Instruct"]
)
def test_names_match_without_owner_case_and_variant(name: str) -> None:
    assert model_shape(name) == model_shape("meta-llama/Llama-3.1-8B")


def test_folder_is_read_from_its_config(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = model_shape(str(tmp_path))
    assert (shape.num_layers, shape.head_dim) == (2, 8)
    assert model_shape(str(tmp_path / "config.json")) == shape


def test_unknown_name_suggests_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown model 'llama-3.1-9b'.*Llama-3.1-8B"):
        model_shape("llama-3.1-9b")


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_folder_without_a_config_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json|model folder"):
        model_shape(str(tmp_path))


def test_absent_folder_is_named() -> None:
    with pytest.raises(ModelError, match="no-such-folder"):
        model_shape("./no-such-folder")
