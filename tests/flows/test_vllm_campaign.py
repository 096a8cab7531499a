"""A campaign whose rollouts come from vLLM and whose generation moves while it runs goes as one on the torch
engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nereus.config import CampaignConfig
from nereus.emu.hf_folder import write_hf_folder
from nereus.errors import ConfigError
from nereus.flows.campaign import campaign
from nereus.record.metrics import read_records
from nereus.record.transitions import read_transitions
from nereus.tasks.prepare import prepare_campaign
from tests.emu.engines.torch_cases import Random
from tests.flows.conftest import TINY, write_count_tokenizer
from tests.flows.test_tools import parts as with_tools

pytestmark = [pytest.mark.usefixtures("server", "ray_pool"), pytest.mark.timeout(1200)]
Make = Callable[..., CampaignConfig]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with heads that vLLM's CPU kernels know."""
    folder, model = tmp_path_factory.mktemp("wide") / "model", replace(TINY, head_dim=32)
    write_hf_folder(Random(model), model, folder)
    write_count_tokenizer(folder)
    return folder


def plan(**generation: Any) -> dict[str, Any]:
    return {"actor_training": {"tp": 1, "gpus": [0]}, "actor_generation": generation}


@pytest.mark.vllm
def test_ppo_generates_by_vllm_at_tp_1_then_2_then_on_two_units_as_by_torch(
    make_config: Make, wide_model: Path
) -> None:
    pytest.importorskip("vllm", reason="needs the vllm extra", exc_type=ImportError)
    parts = {
        "models": {"actor": str(wide_model)},
        "algorithm": {"kind": "ppo"},
        "steps": 3,
        "checkpoint": {"every_steps": 0},
        "cluster": {"gpus": 2, "device": "cpu", "timeout_s": 600},
        "plan": plan(tp=1, gpus=[1]),
        "changes": [
            {"before_step": 1, "plan": plan(tp=2, gpus=[0, 1])},
            {"before_step": 2, "plan": plan(tp=1, dp=2, gpus=[0, 1])},
        ],
    }
    runs = {
        engine: campaign(make_config(name=engine, engines={"generation": engine}, **parts))
        for engine in ("torch", "vllm")
    }
    done = read_transitions(runs["vllm"].run_folder)
    assert [(record.step, record.outcome) for record in done] == [(1, "commit"), (2, "commit")]
    one, other = (read_records(runs[engine].metrics) for engine in ("torch", "vllm"))
    assert [record.plan["actor.generation"].split(" on ")[0] for record in other] == (
        ["tp1 pp1 dp1", "tp2 pp1 dp1", "tp1 pp1 dp2"]
    )
    assert [record.version for record in one] == [record.version for record in other]
    # The same rule draws the tokens, so only a tie of float32 sums could part them.
    assert [record.response_tokens for record in one] == [record.response_tokens for record in other]
    assert [r.reward_mean for r in one] == pytest.approx([r.reward_mean for r in other], abs=1e-6)
    for name in ("loss/actor", "loss/critic", "gradient_norm/actor"):
        # Float32 sums in another order, over three AdamW steps.
        assert [r.stats[name] for r in one] == pytest.approx([r.stats[name] for r in other], abs=1e-3)


@pytest.mark.vllm
def test_a_policy_with_tools_takes_the_same_turns_by_vllm_as_by_torch(
    make_config: Make, wide_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason="needs the vllm extra", exc_type=ImportError)
    parts = with_tools(
        tmp_path,
        models={"actor": str(wide_model)},
        steps=2,
        checkpoint={"every_steps": 0},
        cluster={"gpus": 2, "device": "cpu", "timeout_s": 600},
        plan=plan(tp=1, gpus=[1]),
    )
    one, other = (
        read_records(campaign(make_config(name=engine, engines={"generation": engine}, **parts)).metrics)
        for engine in ("torch", "vllm")
    )
    assert all(record.stats["turns/mean"] > 1 for record in other)
    assert all(record.stats["observed_tokens/mean"] > 0 for record in other)
    assert [record.response_tokens for record in one] == [record.response_tokens for record in other]
    for name in ("turns/mean", "turns/max", "observed_tokens/mean", "tools_failed/exception"):
        assert [r.stats.get(name) for r in one] == [r.stats.get(name) for r in other], name
    assert [r.reward_mean for r in one] == pytest.approx([r.reward_mean for r in other], abs=1e-6)
    assert all(abs(record.stats["approx_kl/actor"]) < 1e-3 for record in other)


@pytest.mark.vllm
def test_a_transition_of_training_alone_leaves_vllms_engine_as_it_is(
    make_config: Make, wide_model: Path
) -> None:
    pytest.importorskip("vllm", reason="needs the vllm extra", exc_type=ImportError)

    def placed(training: dict[str, Any], gpu: int) -> dict[str, Any]:
        return {"actor_training": training, "actor_generation": {"tp": 1, "gpus": [gpu]}}

    two = {"tp": 2, "gpus": [0, 1]}
    parts = {
        "models": {"actor": str(wide_model)},
        "steps": 3,
        "checkpoint": {"every_steps": 0},
        "cluster": {"gpus": 3, "device": "cpu", "timeout_s": 600},
        "plan": placed({"tp": 1, "gpus": [0]}, 2),
        "changes": [
            {"before_step": 1, "plan": placed(two, 2)},
            {"before_step": 2, "plan": placed(two, 1)},
        ],
    }
    runs = {
        engine: campaign(make_config(name=engine, engines={"generation": engine}, **parts))
        for engine in ("torch", "vllm")
    }
    training, generation = read_transitions(runs["vllm"].run_folder)
    print("transition of training", training.seconds, "s, of generation", generation.seconds, "s")
    # An engine is made in the second alone; both have groups, arenas and a weight sync.
    assert training.seconds < generation.seconds
    one, other = (read_records(runs[engine].metrics) for engine in ("torch", "vllm"))
    assert [record.response_tokens for record in one] == [record.response_tokens for record in other]
    assert [r.reward_mean for r in one] == pytest.approx([r.reward_mean for r in other], abs=1e-6)


def test_a_model_that_vllm_cannot_run_is_refused_before_a_worker_starts(make_config: Make) -> None:
    with pytest.raises(ConfigError, match="head_dim 32, 64"):
        prepare_campaign(make_config(engines={"generation": "vllm"}))
    prepare_campaign(make_config())
