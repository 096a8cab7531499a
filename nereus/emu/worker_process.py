"""What a worker's process is set to before anything else runs in it, and which device is its own."""

from __future__ import annotations

import torch

from nereus.config.environment import set_defaults, workers_per_gpu

# oneDNN keeps compiled code for every shape it has met; lengths differ in every step, so a long memory of
# them only costs: 200 MB for a model of 367 k parameters at its default of 1024, and gains no time.
#
# NCCL's watchdog ends the process by default when a peer is gone, after up to a minute in which it dumps what
# it knows. Here it ends the communicators alone (2), at once: what waits on the device goes on, the next call
# on them raises, and the worker leaves its generation.
PROCESS_DEFAULTS = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def prepare_process() -> None:
    """Set the defaults where the user has set nothing."""
    set_defaults(PROCESS_DEFAULTS)
    if workers_per_gpu() > 1:
        set_defaults({"NCCL_MULTI_RANK_GPU_ENABLE": "1"})


def own_device(device: str) -> torch.device:
    """The device of this process: Ray shows a worker its own GPU alone, and NCCL wants its number."""
    return torch.device(device, 0) if device == "cuda" else torch.device(device)
