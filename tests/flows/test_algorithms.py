"""Algorithms on real workers: each takes its steps, and what a step carries over survives a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nereus.config import CampaignConfig
from nereus.emu.checkpoint.source import open_checkpoint
from nereus.errors import DataError
from nereus.flows.campaign import campaign
from nereus.record.metrics import read_records

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
Make = Callable[..., CampaignConfig]
NUM_PROMPTS = 23
TWO_UPDATES = {"prompts": 4, "samples": 4, "mini_batches": 2, "micro_batch_rows": 4}


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kind": "rloo", "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.01}},
        pytest.param(
            {"kind": "reinforce_pp", "kl": {"where": "reward", "estimator": "k2", "coefficient": 0.01}},
            marks=pytest.mark.slow,
        ),
        pytest.param({"kind": "gspo"}, marks=pytest.mark.slow),
        pytest.param({"kind": "reinforce_pp", "group_baseline": True}, marks=pytest.mark.slow),
        pytest.param({"kind": "cispo", "entropy": 0.01}, marks=pytest.mark.slow),
        pytest.param(
            {"kind": "dr_grpo", "kl": {"estimator": "k3-unbiased", "coefficient": 0.01}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda algorithm: str(algorithm["kind"]),
)
def test_an_algorithm_takes_steps_of_two_updates(make_config: Make, algorithm: dict[str, object]) -> None:
    result = campaign(make_config(algorithm=algorithm, steps=2, tracking="step", batch=TWO_UPDATES))
    records = read_records(result.metrics)
    assert [(record.step, record.version) for record in records] == [(0, 0), (1, 1)]
    for record in records:
        assert record.stats["gradient_norm/actor"] > 0
        # The second update of a step is off policy, so ratios differ from one.
        assert abs(record.stats["approx_kl/actor"]) > 0
    assert open_checkpoint(result.checkpoint).control.optimizers["actor"].adam_steps == 4
    if algorithm["kind"] == "gspo":
        assert records[1].stats["clip_fraction/actor"] > 0  # its bounds are narrow


@pytest.fixture
def picky(tmp_path: Path) -> str:
    """A reward that tells responses apart for half of the letters only."""
    path = tmp_path / "picky.py"
    path.write_text(
        "def reward(response_token_ids, ground_truth):\n"
        "    return 0.0 if ground_truth in 'abcdefgh' else sum(response_token_ids) / 1000\n"
    )
    return f"{path}:reward"


def dapo(make_config: Make, function: str, **parts: object) -> CampaignConfig:
    prompts = {
        "source": {
            "kind": "python",
            "function": make_config().prompts.source.function,  # type: ignore[union-attr]
            "arguments": {"num_prompts": NUM_PROMPTS},
        }
    }
    base: dict[str, object] = {
        "algorithm": {"kind": "dapo", "max_batches": 4},
        "prompts": prompts,
        "reward": {"kind": "python", "function": function},
        "batch": {"prompts": 3, "samples": 3, "micro_batch_rows": 4},
        "tracking": "step",
    }
    return make_config(**(base | parts))


@pytest.mark.slow
def test_a_resumed_run_has_the_prompts_of_dapos_draws_and_the_kl_weight_of_one_that_never_stopped(
    make_config: Make, picky: str
) -> None:
    kl = {
        "where": "loss",
        "estimator": "k2",
        "coefficient": 0.1,
        "adaptive": {"target": 1e-4, "horizon_rows": 64},
    }
    parts: dict[str, object] = {"algorithm": {"kind": "dapo", "max_batches": 4, "kl": kl}}
    straight = campaign(dapo(make_config, picky, steps=4, name="straight", **parts))
    first = campaign(dapo(make_config, picky, steps=2, name="stopped", **parts))
    held = open_checkpoint(first.checkpoint).control.scalars["kl_beta"]
    resumed = campaign(dapo(make_config, picky, steps=4, name="stopped", **parts), resume=True)
    one, other = read_records(straight.metrics), read_records(resumed.metrics)

    used = [int(record.stats["filter/groups_used"]) for record in one]
    # The position moves by the prompts that were used up, whatever more were drawn.
    ends = [record.epoch * NUM_PROMPTS + record.position for record in one]
    assert ends == [sum(used[: step + 1]) for step in range(4)]
    batches = [record.stats["filter/batches"] for record in one]
    assert max(batches) > 1
    assert all(
        record.stats["filter/groups_kept"] == 3 for record, n in zip(one, batches, strict=True) if n < 4
    )
    betas = [record.stats["kl_beta"] for record in one]
    assert betas[0] == 0.1
    assert len(set(betas)) > 2
    assert betas[2] == held

    assert [(r.epoch, r.position) for r in one] == [(r.epoch, r.position) for r in other]
    assert [r.response_tokens for r in one] == [r.response_tokens for r in other]
    names = ("filter/batches", "filter/groups_kept", "overlong_penalty", "kl_beta", "kl_reference")
    for name in (*names, "loss/actor", "gradient_norm/actor"):
        # The same tokens in the same batches: the checkpoint has the lengths seen, by which rows are batched.
        expected = pytest.approx([r.stats[name] for r in one], rel=1e-4, abs=1e-7)
        assert [r.stats[name] for r in other] == expected, name


@pytest.mark.slow
def test_dapo_ends_with_a_reason_when_no_group_teaches(make_config: Make, tmp_path: Path) -> None:
    flat = tmp_path / "flat.py"
    flat.write_text("def reward(response):\n    return 1.0\n")
    with pytest.raises(DataError, match=r"all 12 groups of 3 responses.*max_batches = 4.*equal rewards"):
        campaign(dapo(make_config, f"{flat}:reward", steps=2))


@pytest.mark.slow
def test_a_correction_scores_once_more_and_weighs_the_engines_samples(make_config: Make) -> None:
    correction = {"weight": "token", "high": 2.0, "rejection": {"low": 0.5, "high": 2.0}}
    result = campaign(
        make_config(
            algorithm={"kind": "grpo", "correction": correction}, steps=2, tracking="step", batch=TWO_UPDATES
        )
    )
    for record in read_records(result.metrics):
        assert "score policy" in record.stage_s
        # Cached decoding and scoring round differently, by some 1e-5 in a log-probability.
        assert record.stats["correction_weight/actor"] == pytest.approx(1.0, abs=1e-3)
        assert record.stats["correction_dropped/actor"] == 0.0
        assert record.stats["gradient_norm/actor"] > 0
