"""The DeepSpeed engine against the torch engine: scores, gradients, steps, transitions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nereus.emu.decoder import DecoderConfig
from tests.emu.engines import training_conformance as conformance
from tests.emu.engines.torch_cases import LLAMA, QWEN2, QWEN3
from tests.emu.engines.training_conformance import Cut, Subject, Trainers

pytestmark = pytest.mark.deepspeed
pytest.importorskip("deepspeed")

CUTS = [Cut(), Cut(tp=2), Cut(dp=2), Cut(tp=2, dp=2)]
MODELS = {
    "llama": LLAMA,
    "qwen2-tied": QWEN2,
    "qwen3": QWEN3,
    "critic": LLAMA.with_head("value"),
}


@pytest.fixture(params=list(MODELS))
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    config: DecoderConfig = MODELS[request.param]
    return Subject.made("deepspeed", config, tmp_path / "model")


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_scores_are_those_of_the_torch_engine(trainers: Trainers, subject: Subject, cut: Cut) -> None:
    conformance.check_scores(trainers, subject, cut)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_gradients_are_those_of_the_torch_engine(trainers: Trainers, subject: Subject, cut: Cut) -> None:
    conformance.check_gradients(trainers, subject, cut)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_five_steps_end_where_the_torch_engine_does(trainers: Trainers, subject: Subject, cut: Cut) -> None:
    conformance.check_steps(trainers, subject, cut)


@pytest.mark.parametrize(
    ("before", "after"),
    [(Cut(), Cut(tp=2, dp=2)), (Cut(tp=2, dp=2), Cut(dp=4)), (Cut(tp=2), Cut())],
    ids=str,
)
def test_a_transition_moves_every_bit_and_training_goes_on(
    trainers: Trainers, subject: Subject, before: Cut, after: Cut
) -> None:
    conformance.check_transition(trainers, subject, before, after)


def test_recomputing_layers_changes_nothing(trainers: Trainers, tmp_path: Path) -> None:
    subject = replace(Subject.made("deepspeed", QWEN3, tmp_path / "model"), recompute=True)
    conformance.check_steps(trainers, subject, Cut(tp=2, dp=2))


def test_twenty_rebuilds_leave_nothing_behind(trainers: Trainers, tmp_path: Path) -> None:
    subject = Subject.made("deepspeed", LLAMA, tmp_path / "model")
    # The model with its optimizer and gradients is 0.6 MB: the allowance is that of the allocator alone.
    conformance.check_rebuilds(trainers, subject, (Cut(tp=2), Cut(tp=2, dp=2)), growth_bytes=24_000_000)
