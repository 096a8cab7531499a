"""Which model each model-stage gets where adapters are trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nereus.config import CampaignConfig
from nereus.emu.decoder import decoder_spec
from nereus.emu.hf_folder import write_hf_folder
from nereus.emu.lora import Lora
from nereus.emu.peft_folder import write_peft_folder
from nereus.emu.stage import FromFolder
from nereus.errors import ModelError
from nereus.tasks.stages import CRITIC, GENERATION, TRAINING, read_models, stages_under, with_sharing
from tests.emu.engines.torch_cases import SMALL, Random

LORA = Lora(rank=4, alpha=8, targets=("q_proj", "v_proj"))


def campaign(folder: Path, lora: dict[str, Any] | None, **more: Any) -> CampaignConfig:
    if not folder.exists():
        write_hf_folder(Random(SMALL), SMALL, folder)
    return CampaignConfig.model_validate(
        {
            "models": {"actor": str(folder), "lora": lora},
            "prompts": {"source": {"kind": "file", "path": "unused"}},
            "reward": {"kind": "python", "function": "unused:unused"},
            "algorithm": {"kind": "ppo"},
        }
        | more
    )


def test_trained_models_have_adapters_and_generation_has_the_plain_model(tmp_path: Path) -> None:
    config = campaign(tmp_path / "model", {"rank": 4, "alpha": 8, "targets": ["v_proj", "q_proj"]})
    stages = stages_under(config, config.plan, read_models(config))
    assert stages[TRAINING].model.lora == stages[CRITIC].model.lora == LORA
    assert stages[GENERATION].model.lora is None
    assert stages[GENERATION].shares is None, "its weights have the adapters added"
    assert stages[TRAINING].served == stages[GENERATION].tensors
    trained = {spec.name.rpartition(".")[0].rpartition(".")[0] for spec in stages[CRITIC].trained.tensors}
    assert trained == {"", *(f"model.layers.{i}.self_attn.{t}" for i in range(3) for t in LORA.targets)}


def test_without_adapters_generation_reads_the_arenas_of_training(tmp_path: Path) -> None:
    config = campaign(tmp_path / "model", None)
    stages = stages_under(config, config.plan, read_models(config))
    assert stages[GENERATION].shares == TRAINING
    assert stages[TRAINING].served == stages[TRAINING].trained == stages[GENERATION].tensors
    apart = with_sharing({**stages, TRAINING: replace(stages[TRAINING], units=stages[TRAINING].units * 2)})
    assert apart[GENERATION].shares is None


def test_a_given_adapter_is_checked_and_is_the_actors_origin(tmp_path: Path) -> None:
    given = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"], "adapter": str(tmp_path / "adapter")}
    config = campaign(tmp_path / "model", given)
    model = decoder_spec(replace(SMALL, lora=LORA))
    write_peft_folder(
        Random(replace(SMALL, lora=LORA)), model, LORA, tmp_path / "adapter", base="model", dtype="fp32"
    )
    stages = stages_under(config, config.plan, read_models(config))
    origins = [stages[name].origin for name in (TRAINING, CRITIC)]
    assert [o.adapter for o in origins if isinstance(o, FromFolder)] == [tmp_path / "adapter", None]
    with pytest.raises(ModelError, match=r"rank 4.*models\.lora says rank 2"):
        read_models(campaign(tmp_path / "model", given | {"rank": 2}))
