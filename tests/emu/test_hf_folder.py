"""Hugging Face folders: what is read, what is refused, and that writing gives back the same bits."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nereus.emu.decoder import HEAD, VALUE_HEAD, DecoderConfig
from nereus.emu.hf_folder import INDEX, HFSource, write_hf_folder
from nereus.emu.source import LogicalSource
from nereus.emu.tensor import whole
from nereus.errors import ModelError

COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-tied": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 16}),
}


def make_folder(path: Path, name: str = "llama", shard_size: str = "1GB", **changes: Any) -> Path:
    """A random model saved by transformers."""
    config, model, extra = MODELS[name]
    torch.manual_seed(0)
    net = model(config(**(COMMON | extra | changes)))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # norms and biases are not trivial
    net.save_pretrained(path, max_shard_size=shard_size)
    return path


def everything(source: LogicalSource) -> dict[str, torch.Tensor]:
    return {name: source.read("theta", name, whole(shape)) for name, shape in source.shapes().items()}


def edit(folder: Path, change: Any) -> None:
    """Rewrite a single-file folder's tensors by `change(dict)`."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("shard_size", ["1GB", "10KB"])
@pytest.mark.parametrize("name", list(MODELS))
def test_every_tensor_equals_the_one_transformers_saved(tmp_path: Path, name: str, shard_size: str) -> None:
    folder = make_folder(tmp_path / "in", name, shard_size)
    assert (folder / INDEX).is_file() == (shard_size == "10KB")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    source = HFSource(folder)
    read = everything(source)
    assert source.config.qkv_bias == (name == "qwen2")
    assert source.config.tied == (HEAD not in read)
    assert read.keys() == reference.keys() - ({HEAD} if source.config.tied else set())
    for tensor_name, tensor in read.items():
        assert torch.equal(tensor, reference[tensor_name]), tensor_name


def test_both_config_dialects_give_the_same_model(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "new")
    modern = HFSource(folder)
    raw = json.loads((folder / "config.json").read_text())
    assert "rope_parameters" in raw
    (folder / "config.json").write_text(json.dumps(modern.config.to_hf()))
    published = json.loads((folder / "config.json").read_text())
    assert {"rope_theta", "rope_scaling", "torch_dtype"} <= published.keys()
    assert HFSource(folder).config == modern.config


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 9000])
@pytest.mark.parametrize("name", list(MODELS))
def test_writing_gives_back_the_same_bits(tmp_path: Path, name: str, max_shard_bytes: int) -> None:
    source = HFSource(make_folder(tmp_path / "in", name))
    write_hf_folder(source, source.config, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    again = HFSource(tmp_path / "out")
    assert again.config == source.config
    before, after = everything(source), everything(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (tmp_path / "out" / INDEX).is_file() == (max_shard_bytes == 9000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(before[k], theirs[k]) for k in before)


def test_published_fixtures_round_trip(shared_data: Path, tmp_path: Path) -> None:
    folders = [*sorted((shared_data / "tiny_checkpoints").iterdir()), shared_data / "real" / "stories260K"]
    for folder in folders:
        source = HFSource(folder)
        write_hf_folder(source, source.config, tmp_path / folder.name, origin=folder, max_shard_bytes=150_000)
        before, after = everything(source), everything(HFSource(tmp_path / folder.name))
        assert all(torch.equal(before[k], after[k]) for k in before), folder.name
    assert (tmp_path / "stories260K" / "tokenizer.json").read_bytes() == (
        folders[-1] / "tokenizer.json"
    ).read_bytes()


def test_a_box_is_the_slice_of_the_whole(tmp_path: Path) -> None:
    source = HFSource(make_folder(tmp_path))
    name = "model.layers.1.mlp.down_proj.weight"
    full = source.read("theta", name, whole(source.shapes()[name]))
    assert torch.equal(source.read("theta", name, ((3, 20), (10, 48))), full[3:20, 10:48])
    assert source.read("theta", name, ((4, 4), (0, 48))).shape == (0, 48)


def test_writing_in_half_precision_rounds_once(tmp_path: Path) -> None:
    source = HFSource(make_folder(tmp_path / "in"))
    write_hf_folder(source, source.config, tmp_path / "out", dtype="bf16")
    again = HFSource(tmp_path / "out")
    assert again.config == source.config.with_dtype("bf16")
    before, after = everything(source), everything(again)
    assert all(torch.equal(before[k].bfloat16(), after[k]) for k in before)


def test_missing_misshapen_and_unexpected_are_all_named_at_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = torch.ones(7)
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.ones(2, 2)

    edit(folder, spoil)
    with pytest.raises(ModelError) as caught:
        HFSource(folder)
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "misshapen: model.norm.weight is [7], not [32]" in message
    assert "unexpected: model.layers.9.mlp.up_proj.weight" in message


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    edit(folder, lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"not floating point: model\.norm\.weight is I8"):
        HFSource(folder)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    file = make_folder(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors"):
        HFSource(tmp_path)


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, shard_size="10KB")
    victim = sorted(folder.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelError, match=victim.name):
        HFSource(folder)


def test_a_folder_without_safetensors_says_what_to_do(tmp_path: Path) -> None:
    (make_folder(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safe_serialization=True"):
        HFSource(tmp_path)


def test_a_tied_checkpoint_that_kept_its_head_loads(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "llama-tied")
    edit(folder, lambda t: t.update({HEAD: t["model.embed_tokens.weight"].clone()}))
    assert HEAD not in HFSource(folder).shapes()


def test_a_new_value_head_depends_on_its_seed_alone(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with pytest.raises(ModelError, match="value_head_seed"):
        HFSource(folder, head="value")
    box = ((0, 1), (0, 32))
    one, same = (HFSource(folder, head="value", value_head_seed=5) for _ in range(2))
    other = HFSource(folder, head="value", value_head_seed=6)
    assert HEAD not in one.shapes()
    assert torch.equal(one.read("theta", VALUE_HEAD, box), same.read("theta", VALUE_HEAD, box))
    assert not torch.equal(one.read("theta", VALUE_HEAD, box), other.read("theta", VALUE_HEAD, box))
    assert one.read("theta", VALUE_HEAD, ((0, 1), (4, 9))).shape == (1, 5)


def test_a_value_model_round_trips_and_its_head_is_read(tmp_path: Path) -> None:
    critic = HFSource(make_folder(tmp_path / "in", "qwen2"), head="value", value_head_seed=1)
    write_hf_folder(critic, critic.config, tmp_path / "out")
    again = HFSource(tmp_path / "out", head="value")
    before, after = everything(critic), everything(again)
    assert all(torch.equal(before[k], after[k]) for k in before)
    model = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(model.score.weight, before[VALUE_HEAD])


def test_a_head_with_a_bias_that_matters_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    edit(folder, lambda t: t.update({VALUE_HEAD: torch.ones(1, 32), "score.bias": torch.zeros(1)}))
    HFSource(folder, head="value")
    edit(folder, lambda t: t.update({"score.bias": torch.ones(1)}))
    with pytest.raises(ModelError, match=r"unexpected: score\.bias"):
        HFSource(folder, head="value")


def test_a_model_is_replaced_and_other_folders_are_not(tmp_path: Path) -> None:
    source = HFSource(make_folder(tmp_path / "in"))
    write_hf_folder(source, source.config, tmp_path / "out", max_shard_bytes=9000)
    write_hf_folder(source, source.config, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(ModelError, match="holds other files"):
        write_hf_folder(source, source.config, tmp_path / "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "mine", "out"]


class _FailingSource(HFSource):
    """Reads until it reaches one tensor."""

    def read(self, kind: str, name: str, box: Any) -> torch.Tensor:
        if name == "model.norm.weight":
            raise ModelError("the disk went away")
        return super().read(kind, name, box)


def test_a_failed_write_leaves_the_old_model(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in")
    good = HFSource(folder)
    write_hf_folder(good, good.config, tmp_path / "out")
    with pytest.raises(ModelError, match="disk"):
        write_hf_folder(_FailingSource(folder), good.config, tmp_path / "out")
    assert all(torch.equal(a, everything(good)[k]) for k, a in everything(HFSource(tmp_path / "out")).items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_source_travels_to_another_process(tmp_path: Path) -> None:
    source = HFSource(make_folder(tmp_path), head="value", value_head_seed=3)
    copy = pickle.loads(pickle.dumps(source))
    assert isinstance(copy.config, DecoderConfig)
    assert all(torch.equal(a, everything(source)[k]) for k, a in everything(copy).items())
