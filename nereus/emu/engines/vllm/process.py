"""What vLLM expects of its process, and what it changes there: environment, threads, collectives on CPUs.

Import this before vLLM: some variables are read when it is imported.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch

from nereus.config.environment import set_defaults

DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # models are folders
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # `auto` refuses two ranks on one NUMA node
}
REQUIRED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the worker's process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its logits processors are another interface; no pp from outside
}

set_defaults(DEFAULTS)
os.environ.update(REQUIRED)


def use_torch_collectives() -> None:
    """Let vLLM's groups on CPUs use torch.distributed, as they do between machines.

    Its own way through shared memory takes one name for all units of a machine, is never unmapped while the
    process lives, stays behind where a process is killed, and waits spinning: with more ranks than free cores
    ten times slower, and twice the CPU time.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = _share_nothing


def _share_nothing(communicator: object) -> bool:
    return False


@cache
def replace_kernels_once() -> None:
    """Let vLLM put C++ in the place of its Triton kernels, on a CPU, once and not for every engine.

    It reads every attribute of every imported module for it, 0.6 s; what is imported later finds them
    replaced.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(_replaced_already)


def _replaced_already(platform: object) -> None:
    return None


@contextmanager
def without_collections() -> Iterator[None]:
    """Inside, `gc.collect` and `gc.freeze` do nothing.

    vLLM has five passes over all objects of the process made with an engine and three with its end, 0.4 to
    0.6 s each where torch and transformers are imported. And it freezes all of them, so that cycles of other
    engines in the process would not be freed as long as it lives.
    """
    collect, freeze = gc.collect, gc.freeze
    gc.collect, gc.freeze = _collect_nothing, _freeze_nothing
    try:
        yield
    finally:
        gc.collect, gc.freeze = collect, freeze


def _collect_nothing(generation: int = 2) -> int:
    return 0


def _freeze_nothing() -> None:
    return None


@contextmanager
def launched(rank: int, world_size: int, local_rank: int, stages: tuple[int, ...]) -> Iterator[None]:
    """Inside, the environment says what a launcher would: this rank of so many, and layers by stage.

    torch's global settings are put back afterwards: vLLM on CPUs replaces `torch.set_num_threads` for good.
    """
    places = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "VLLM_PP_LAYER_PARTITION": ",".join(map(str, stages)),
    }
    before = {name: os.environ.get(name) for name in places}
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    dtype = torch.get_default_dtype()
    os.environ.update(places)
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        torch.set_default_dtype(dtype)
        _restore(before)


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
