"""Adapters in a campaign file: what they are put on, and what does not go with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nereus.config import CampaignConfig, LoraTarget
from nereus.config.load import load_campaign
from nereus.emu.lora import TARGETS


def campaign(lora: dict[str, Any] | None, **more: Any) -> CampaignConfig:
    return CampaignConfig.model_validate(
        {
            "models": {"actor": "unused", "lora": lora} | more.pop("models", {}),
            "prompts": {"source": {"kind": "file", "path": "unused"}},
            "reward": {"kind": "python", "function": "unused:unused"},
            "algorithm": {"kind": "grpo", "kl": {}},
        }
        | more
    )


def test_all_linear_layers_are_the_default_targets() -> None:
    lora = campaign({"rank": 8}).models.lora
    assert lora is not None
    assert (
        {target.value for target in lora.targets} == set(TARGETS) == {target.value for target in LoraTarget}
    )


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_an_engine_that_trains_all_weights_is_refused(engine: str) -> None:
    with pytest.raises(ValidationError, match=f"engines.training = {engine} trains all weights"):
        campaign({}, engines={"training": engine})
    assert campaign({}, engines={"generation": "vllm"}).engines.generation == "vllm"


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"targets": []}, {"targets": ["embed_tokens"]}, {"alpha": 0}])
def test_adapters_of_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        campaign(wrong)


def test_the_actor_without_its_adapters_is_the_reference_unless_one_is_given() -> None:
    assert "reference.inference" not in campaign({}).model_stages
    assert "reference.inference" in campaign({}, models={"reference": "other"}).model_stages
    assert "reference.inference" in campaign(None).model_stages


def test_an_adapters_folder_counts_from_the_campaign_file(tmp_path: Path) -> None:
    path = tmp_path / "campaign.yaml"
    path.write_text(
        "models: {actor: model, lora: {rank: 4, adapter: start}}\n"
        "prompts: {source: {kind: file, path: a.jsonl}}\n"
        "reward: {kind: python, function: 'reward.py:score'}\n"
    )
    lora = load_campaign(path).models.lora
    assert lora is not None
    assert lora.adapter == str(tmp_path / "start")
