"""Adapters travel to and from PEFT's folders, and mean the same there."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nereus.emu.adapter_weights import Adapted, Merged
from nereus.emu.batch import TokenBatch
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engines.torch.engine import TorchEngine
from nereus.emu.engines.torch.forward import through_stage
from nereus.emu.engines.torch.model import final_norm, full_logits
from nereus.emu.engines.torch.packing import pack
from nereus.emu.hf_folder import HFSource, write_hf_folder
from nereus.emu.layout import Layout
from nereus.emu.lora import Lora, is_adapter
from nereus.emu.peft_folder import CONFIG, PeftSource, read_peft_config, sorted_targets, write_peft_folder
from nereus.emu.source import LogicalSource, fill
from nereus.emu.tensor import whole
from nereus.emu.unit_groups import UnitGroups
from nereus.errors import ModelError
from tests.emu.engines.torch_cases import LLAMA, QWEN2, QWEN3, Random

LORA = Lora(rank=4, alpha=6, targets=sorted_targets(["q_proj", "v_proj", "down_proj"]))
TOKENS = torch.arange(3, 51).view(2, 24)


def written(config: DecoderConfig, folder: Path) -> tuple[Path, Path]:
    """A model folder and a PEFT folder with random weights, the B's not zero."""
    assert config.lora is not None
    write_hf_folder(Random(config), config.with_lora(None), folder / "model")
    write_peft_folder(
        Random(config),
        decoder_spec(config),
        config.lora,
        folder / "adapter",
        base=str(folder / "model"),
        dtype="fp32",
    )
    return folder / "model", folder / "adapter"


def engine_logits(config: DecoderConfig, source: LogicalSource) -> Tensor:
    """Logits [b, s, v] of the torch engine."""
    groups = UnitGroups.alone(Layout.make(decoder_spec(config), tp=1, pp=1, ranks=(0,)))
    engine = TorchEngine(config, groups.layout, groups, optimizer=None)
    fill(engine.state, source, {"theta": "theta"})
    lens_b = torch.full((len(TOKENS),), TOKENS.shape[1])
    packed = pack(TokenBatch(tokens_bs=TOKENS, prompt_lens_b=lens_b, response_lens_b=0 * lens_b), "last")
    packed = replace(packed, select_m=torch.arange(TOKENS.numel()))
    with torch.no_grad():
        hidden = final_norm(through_stage(engine.stage, packed, None), engine.stage.weights)
        return full_logits(hidden, engine.stage.weights).view(*TOKENS.shape, -1)


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3], ids=lambda config: config.family)
def test_peft_makes_the_same_logits_of_an_exported_adapter(tmp_path: Path, config: DecoderConfig) -> None:
    peft = pytest.importorskip("peft")
    config = config.with_lora(LORA)
    model, adapter = written(config, tmp_path)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter).eval()
    ours = engine_logits(config, Adapted(HFSource(model), PeftSource(adapter, decoder_spec(config), LORA)))
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, ours, atol=2e-4, rtol=1e-4)
        plain = AutoModelForCausalLM.from_pretrained(model)(TOKENS).logits
    assert float((plain - ours).abs().max()) > 0.1, "the adapter changes the model"


def test_an_adapter_that_peft_saved_makes_the_same_logits_here(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    write_hf_folder(Random(QWEN2), QWEN2, tmp_path / "model")
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["v_proj", "q_proj", "up_proj"], task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), settings).eval()
    torch.manual_seed(0)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    lora = read_peft_config(tmp_path / "adapter")
    assert lora == Lora(rank=4, alpha=6, targets=("q_proj", "up_proj", "v_proj"))
    config = QWEN2.with_lora(lora)
    adapter = PeftSource(tmp_path / "adapter", decoder_spec(config), lora)
    ours = engine_logits(config, Adapted(HFSource(tmp_path / "model"), adapter))
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, ours, atol=2e-4, rtol=1e-4)


def test_the_merged_folder_has_the_logits_of_model_and_adapter(tmp_path: Path) -> None:
    config = QWEN2.with_lora(LORA)
    model, adapter = written(config, tmp_path)
    merged = Merged(HFSource(model), PeftSource(adapter, decoder_spec(config), LORA), LORA)
    write_hf_folder(merged, QWEN2, tmp_path / "merged")
    together = engine_logits(config, Random(config))
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(TOKENS).logits
    torch.testing.assert_close(found, together, atol=2e-4, rtol=1e-4)


def test_writing_and_reading_keep_every_bit(tmp_path: Path) -> None:
    config = QWEN3.with_lora(LORA)
    _, adapter = written(config, tmp_path)
    source: PeftSource = pickle.loads(pickle.dumps(PeftSource(adapter, decoder_spec(config), LORA)))
    tensors = {name: tensor for name, tensor in Random(config).tensors.items() if is_adapter(name)}
    assert source.shapes() == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert torch.equal(source.read("theta", name, whole(tuple(tensor.shape))), tensor)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"r": 8}, "rank 8"),
        ({"target_modules": ["q_proj"]}, "targets q_proj"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"target_modules": "all-linear"}, "no list of names"),
    ],
)
def test_another_adapter_than_the_configured_one_is_refused(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    config = LLAMA.with_lora(LORA)
    _, adapter = written(config, tmp_path)
    raw = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(raw | change))
    with pytest.raises(ModelError, match=told):
        PeftSource(adapter, decoder_spec(config), LORA)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    _, adapter = written(LLAMA.with_lora(LORA), tmp_path)
    with pytest.raises(ModelError, match=r"lora_A.weight: stored \(4, 48\), wanted"):
        PeftSource(adapter, decoder_spec(replace(LLAMA, intermediate_size=64, lora=LORA)), LORA)


def test_a_folder_of_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="other files"):
        written(LLAMA.with_lora(LORA), tmp_path)
