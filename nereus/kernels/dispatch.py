"""The one place that chooses between an operation's Triton form and its twin.

NEREUS_KERNELS=torch takes the twins everywhere (to compare, or where a compiler is missing); `triton` takes
the Triton forms also on CPU tensors, which needs TRITON_INTERPRET=1 and is for tests; `auto`, the default,
takes them on GPUs.
"""

from __future__ import annotations

import os

from torch import Tensor

from nereus.errors import ConfigError, explain
from nereus.kernels.language import HAS_TRITON, INTERPRETED

VARIABLE = "NEREUS_KERNELS"
CHOICES = ("auto", "torch", "triton")


def runs_triton(tensor: Tensor) -> bool:
    """Whether an operation on `tensor` takes its Triton form.

    Raises ConfigError for an unknown value of NEREUS_KERNELS, or `triton` where it cannot run.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in CHOICES:
        raise _refused(choice, f"it is one of {', '.join(CHOICES)}", "leave it out, or take one of them")
    if choice == "auto":
        return HAS_TRITON and tensor.is_cuda
    if choice == "triton" and not (HAS_TRITON and (tensor.is_cuda or INTERPRETED)):
        raise _refused(
            choice,
            "Triton forms need Triton and a GPU, or TRITON_INTERPRET=1 from the start of the process",
            f"{VARIABLE}=auto",
        )
    return choice == "triton"


def _refused(choice: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError(
        explain("cannot choose kernels", values=f"{VARIABLE}={choice}", rule=rule, remedy=remedy)
    )
