"""What Megatron keeps in module globals, and what it asks of CUDA: set for one call and put back after it.

Megatron-core 0.16 is told its groups explicitly, but two things remain global: the scratch buffer of its
local attention, and the tracker of CUDA random states, which every attention consults though nothing here
drops out. `MegatronProcess.entered()` sets them for the body and restores them, so that engines of
different layouts live in one process, and an engine that is closed leaves nothing behind.

On a machine without CUDA the body also runs under `_CpuInsteadOfCuda`. These are all the places it serves:

    schedules.forward_backward_*      torch.zeros([], device="cuda")
    p2p_communication, rope           device=torch.cuda.current_device()
    p2p_communication                 torch.cuda.synchronize() after shapes were exchanged
    tensor_parallel.random            CUDA random states around recomputed layers
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.utils import GlobalMemoryBuffer
from torch.overrides import TorchFunctionMode

from nereus.emu.engines.timed_sums import timed_sums


class _NoRandomness:
    """Stands for the tracker of random states: no model here drops anything out."""

    def is_initialized(self) -> bool:
        return True

    def fork(self, name: str = "") -> nullcontext[None]:
        return nullcontext()

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """There are none."""


class _CpuInsteadOfCuda(TorchFunctionMode):
    """Tensors that are asked to be on CUDA come to be on the CPU; for the thread that enters it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if kwargs and str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **(kwargs or {}))


@contextmanager
def _set(owner: Any, **values: object) -> Iterator[None]:
    """Attributes of a module for the body, put back after it."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class MegatronProcess:
    """The process-wide side of one engine: what it needs in Megatron's globals while its code runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = GlobalMemoryBuffer()

    @contextmanager
    def entered(self, *, building: bool = False) -> Iterator[None]:
        """Megatron's code may run in the body. With `building`, parameters are made without memory."""
        with ExitStack() as stack:
            hold = stack.enter_context
            hold(
                _set(
                    megatron_random,
                    _CUDA_RNG_STATE_TRACKER=_NoRandomness(),
                    _CUDA_RNG_STATE_TRACKER_INITIALIZED=True,
                )
            )
            hold(_set(parallel_state, _GLOBAL_MEMORY_BUFFER=self._buffer))
            hold(timed_sums())
            if building:
                hold(warnings.catch_warnings(action="ignore"))  # of what is absent; `nereus doctor` tells
                hold(_set(torch.cuda, current_device=lambda: torch.device("meta")))
                hold(torch.device("meta"))
            elif self._device.type != "cuda":
                hold(_without_cuda())
            yield

    def close(self) -> None:
        """Forget the scratch memory and the angles that Megatron caches by module, which hold the modules."""
        self._buffer.buffer.clear()
        RotaryEmbedding.forward.cache_clear()


@contextmanager
def _without_cuda() -> Iterator[None]:
    with (
        _set(torch.cuda, current_device=lambda: torch.device("cpu"), synchronize=lambda device=None: None),
        _set(
            megatron_random,
            _get_cuda_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
            _set_cuda_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
        ),
        _set(linear_with_grad_accumulation_and_async_allreduce, warned=True),  # of a setting for GPUs
        _CpuInsteadOfCuda(),
    ):
        yield
