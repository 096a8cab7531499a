"""A campaign on a mixture of experts that moves along ep and cp while it runs goes as one that stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from nereus.config import CampaignConfig
from nereus.emu.decoder import Experts
from nereus.emu.hf_folder import write_hf_folder
from nereus.errors import ConfigError
from nereus.flows.campaign import campaign
from nereus.record.metrics import read_records
from nereus.record.transitions import read_transitions
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


@pytest.mark.slow
@pytest.mark.usefixtures("server", "ray_pool")
def test_a_live_move_from_one_rank_of_experts_to_two_keeps_the_loss_curve(
    make_config: Make, mixture_folder: Path
) -> None:
    parts = {"models": {"actor": str(mixture_folder)}, "steps": 6, "checkpoint": {"every_steps": 0}}
    start = {"actor_training": {"tp": 2}, "actor_generation": {"dp": 2}}
    still = campaign(make_config(name="still", plan=start, **parts))
    changes = [
        {"before_step": 2, "plan": {"actor_training": {"ep": 2}, "actor_generation": {"ep": 2}}},
        {"before_step": 4, "plan": {"actor_training": {"cp": 2}, "actor_generation": {"dp": 2}}},
    ]
    moved = campaign(make_config(name="moved", plan=start, changes=changes, **parts))

    done = read_transitions(moved.run_folder)
    assert [(record.step, record.outcome) for record in done] == [(2, "commit"), (4, "commit")]
    assert all(record.bytes == record.lower_bound > 0 for record in done)
    one, other = read_records(still.metrics), read_records(moved.metrics)
    plans = [record.plan["actor.training"].split(" on ")[0] for record in other]
    assert plans == ["tp2 pp1 dp1"] * 2 + ["tp1 pp1 ep2 dp1"] * 2 + ["tp1 pp1 cp2 dp1"] * 2
    assert [r.response_tokens for r in one] == [r.response_tokens for r in other]
    for name in ("loss/actor", "gradient_norm/actor"):
        # Another layout sums in another order; everything else is the same.
        assert [r.stats[name] for r in one] == pytest.approx([r.stats[name] for r in other], abs=1e-3)
    AutoModelForCausalLM.from_pretrained(moved.model)


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
