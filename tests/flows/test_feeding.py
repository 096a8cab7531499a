"""Slots, units and limits in tokens change when rows run, and nothing of what a campaign learns."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nereus.config import CampaignConfig
from nereus.flows.campaign import campaign
from nereus.record.metrics import read_records

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
Make = Callable[..., CampaignConfig]


@pytest.mark.slow
def test_rows_fed_as_there_is_room_and_batched_by_tokens_teach_the_same(make_config: Make) -> None:
    two_units = {"actor_training": {"dp": 2}, "actor_generation": {"tp": 1, "dp": 2}}
    plain = campaign(make_config(name="plain", tracking="step"))
    config = make_config(
        name="fed",
        tracking="step",
        plan=two_units,
        sampling={"max_new_tokens": 12, "max_rows": 3},  # 16 rows on 6 slots
        batch={"prompts": 4, "samples": 4, "micro_batch_tokens": 40},
    )
    fed = campaign(config)
    one, other = read_records(plain.metrics), read_records(fed.metrics)
    assert [record.response_tokens for record in one] == [record.response_tokens for record in other]
    for ours, theirs in zip(one, other, strict=True):
        assert ours.reward_mean == pytest.approx(theirs.reward_mean)
        for name in ("gradient_norm/actor", "loss/actor"):
            # float32 sums in another order, over three steps
            assert ours.stats[name] == pytest.approx(theirs.stats[name], rel=1e-3, abs=1e-6)
