"""A device for kernels, and the switch between an operation's two forms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nereus.kernels.dispatch import VARIABLE
from nereus.kernels.language import HAS_TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Choose the form of the calls that follow: `torch` or `triton`."""
    if not HAS_TRITON:
        pytest.skip("Triton is not installed: pip install triton")
    return lambda form: monkeypatch.setenv(VARIABLE, form)
