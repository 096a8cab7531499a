"""The Megatron engine agrees with the torch engine at every cut and after a transition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nereus.emu.decoder import DecoderConfig
from tests.emu.engines import training_conformance as conformance
from tests.emu.engines.torch_cases import LLAMA, QWEN2, QWEN3
from tests.emu.engines.training_conformance import Cut, Subject, Trainers

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

CUTS = [Cut(), Cut(tp=2), Cut(pp=2), Cut(tp=2, pp=2), Cut(dp=2)]
# 4.3 MB of state and gradients a rank and rebuild, so that keeping them would show in twenty.
LARGER = replace(LLAMA, hidden_size=128, intermediate_size=512)
MODELS = {
    "llama": LLAMA,
    "qwen2-tied": QWEN2,
    "qwen3": QWEN3,
    "critic": LLAMA.with_head("value"),
}


@pytest.fixture(params=list(MODELS))
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    config: DecoderConfig = MODELS[request.param]
    return Subject.made("megatron", config, tmp_path / "model")


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
    [
        (Cut(tp=2, pp=2), Cut(tp=2, dp=2)),
        (Cut(tp=2, dp=2), Cut(tp=2, pp=2)),
        (Cut(), Cut(pp=2, dp=2)),
    ],
    ids=str,
)
def test_a_transition_moves_every_bit_and_training_goes_on(
    trainers: Trainers, subject: Subject, before: Cut, after: Cut
) -> None:
    conformance.check_transition(trainers, subject, before, after)


@pytest.mark.parametrize(
    "options", [{"recompute": True}, {"zero1": True}], ids=["recomputed layers", "a shared optimizer"]
)
def test_saving_memory_changes_nothing(trainers: Trainers, tmp_path: Path, options: dict[str, bool]) -> None:
    subject = Subject.made("megatron", QWEN3, tmp_path / "model", **options)
    conformance.check_steps(trainers, subject, Cut(pp=2, dp=2))


def test_a_reference_scores_without_an_optimizer(trainers: Trainers, tmp_path: Path) -> None:
    subject = Subject.made("megatron", QWEN2, tmp_path / "model")
    conformance.check_reference(trainers, subject, Cut(tp=2, pp=2))


@pytest.mark.parametrize("cut", [Cut(tp=2), Cut(pp=2)], ids=str)
def test_half_precision_follows_float32(trainers: Trainers, tmp_path: Path, cut: Cut) -> None:
    subject = Subject.made("megatron", LLAMA, tmp_path / "model")
    conformance.check_half_precision(trainers, subject, cut)


def test_collectives_and_memory_are_told(trainers: Trainers, tmp_path: Path) -> None:
    conformance.check_observed(trainers, Subject.made("megatron", LLAMA, tmp_path / "model"))


def test_twenty_rebuilds_leave_nothing_behind(trainers: Trainers, tmp_path: Path) -> None:
    subject = Subject.made("megatron", LARGER, tmp_path / "model")
    cuts = (Cut(tp=2, pp=2), Cut(tp=2, dp=2))
    conformance.check_rebuilds(trainers, subject, cuts, growth_bytes=16 << 20)
