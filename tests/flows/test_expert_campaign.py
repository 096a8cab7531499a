"""Campaign plans along ep and cp: what runs is let through, what no engine can run is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nereus.config import CampaignConfig
from nereus.emu.decoder import Experts
from nereus.emu.hf_folder import write_hf_folder
from nereus.errors import ConfigError
from nereus.tasks.prepare import prepare_campaign
from tests.emu.engines.torch_cases import Random
from tests.flows.conftest import TINY, write_count_tokenizer

Make = Callable[..., CampaignConfig]
MIXTURE = replace(
    TINY,
    family="qwen3_moe",
    qk_norm=True,
    tied=False,
    intermediate_size=16,
    experts=Experts(num=4, per_token=2),
)


@pytest.fixture
def mixture_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mixture"
    write_hf_folder(Random(MIXTURE), MIXTURE, folder)
    write_count_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("plan", "engines", "message"),
    [
        ({"actor_training": {"cp": 2}, "actor_generation": {"cp": 2}}, {}, "cp=1"),
        ({"actor_training": {"ep": 2}, "actor_generation": {"dp": 2}}, {"training": "megatron"}, "experts"),
        ({"actor_training": {"ep": 3}, "actor_generation": {}}, {}, "divides the experts"),
    ],
    ids=["cp in generation", "ep on megatron", "ep that does not divide"],
)
def test_plans_that_no_engine_can_run_are_refused_before_a_worker_starts(
    make_config: Make,
    mixture_folder: Path,
    plan: dict[str, object],
    engines: dict[str, str],
    message: str,
) -> None:
    config = make_config(
        models={"actor": str(mixture_folder)},
        plan=plan,
        engines=engines,
        cluster={"gpus": 3, "device": "cpu", "timeout_s": 60},
    )
    with pytest.raises(ConfigError, match=message):
        prepare_campaign(config)


def test_a_dense_model_takes_cp_and_no_ep(make_config: Make) -> None:
    generation = {"actor_generation": {"dp": 2}}
    prepare_campaign(make_config(plan={"actor_training": {"cp": 2}} | generation))
    with pytest.raises(ConfigError, match="no experts"):
        prepare_campaign(make_config(plan={"actor_training": {"ep": 2}} | generation))
    with pytest.raises(ConfigError, match="tensor, pipeline and data parallelism only"):
        prepare_campaign(
            make_config(plan={"actor_training": {"cp": 2}} | generation, engines={"training": "megatron"})
        )
