"""Whole campaigns on real workers: what they write, that they continue, that they stop when told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nereus.config import CampaignConfig
from nereus.emu.checkpoint.folder import committed
from nereus.emu.checkpoint.source import open_checkpoint
from nereus.errors import Cancelled, CheckpointError
from nereus.flows.campaign import campaign
from nereus.flows.post_training import run_steps
from nereus.record.listener import current_listener
from nereus.record.metrics import read_records
from nereus.record.step import StepRecord
from nereus.record.transitions import read_transitions
from nereus.tasks import generate
from nereus.tasks.job import open_job
from nereus.tasks.prepare import prepare_campaign
from tests.flows.curves import FOUR_GPUS, SPLIT, SPREAD, check_curve
from tests.flows.striker import Striker

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
Make = Callable[..., CampaignConfig]


class Watcher:
    """A listener that keeps what it hears and may act on a stage."""

    def __init__(self, on_stage: Callable[[int, str], None] = lambda step, stage: None) -> None:
        self.records: list[StepRecord] = []
        self.stages: list[str] = []
        self._act = on_stage

    def on_stage(self, step: int, stage: str, seconds: float | None) -> None:
        if seconds is None:
            self.stages.append(stage)
            self._act(step, stage)

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)

    def on_message(self, text: str) -> None:
        pass


@pytest.fixture(autouse=True)
def no_worker_is_left(ray_pool: None) -> Iterator[None]:
    """Whatever a campaign's end, its GPUs are free again."""
    yield
    end = time.monotonic() + 20
    while ray.available_resources().get("GPU", 0) < 8 and time.monotonic() < end:
        time.sleep(0.1)
    assert ray.available_resources().get("GPU", 0) == 8


def test_a_campaign_leaves_metrics_report_checkpoint_and_a_model_that_transformers_loads(
    make_config: Make,
) -> None:
    result = campaign(make_config())

    records = read_records(result.metrics)
    assert [record.step for record in records] == [0, 1, 2]
    assert [(record.epoch, record.position) for record in records] == [(0, 4), (1, 2), (2, 0)]
    assert all(record.reward_mean is not None and record.length_mean > 0 for record in records)
    assert {"generate", "score rewards", "estimate", "learn actor.training", "publish"} <= records[
        0
    ].stage_s.keys()
    assert records[0].plan["actor.training"] == "tp2 pp1 dp1 on 0,1"
    assert len(records[0].memory_bytes) == 2
    assert "<html" in result.report.read_text()
    assert any((result.run_folder / "tensorboard").iterdir())
    model = AutoModelForCausalLM.from_pretrained(result.model)
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    ids = torch.tensor([tokenizer("a")["input_ids"]])
    assert torch.isfinite(model(ids).logits).all()
    assert [path.name for path in committed(result.run_folder / "checkpoints")] == [
        "step-000002",
        "step-000003",
    ]


@pytest.mark.slow
def test_a_run_resumed_at_another_layout_and_dp_goes_on_as_if_never_stopped(
    make_config: Make, tmp_path: Path
) -> None:
    straight = campaign(make_config(steps=5, name="straight", checkpoint={"every_steps": 0}))
    campaign(make_config(steps=3, name="stopped"))
    resumed = campaign(
        make_config(
            steps=5,
            name="stopped",
            plan={"actor_training": {"tp": 1, "pp": 2}, "actor_generation": {"tp": 2}},
        ),
        resume=True,
    )
    one, other = read_records(straight.metrics), read_records(resumed.metrics)
    assert [r.step for r in other] == [0, 1, 2, 3, 4]
    assert [(r.epoch, r.position) for r in one] == [(r.epoch, r.position) for r in other]
    assert [r.version for r in one] == [r.version for r in other]
    # Weights differ by rounding only, so the counter-based draws give the same responses.
    assert [r.response_tokens for r in one] == [r.response_tokens for r in other]
    assert [r.reward_mean for r in one] == pytest.approx([r.reward_mean for r in other], abs=1e-6)
    for name in ("loss/actor", "gradient_norm/actor"):
        assert [r.stats[name] for r in one] == pytest.approx([r.stats[name] for r in other], abs=1e-4)
    control = open_checkpoint(resumed.checkpoint).control
    assert (control.step, control.optimizers["actor"].adam_steps) == (5, 5)


@pytest.mark.slow
def test_a_ppo_run_with_two_forced_transitions_has_the_loss_curve_of_one_without(make_config: Make) -> None:
    still = campaign(make_config(name="still", steps=5, **FOUR_GPUS))
    changes = [{"before_step": 2, "plan": SPLIT}, {"before_step": 4, "plan": SPREAD}]
    moved = campaign(make_config(name="moved", steps=5, changes=changes, **FOUR_GPUS))

    done = read_transitions(moved.run_folder)
    assert [(record.step, record.outcome) for record in done] == [(2, "commit"), (4, "commit")]
    assert all(record.bytes == record.lower_bound > 0 for record in done)
    plans = [r.plan["actor.training"].split(" on ")[0] for r in read_records(moved.metrics)]
    assert plans == ["tp2 pp1 dp1"] * 2 + ["tp1 pp1 dp2"] * 2 + ["tp2 pp1 dp2"]
    check_curve(moved.metrics, still.metrics)
    control = open_checkpoint(moved.checkpoint).control
    assert {model: record.adam_steps for model, record in control.optimizers.items()} == {
        "actor": 5,
        "critic": 5,
    }


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(
            {"kind": "ppo", "kl": {"where": "reward", "coefficient": 0.01, "estimator": "k1"}},
            marks=pytest.mark.slow,
        ),
        pytest.param({"kind": "remax"}, marks=pytest.mark.slow),
        {"kind": "grpo", "kl": {"where": "loss", "coefficient": 0.01, "estimator": "k3"}, "entropy": 0.01},
    ],
    ids=["ppo-kl-reward", "remax", "grpo-kl-loss"],
)
def test_every_algorithm_takes_steps(make_config: Make, algorithm: dict[str, object]) -> None:
    watcher = Watcher()
    token = current_listener.set(watcher)
    try:
        result = campaign(make_config(algorithm=algorithm, steps=2, tracking="step"))
    finally:
        current_listener.reset(token)
    assert [record.step for record in watcher.records] == [0, 1]
    last = read_records(result.metrics)[-1]
    assert last.stats["gradient_norm/actor"] > 0
    if algorithm["kind"] == "ppo":
        assert "score values" in watcher.stages
        assert last.stats["gradient_norm/critic"] > 0
        assert set(open_checkpoint(result.checkpoint).models) == {"actor", "critic"}
    if "kl" in algorithm:
        assert "score reference" in watcher.stages
        assert 0 <= last.stats["early/reference"] <= 1, "two units of generation end apart"


@pytest.mark.slow
def test_what_is_scored_early_has_the_numbers_of_what_is_scored_after(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PPO whose critic and reference lie on the workers that generate; chunks add in another order."""
    gpus = {"dp": 2, "gpus": [0, 1]}
    names = ("actor_training", "actor_generation", "critic_training", "reference_inference")
    settings = {
        "algorithm": {"kind": "ppo", "kl": {"where": "reward", "coefficient": 0.01, "estimator": "k1"}},
        "plan": dict.fromkeys(names, gpus),
        "cluster": {"gpus": 2, "device": "cpu"},
        "steps": 4,
        "tracking": "step",
    }
    early = read_records(campaign(make_config(name="early", **settings)).metrics)
    monkeypatch.setattr(generate, "may_score_early", lambda job: False)
    after = read_records(campaign(make_config(name="after", **settings)).metrics)
    assert max(record.stats["early/values"] for record in early) > 0
    assert "early/values" not in after[0].stats
    for one, other in zip(early, after, strict=True):
        assert one.reward_mean == other.reward_mean
        for name in ("loss/actor", "loss/critic", "gradient_norm/actor", "gradient_norm/critic"):
            assert one.stats[name] == pytest.approx(other.stats[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_generation_on_the_training_units_shares_their_weights(make_config: Make) -> None:
    result = campaign(make_config(plan={"actor_training": {"tp": 2}}, steps=2, tracking="full"))
    records = read_records(result.metrics)
    assert "publish" not in records[0].stage_s
    assert records[0].plan["actor.generation"] == records[0].plan["actor.training"]


def test_a_reward_that_raises_is_missing_counted_and_teaches_nothing(
    make_config: Make, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def reward(response):\n    raise RuntimeError('no verdict')\n")
    result = campaign(
        make_config(reward={"kind": "python", "function": f"{broken}:reward"}, steps=1, tracking="step")
    )
    record = read_records(result.metrics)[0]
    assert record.num_missing_rewards == 16
    assert record.reward_mean is None
    assert record.stats["missing/exception"] == 16
    assert record.stats["gradient_norm/actor"] == 0


@pytest.mark.slow
def test_a_reward_model_scores_on_its_own_units(make_config: Make, reward_model_folder: Path) -> None:
    plan = {"actor_training": {"tp": 2}, "reward_inference": {"pp": 2}}
    reward = {"kind": "model", "path": str(reward_model_folder)}
    result = campaign(make_config(reward=reward, plan=plan, steps=1, tracking="step"))
    record = read_records(result.metrics)[0]
    assert record.plan["reward.inference"] == "tp1 pp2 dp1 on 0,1"
    assert record.num_missing_rewards == 0
    assert record.reward_min is not None
    assert record.reward_max is not None
    assert record.reward_min < record.reward_max


@pytest.mark.slow
def test_a_reasoning_gym_task_gives_prompts_and_scores(make_config: Make) -> None:
    gym = {"kind": "reasoning_gym", "name": "letter_counting", "size": 8}
    prompts = {"source": gym, "max_tokens": 64, "too_long": "truncate_left"}
    reward = {"kind": "reasoning_gym", "timeout_s": 60}
    result = campaign(make_config(prompts=prompts, reward=reward, steps=1, tracking="step"))
    record = read_records(result.metrics)[0]
    assert record.num_missing_rewards == 0
    assert record.reward_mean is not None


def test_a_set_stop_flag_ends_the_step_within_seconds_and_the_checkpoint_stays(make_config: Make) -> None:
    prepared = prepare_campaign(make_config(steps=50, sampling={"max_new_tokens": 64}, tracking="step"))
    with open_job(prepared, resume=False) as job:

        def strike(step: int, stage: str) -> None:
            if (step, stage) == (3, "generate"):
                job.cluster.stop.set()

        job.listener = Striker(strike)
        with pytest.raises(Cancelled):
            run_steps(job)
    found = committed(prepared.config.run_folder / "checkpoints")
    records = read_records(prepared.config.run_folder / "metrics.jsonl")
    assert len(records) == 3
    saved = [open_checkpoint(path).control.step for path in found]
    assert saved == list(range(2, len(records) + 1, 2))[-2:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "victim"), [("generate", 3), ("learn critic.training", 0), ("learn actor.training", 1)]
)
def test_a_run_that_loses_a_worker_goes_on_with_the_others_and_loses_nothing(
    make_config: Make, when: str, victim: int
) -> None:
    parts = {
        "algorithm": {"kind": "ppo"},
        "cluster": {"gpus": 4, "device": "cpu", "timeout_s": 60},
        "plan": {
            "actor_training": {"tp": 2, "dp": 2},
            "actor_generation": {"tp": 2, "dp": 2},
            "critic_training": {"tp": 1, "dp": 2},
        },
        "tracking": "step",
        "steps": 4,
    }
    still = read_records(campaign(make_config(name="still", **parts)).metrics)
    prepared = prepare_campaign(make_config(name="struck", **parts))
    with open_job(prepared, resume=False) as job:

        def strike(step: int, stage: str) -> None:
            if (step, stage) == (2, when) and victim in job.cluster.ranks:
                ray.kill(job.cluster._actors[victim])

        job.listener = Watcher(strike)
        run_steps(job)
        assert victim not in job.cluster.ranks
    struck = read_records(job.log.path)
    assert [record.step for record in struck] == [0, 1, 2, 3]
    assert struck[3].plan["actor.training"].startswith("tp2 pp1 dp1")
    assert [(r.epoch, r.position, r.version) for r in still] == [
        (r.epoch, r.position, r.version) for r in struck
    ]
    assert [r.response_tokens for r in still] == [r.response_tokens for r in struck]
    assert [r.reward_mean for r in still] == pytest.approx([r.reward_mean for r in struck], abs=1e-6)
    for name in ("loss/actor", "loss/critic"):
        assert struck[3].stats[name] == pytest.approx(still[3].stats[name], abs=1e-4)


@pytest.mark.slow
def test_a_run_that_loses_the_last_copy_of_a_model_goes_back_to_its_newest_checkpoint(
    make_config: Make,
) -> None:
    parts = {"steps": 4, "tracking": "step"}
    still = read_records(campaign(make_config(name="still", **parts)).metrics)
    prepared = prepare_campaign(make_config(name="struck", **parts))
    with open_job(prepared, resume=False) as job:

        def kill_in_third_step(step: int, stage: str) -> None:
            if (step, stage) == (3, "generate") and 1 in job.cluster.ranks:
                ray.kill(job.cluster._actors[1])

        watcher = job.listener = Watcher(kill_in_third_step)
        run_steps(job)
    struck = read_records(job.log.path)
    # The checkpoint holds two steps, so the third is done again.
    assert [record.step for record in watcher.records] == [0, 1, 2, 2, 3]
    assert [record.step for record in struck] == [0, 1, 2, 3]
    assert struck[3].plan["actor.training"] == "tp1 pp1 dp1 on 0"
    assert [r.response_tokens for r in still] == [r.response_tokens for r in struck]
    assert [r.stats["loss/actor"] for r in still] == pytest.approx(
        [r.stats["loss/actor"] for r in struck], abs=1e-4
    )


@pytest.mark.slow
def test_a_finished_run_is_neither_overwritten_nor_resumed_with_another_order_of_prompts(
    make_config: Make,
) -> None:
    config = make_config(steps=1, tracking="step")
    campaign(config)
    with pytest.raises(CheckpointError, match="--resume"):
        campaign(config)
    with pytest.raises(CheckpointError, match="same prompts"):
        campaign(config.model_copy(update={"seed": 4}), resume=True)
