"""Campaigns that run ahead and adapt: they take GPUs that come, move, and lose one with rows in flight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import ray

from nereus.config import CampaignConfig
from nereus.data.order import Cursor
from nereus.emu.checkpoint.source import open_checkpoint
from nereus.flows.post_training import run_steps
from nereus.planner.policies.any_gain import AnyGain
from nereus.record.decisions import read_decisions
from nereus.record.emergencies import read_emergencies
from nereus.record.metrics import read_records
from nereus.record.transitions import read_transitions
from nereus.tasks.job import open_job
from nereus.tasks.prepare import prepare_campaign
from nereus.tasks.stages import GENERATION, TRAINING
from tests.flows.striker import Striker

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
Make = Callable[..., CampaignConfig]
STEPS, STRUCK = 9, 6


class Watcher(Striker):
    """A striker that keeps what was said."""

    def __init__(self, strike: Callable[[int, str], None]) -> None:
        super().__init__(strike)
        self.said: list[str] = []

    def on_message(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "asks"), [(GENERATION, True), (TRAINING, False)])
def test_gpus_that_come_are_taken_and_one_that_dies_costs_no_step_and_no_sample(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, victim: str, asks: bool
) -> None:
    """A policy that asks before every step has generation at rest there; else a move waits for a sync.

    Training that loses a worker has a replica left, else the job would go back to its first weights.
    """
    monkeypatch.setattr(AnyGain, "asks", lambda policy, step, history: asks)
    config = make_config(
        name=f"ahead-{victim}",
        steps=STEPS,
        tracking="step",
        plan={},
        asynchrony={"staleness": 1},
        adaptation={
            "policy": {"kind": "any_gain"},
            "fixed": ["actor.training.dp=2"] if victim == TRAINING else [],
        },
        cluster={"gpus": 3, "max_gpus": 5, "device": "cpu", "timeout_s": 60},
        checkpoint={"every_steps": 0},
    )
    prepared = prepare_campaign(config)
    struck: list[int] = []
    shared: set[int] = set()
    with open_job(prepared, resume=False) as job:

        def strike(step: int, stage: str) -> None:
            if stage != "learn actor.training":
                return
            shared.update(set(job.stages[GENERATION].ranks) & set(job.stages[TRAINING].ranks))
            starting = list(job.cluster._starting)
            if starting and step < STRUCK:  # they come up beside the step, which here is short
                ray.wait(starting, num_returns=len(starting), timeout=120)
            if step == STRUCK and not struck:
                struck.append(job.stages[victim].ranks[-1])
                ray.kill(job.cluster._actors[struck[0]])

        job.listener = watcher = Watcher(strike)
        run_steps(job)
        assert job.checkpoint is not None
        control = open_checkpoint(job.checkpoint).control
        assert not shared
        assert not {rank for spec in job.stages.values() for rank in spec.ranks} & set(struck)

    records = read_records(job.log.path)
    cursor, positions, prompt_tokens = Cursor(), [], []
    for _ in range(STEPS):
        ids, cursor = prepared.order.take(cursor, config.batch.prompts)
        positions.append((cursor.epoch, cursor.position))
        tokens = sum(len(prompt.token_ids) for prompt in prepared.prompts.prompts(ids))
        prompt_tokens.append(tokens * config.batch.samples)
    assert [record.step for record in records] == list(range(STEPS))
    assert [(record.epoch, record.position) for record in records] == positions
    assert [record.prompt_tokens for record in records] == prompt_tokens
    assert [record.version for record in records] == [0, *range(STEPS - 1)]
    assert [record.stats["staleness/max"] for record in records] == [0] + [1] * (STEPS - 1)
    assert (control.step, control.optimizers["actor"].adam_steps) == (STEPS, STEPS)

    moves = read_transitions(config.run_folder)
    assert all((move.outcome, move.bytes) == ("commit", move.lower_bound) for move in moves)
    grown = [move for move in moves if move.step <= STRUCK]
    assert grown
    assert any(decision["admit"] for decision in read_decisions(config.run_folder))
    emergencies = read_emergencies(config.run_folder)
    assert [(one.gone, one.steps_redone) for one in emergencies] == [(struck, 0)]
    waited = [text for text in watcher.said if "waits for the next weight sync" in text]
    assert bool(waited) is not asks
