"""Campaigns that train adapters: what they write, how they move and go on, and that they learn."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForCausalLM

from nereus.config import CampaignConfig
from nereus.emu.checkpoint.source import open_checkpoint
from nereus.emu.lora import TARGETS, Lora, is_adapter
from nereus.emu.peft_folder import read_peft_config
from nereus.errors import CheckpointError
from nereus.flows.campaign import campaign
from nereus.record.metrics import read_records
from nereus.record.transitions import read_transitions
from tests.flows.conftest import COUNT

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
Make = Callable[..., CampaignConfig]
KL = {"kind": "grpo", "kl": {"coefficient": 0.05}}


def adapted(make_config: Make, model: Path, **parts: object) -> CampaignConfig:
    lora = parts.pop("lora", {"rank": 4, "alpha": 8})
    return make_config(**({"models": {"actor": str(model), "lora": lora}, "algorithm": KL} | parts))


def test_a_campaign_with_adapters_moves_and_leaves_a_model_and_a_peft_folder(
    make_config: Make, model_folder: Path
) -> None:
    change = {"before_step": 1, "plan": {"actor_training": {"tp": 1, "dp": 2}}}
    result = campaign(adapted(make_config, model_folder, steps=3, changes=[change], tracking="step"))
    records = read_records(result.metrics)
    assert [transition.outcome for transition in read_transitions(result.metrics.parent)] == ["commit"]
    # The first step is that of the reference; then the adapters drive them apart.
    kl = [record.stats["kl/actor"] for record in records]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[2] > kl[0]
    assert all({"score reference", "publish"} <= record.stage_s.keys() for record in records)

    held = open_checkpoint(result.checkpoint).source("actor")
    assert all(is_adapter(name) for name in held.shapes())
    folder = result.metrics.parent
    lora = read_peft_config(folder / "adapter")
    assert lora == Lora(rank=4, alpha=8, targets=tuple(sorted(TARGETS)))
    merged, base = (AutoModelForCausalLM.from_pretrained(path) for path in (folder / "model", model_folder))
    differing = {
        name
        for name, weight in base.state_dict().items()
        if not torch.equal(weight, merged.state_dict()[name])
    }
    assert {name.split(".")[-2] for name in differing} == set(TARGETS)


@pytest.mark.slow
def test_a_resumed_run_of_adapters_is_that_which_never_stopped(make_config: Make, model_folder: Path) -> None:
    parts: dict[str, object] = {"tracking": "step", "optimizer": {"learning_rate": 1e-2}}
    straight = campaign(adapted(make_config, model_folder, steps=4, name="straight", **parts))
    campaign(adapted(make_config, model_folder, steps=2, name="stopped", **parts))
    plan = {"actor_training": {"tp": 1, "pp": 2}, "actor_generation": {"tp": 1, "dp": 2}}
    resumed = campaign(
        adapted(make_config, model_folder, steps=4, name="stopped", plan=plan, **parts), resume=True
    )
    one, other = read_records(straight.metrics), read_records(resumed.metrics)
    assert [r.response_tokens for r in one] == [r.response_tokens for r in other]
    for name in ("loss/actor", "gradient_norm/actor", "kl/actor"):
        expected = pytest.approx([r.stats[name] for r in one], rel=2e-3, abs=1e-6)
        assert [r.stats[name] for r in other] == expected, name
    with pytest.raises(CheckpointError, match="tensors differ"):
        campaign(
            adapted(make_config, model_folder, steps=5, name="stopped", lora={"rank": 8}, **parts),
            resume=True,
        )


@pytest.mark.slow
def test_grpo_with_adapters_learns_to_count_through_a_change(make_config: Make, tmp_path: Path) -> None:
    model = tmp_path / "count"
    subprocess.run(
        [sys.executable, COUNT / "make_model.py", "--output", model], check=True, stdout=sys.stderr
    )
    plan = {
        "actor_training": {"tp": 2, "gpus": [0, 1]},
        "actor_generation": {"tp": 1, "dp": 2, "gpus": [2, 3]},
    }
    four = {"actor_training": {"tp": 1, "pp": 2, "dp": 2}, "actor_generation": {"tp": 1, "dp": 4}}
    result = campaign(
        adapted(
            make_config,
            model,
            lora={"rank": 8, "alpha": 16},
            algorithm={"kind": "grpo"},
            steps=30,
            prompts={"source": {"kind": "python", "function": f"{COUNT / 'prompts.py'}:prompts"}},
            batch={"prompts": 8, "samples": 8, "micro_batch_rows": 16},
            sampling={"max_new_tokens": 128},
            optimizer={"learning_rate": 3e-3, "beta2": 0.95},
            cluster={"gpus": 4, "device": "cpu", "timeout_s": 60},
            plan=plan,
            changes=[{"before_step": 10, "plan": four}],
            checkpoint={"every_steps": 0},
            tracking="step",
        )
    )
    rewards = [record.reward_mean or 0.0 for record in read_records(result.metrics)]
    assert fmean(rewards[-5:]) > fmean(rewards[:3]) + 0.2, rewards
