"""The engines by name. Each is loaded when a model-stage asks for it, so that its extra is needed only then.

Where the next one goes: a package here with `open_trainer` or `open_generator` in its `factory` module, its
name in the tables below, in `engine_limits.EngineName` and in `config.engines`.
"""

from __future__ import annotations

from importlib import import_module

import torch

from nereus.emu.arena import ShardState
from nereus.emu.engines.protocol import GenerateEngine, TrainEngine
from nereus.emu.stage import StageSpec
from nereus.emu.unit_groups import UnitGroups
from nereus.errors import ConfigError, explain

EXTRA = {"vllm": "vllm", "megatron": "megatron", "deepspeed": "deepspeed"}
REJOINING = frozenset({"vllm"})
"""Engines that go on in another generation of the world (`rejoining`); others are cheap to make."""


def open_trainer(
    spec: StageSpec, groups: UnitGroups, *, device: torch.device, state: ShardState | None
) -> TrainEngine:
    """The engine that trains or scores a model-stage, over new arenas or those of `state`.

    Raises ConfigError when the engine's extra is not installed.
    """
    opened: TrainEngine = _factory(spec.engine).open_trainer(spec, groups, device=device, state=state)
    return opened


def open_generator(
    spec: StageSpec, groups: UnitGroups, *, device: torch.device, state: ShardState | None
) -> GenerateEngine:
    """The engine that generates, over arenas of its own or the training arenas of `state`.

    Raises ConfigError when the engine's extra is not installed.
    """
    opened: GenerateEngine = _factory(spec.engine).open_generator(spec, groups, device=device, state=state)
    return opened


def load(engine: str) -> None:
    """Import an engine ahead of its use. Raises ConfigError when its extra is not installed."""
    _factory(engine)


def _factory(engine: str):  # type: ignore[no-untyped-def]  # a module chosen at run time
    try:
        return import_module(f"nereus.emu.engines.{engine}.factory")
    except ModuleNotFoundError as error:
        raise ConfigError(
            explain(
                f"cannot use the engine {engine}",
                values=str(error),
                rule="an engine other than torch is an extra of the package",
                remedy=f"pip install 'nereus-rl[{EXTRA.get(engine, engine)}]', or choose engine torch; "
                "`nereus doctor` says which engines can run here",
            )
        ) from error
