"""Every optional engine that trains agrees with the torch engine, at each cut and through transitions.

One suite for all of them; each engine's tests carry its mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nereus.emu.decoder import DecoderConfig
from nereus.emu.engine_limits import EngineName
from tests.emu.engines import training_conformance as conformance
from tests.emu.engines.torch_cases import LLAMA, QWEN2, QWEN3
from tests.emu.engines.training_conformance import Cut, Subject, Trainers

MODELS = {
    "llama": LLAMA,
    "qwen2-tied": QWEN2,
    "qwen3": QWEN3,
    "critic": LLAMA.with_head("value"),
}
# 4.3 MB of state and gradients a rank and rebuild at tp 2, so that keeping them would show in twenty.
LARGER = replace(LLAMA, hidden_size=128, intermediate_size=512)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What an engine is tried at. `routes` are cuts that follow one another; `largest` uses all it can do."""

    name: EngineName
    package: str
    cuts: tuple[Cut, ...]
    routes: tuple[tuple[Cut, ...], ...]
    largest: Cut
    rebuilt: tuple[Cut, Cut]

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Its mark, and a skip where it is not installed."""
        absent = find_spec(self.package) is None
        return [
            getattr(pytest.mark, self.name),
            pytest.mark.skipif(absent, reason=f"needs the {self.name} extra"),
        ]


MEGATRON = Engine(
    name="megatron",
    package="megatron",
    cuts=(Cut(), Cut(tp=2), Cut(pp=2), Cut(tp=2, pp=2), Cut(dp=2)),
    routes=(
        (Cut(tp=2, pp=2), Cut(tp=2, dp=2), Cut(tp=2, pp=2)),
        (Cut(), Cut(pp=2, dp=2)),
    ),
    largest=Cut(tp=2, pp=2),
    rebuilt=(Cut(tp=2, pp=2), Cut(tp=2, dp=2)),
)
DEEPSPEED = Engine(
    name="deepspeed",
    package="deepspeed",
    cuts=(Cut(), Cut(tp=2), Cut(dp=2), Cut(tp=2, dp=2)),
    routes=(
        (Cut(tp=2), Cut(dp=2), Cut(tp=2)),
        (Cut(tp=2), Cut(tp=2, dp=2), Cut(dp=4)),
        (Cut(), Cut(tp=2, dp=2)),
    ),
    largest=Cut(tp=2, dp=2),
    rebuilt=(Cut(tp=2), Cut(tp=2, dp=2)),
)
ENGINES = (MEGATRON, DEEPSPEED)


def _over(values: Callable[[Engine], Iterable[Any]], name: Callable[[Any], str] = str) -> list[Any]:
    """Every engine with each of its values, marked as the engine is."""
    return [
        pytest.param(engine, value, id=f"{engine.name}-{name(value)}", marks=engine.marks)
        for engine in ENGINES
        for value in values(engine)
    ]


at_each_cut = pytest.mark.parametrize(("engine", "cut"), _over(lambda engine: engine.cuts))
for_each_model = pytest.mark.parametrize("model", MODELS)
with_each_engine = pytest.mark.parametrize(
    "engine", [pytest.param(engine, id=engine.name, marks=engine.marks) for engine in ENGINES]
)


def made(engine: Engine, config: DecoderConfig, folder: Path, **options: bool) -> Subject:
    """The engine with random weights of a model."""
    return Subject.made(engine.name, config, folder / "model", **options)


@at_each_cut
@for_each_model
def test_scores_are_those_of_the_torch_engine(
    trainers: Trainers, tmp_path: Path, engine: Engine, cut: Cut, model: str
) -> None:
    conformance.check_scores(trainers, made(engine, MODELS[model], tmp_path), cut)


@at_each_cut
@for_each_model
def test_gradients_are_those_of_the_torch_engine(
    trainers: Trainers, tmp_path: Path, engine: Engine, cut: Cut, model: str
) -> None:
    conformance.check_gradients(trainers, made(engine, MODELS[model], tmp_path), cut)


@at_each_cut
@for_each_model
def test_five_steps_end_where_the_torch_engine_does(
    trainers: Trainers, tmp_path: Path, engine: Engine, cut: Cut, model: str
) -> None:
    conformance.check_steps(trainers, made(engine, MODELS[model], tmp_path), cut)


@pytest.mark.parametrize(
    ("engine", "route"), _over(lambda engine: engine.routes, lambda route: "-".join(map(str, route)))
)
@for_each_model
def test_transitions_move_every_bit_and_training_goes_on(
    trainers: Trainers, tmp_path: Path, engine: Engine, route: tuple[Cut, ...], model: str
) -> None:
    conformance.check_transitions(trainers, made(engine, MODELS[model], tmp_path), route)


@pytest.mark.parametrize(
    ("engine", "option"), _over(lambda _: ("recompute", "zero1"), lambda option: str(option))
)
@pytest.mark.parametrize("model", ["qwen2-tied", "qwen3"])
def test_saving_memory_changes_nothing(
    trainers: Trainers, tmp_path: Path, engine: Engine, option: str, model: str
) -> None:
    subject = made(engine, MODELS[model], tmp_path, **{option: True})
    conformance.check_steps(trainers, subject, Cut(tp=2, dp=2))


@with_each_engine
def test_a_reference_scores_without_an_optimizer(trainers: Trainers, tmp_path: Path, engine: Engine) -> None:
    conformance.check_reference(trainers, made(engine, QWEN2, tmp_path), engine.largest)


@pytest.mark.parametrize(
    ("engine", "cut"), _over(lambda engine: [cut for cut in engine.cuts if cut.tp * cut.pp == 2])
)
def test_half_precision_follows_float32(trainers: Trainers, tmp_path: Path, engine: Engine, cut: Cut) -> None:
    subject = made(engine, LLAMA, tmp_path)
    # bfloat16 keeps 8 bits and float16 11; the error grows over the layers.
    conformance.check_half_precision(trainers, subject, cut, "bf16", loss_scale=1, within=0.1)
    conformance.check_half_precision(trainers, subject, cut, "fp16", loss_scale=2.0**10, within=0.02)


@with_each_engine
def test_an_overflow_changes_nothing(trainers: Trainers, tmp_path: Path, engine: Engine) -> None:
    conformance.check_overflow(trainers, made(engine, LLAMA, tmp_path), engine.largest)


@with_each_engine
def test_collectives_and_memory_are_told(trainers: Trainers, tmp_path: Path, engine: Engine) -> None:
    conformance.check_observed(trainers, made(engine, LLAMA, tmp_path))


@with_each_engine
def test_twenty_rebuilds_leave_nothing_behind(trainers: Trainers, tmp_path: Path, engine: Engine) -> None:
    # An allocator's noise; four rebuilds' state would be as much.
    conformance.check_rebuilds(
        trainers, made(engine, LARGER, tmp_path), engine.rebuilt, growth_bytes=16 << 20
    )
