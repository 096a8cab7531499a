"""What DeepSpeed keeps in module globals, held by the engine and put in place while the engine runs.

DeepSpeed finds its world by torch.distributed's default group and keeps it, and every group it makes, in two
modules, with no public way to let go of them. So each engine has a world of its own (the ranks of its unit)
and its own copy of those globals: engines of different layouts live in one process, and a rebuilt one starts
afresh.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType

import deepspeed
import deepspeed.comm.comm
import torch
import torch.distributed as dist
from deepspeed.utils import groups as ds_groups
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from nereus.emu.engines.own_world import OwnWorld
from nereus.emu.groups import backend_for
from nereus.emu.unit_groups import UnitGroups

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
# Compiled with g++ at its first use (a minute), for collectives of inference alone.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

Globals = dict[tuple[str, str], object]
_MODULES: dict[str, ModuleType] = {"comm": deepspeed.comm.comm, "groups": ds_groups}
_NAMES = [("comm", "cdb"), ("groups", "mesh_device"), ("groups", "mpu")]
_NAMES += [("groups", "expert_tensor_parallel_world_size")]
_NAMES += [("groups", name) for name in vars(ds_groups) if name.startswith("_") and name.isupper()]
_NAMES = [(module, name) for module, name in _NAMES if not isinstance(vars(_MODULES[module])[name], str)]


def _read() -> Globals:
    return {(module, name): vars(_MODULES[module])[name] for module, name in _NAMES}


def _write(values: Globals) -> None:
    for (module, name), value in values.items():
        setattr(_MODULES[module], name, value)


def _fresh() -> Globals:
    """The globals as they are when DeepSpeed is imported; its maps are the engine's own."""
    return {key: {} if isinstance(value, dict) else value for key, value in _PRISTINE.items()}


_PRISTINE = _read()


def initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Mapping[str, object]
) -> deepspeed.DeepSpeedEngine:
    """DeepSpeed's engine over a model. Call within `DeepSpeedProcess.entered`."""
    # DeepSpeed asks a launcher for the index of the device among those that the process sees.
    index = str(next(model.parameters()).device.index or 0)
    before, os.environ["LOCAL_RANK"] = os.environ.get("LOCAL_RANK"), index
    try:
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=dict(config), dist_init_required=False
        )
    finally:
        del os.environ["LOCAL_RANK"]
        if before is not None:
            os.environ["LOCAL_RANK"] = before
    return engine


class DeepSpeedProcess:
    """The process-wide side of one engine. Collective over the unit when it is made."""

    def __init__(self, groups: UnitGroups, device: torch.device, timeout: timedelta) -> None:
        self._world = OwnWorld.open(groups, backend=backend_for(device), timeout=timeout)
        self._globals = _fresh()
        self._outer = c10d._world
        with self.entered():
            deepspeed.init_distributed(dist_backend=backend_for(device), auto_mpi_discovery=False)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, torch.distributed and DeepSpeed know this engine's world and no other."""
        outer, self._outer = _read(), c10d._world
        _write(self._globals)
        try:
            with self._world.entered():
                yield
        finally:
            self._globals = _read()
            _write(outer)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside `entered`: torch.distributed knows the worker's own world again."""
        inner, c10d._world = c10d._world, self._outer
        try:
            yield
        finally:
            c10d._world = inner

    def tp_group(self) -> ProcessGroup | None:
        """The unit's ranks in layout order; None for one rank. Ask inside `entered`."""
        return None if dist.get_world_size() == 1 else dist.group.WORLD

    def close(self) -> None:
        """Let go of all groups. Not collective."""
        self._globals = _fresh()
        self._world.close()
