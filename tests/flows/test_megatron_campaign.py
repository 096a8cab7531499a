"""A PPO campaign that trains by Megatron and moves while it runs goes as one that trains by the torch
engine.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nereus.config import CampaignConfig
from nereus.errors import ConfigError
from nereus.flows.campaign import campaign
from nereus.record.metrics import read_records
from nereus.record.transitions import read_transitions
from nereus.tasks.prepare import prepare_campaign

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("server", "ray_pool"),
    pytest.mark.timeout(1200),
]
pytest.importorskip("megatron.core")
Make = Callable[..., CampaignConfig]


def test_ppo_moves_from_tp2pp2_to_two_units_of_tp2_as_the_torch_engine_does(make_config: Make) -> None:
    parts = {
        "algorithm": {"kind": "ppo"},
        "steps": 4,
        "checkpoint": {"every_steps": 0},
        "cluster": {"gpus": 4, "device": "cpu", "timeout_s": 60},
        "plan": {"actor_training": {"tp": 2, "pp": 2}, "actor_generation": {"tp": 1, "dp": 4}},
        "changes": [
            {
                "before_step": 2,
                "plan": {"actor_training": {"tp": 2, "dp": 2}, "actor_generation": {"tp": 1, "dp": 4}},
            }
        ],
    }
    runs = {
        engine: campaign(make_config(name=engine, engines={"training": engine}, **parts))
        for engine in ("torch", "megatron")
    }
    done = read_transitions(runs["megatron"].run_folder)
    assert [(record.step, record.outcome) for record in done] == [(2, "commit")]
    one, other = (read_records(runs[engine].metrics) for engine in ("torch", "megatron"))
    assert [record.plan["actor.training"].split(" on ")[0] for record in other] == (
        ["tp2 pp2 dp1"] * 2 + ["tp2 pp1 dp2"] * 2
    )
    assert [record.response_tokens for record in one] == [record.response_tokens for record in other]
    for name in ("loss/actor", "loss/critic", "gradient_norm/actor", "gradient_norm/critic"):
        # Float32 sums in another order, over four AdamW steps.
        assert [r.stats[name] for r in one] == pytest.approx([r.stats[name] for r in other], abs=1e-3)
    assert [r.reward_mean for r in one] == pytest.approx([r.reward_mean for r in other], abs=1e-6)


def test_a_plan_that_megatron_cannot_cut_is_refused_before_a_worker_starts(make_config: Make) -> None:
    plan = {"actor_training": {"tp": 4}, "actor_generation": {"tp": 1, "dp": 4}}
    cluster = {"gpus": 4, "device": "cpu", "timeout_s": 60}
    with pytest.raises(ConfigError, match="2 kv heads"):
        prepare_campaign(make_config(engines={"training": "megatron"}, plan=plan, cluster=cluster))
    prepare_campaign(make_config(plan=plan, cluster=cluster))
