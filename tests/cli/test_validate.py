"""`nereus validate` reads models, prompts and reward, and starts no cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from nereus.cli.app import main

WORDS = {word: i for i, word in enumerate(["<pad>", "<eos>", "a", "b", "c", "d", "e", "f"])}


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign whose every part is there and tiny."""
    folder = tmp_path_factory.mktemp("campaign")
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    config.architectures = ["LlamaForCausalLM"]
    (folder / "model").mkdir()
    config.save_pretrained(folder / "model")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    (folder / "model" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"})
    )
    (folder / "prompts.jsonl").write_text('{"prompt": "a b"}\n{"prompt": "c d e"}\n')
    (folder / "reward.py").write_text("def score(response):\n    return len(response)\n")
    path = folder / "campaign.yaml"
    path.write_text(
        "name: tiny\n"
        "models: {actor: model}\n"
        "prompts: {source: {kind: file, path: prompts.jsonl}}\n"
        'reward: {kind: python, function: "reward.py:score"}\n'
        "sampling: {max_new_tokens: 8}\n"
        "cluster: {gpus: 4, device: cpu}\n"
        "plan: {actor_training: {tp: 2}}\n"
    )
    return path


def validate(capsys: pytest.CaptureFixture[str], path: Path, *overrides: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["validate", str(path), *overrides])
    told = capsys.readouterr()
    return ended.value.code, told.out, " ".join(told.err.split())


def test_a_good_campaign_is_summed_up(capsys: pytest.CaptureFixture[str], campaign: Path) -> None:
    code, out, _ = validate(capsys, campaign)
    assert code == 0
    assert "this campaign can start" in out
    assert "2, longest 3 tokens" in out
    assert "tp2 pp1 dp1" in out


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("models.actor=/nowhere", "config.json is absent"),
        ("plan.actor_training={tp: 3}", "kv heads"),
        ("plan.actor_training={pp: 3}", "layers"),
        ("sampling.max_new_tokens=64", "the model knows 64 positions"),
        ("prompts.source.path=/nowhere.jsonl", "/nowhere.jsonl"),
        ("prompts.source.prompt=question", "question"),
        ("reward.function=/nowhere.py:score", "/nowhere.py does not exist"),
        ("plan.actor_training={dp: 8}", "raise cluster.gpus to at least 8"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], campaign: Path, override: str, expected: str
) -> None:
    code, _, err = validate(capsys, campaign, override)
    assert code == 2
    assert expected in err
