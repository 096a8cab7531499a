"""The DeepSpeed engine against the torch engine: scores, gradients, steps, transitions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engine_limits import check_layout
from nereus.emu.layout import Layout
from nereus.errors import InvalidLayout
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


@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2-tied"])
def test_units_that_share_the_optimizer_score_as_the_oracle_after_five_steps(
    trainers: Trainers, tmp_path: Path, config: DecoderConfig
) -> None:
    subject = Subject.made("deepspeed", config, tmp_path / "model")
    batches = conformance.batches(5)
    found = []
    for spec in (subject.oracle(), replace(subject.under(Cut(tp=2, dp=2)), zero1=True)):
        trainers.build(spec)
        trainers.train(spec, batches)
        found.append(trainers.score(spec, batches[0].batch).logprobs_bt)
    torch.testing.assert_close(found[1], found[0], atol=conformance.SCORES, rtol=0)


def test_half_precision_keeps_its_master_in_the_arena(trainers: Trainers, tmp_path: Path) -> None:
    subject = Subject.made("deepspeed", replace(LLAMA, dtype="bf16"), tmp_path / "model")
    torch_engine, deepspeed = subject.oracle(), subject.under(Cut(tp=2))
    batches = conformance.batches(2)
    losses = []
    for spec in (torch_engine, deepspeed):
        trainers.build(spec)
        losses.append([step.loss for step in trainers.train(spec, batches)])
        state = trainers.state(spec)
        assert not torch.equal(state["exp_avg"]["model.norm.weight"], torch.zeros(32))
    # Eight bits of a bf16 number, in another order of sums: a hundredth of a loss of order one.
    assert losses[1] == pytest.approx(losses[0], abs=0.02)


@pytest.mark.parametrize(
    ("cut", "message"), [(Cut(pp=2), "PipelineModule"), (Cut(tp=4), "equally many whole kv heads")]
)
def test_what_deepspeed_cannot_cut_is_refused_before_anything_starts(cut: Cut, message: str) -> None:
    layout = Layout.make(decoder_spec(LLAMA), tp=cut.tp, pp=cut.pp, ranks=tuple(range(cut.tp * cut.pp)))
    with pytest.raises(InvalidLayout, match=message):
        check_layout("deepspeed", LLAMA, layout)


def test_recomputing_layers_changes_nothing(trainers: Trainers, tmp_path: Path) -> None:
    subject = replace(Subject.made("deepspeed", QWEN3, tmp_path / "model"), recompute=True)
    conformance.check_steps(trainers, subject, Cut(tp=2, dp=2))


def test_twenty_rebuilds_leave_nothing_behind(trainers: Trainers, tmp_path: Path) -> None:
    subject = Subject.made("deepspeed", LLAMA, tmp_path / "model")
    # The model with its optimizer and gradients is 0.6 MB: the allowance is that of the allocator alone.
    conformance.check_rebuilds(trainers, subject, (Cut(tp=2), Cut(tp=2, dp=2)), growth_bytes=24_000_000)
