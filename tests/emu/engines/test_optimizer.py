"""The optimizer over arenas: the kernel's pass and torch's are one algorithm, rounded copies included."""

from __future__ import annotations

import pytest
import torch

from nereus.emu.arena import ShardState, training_kinds
from nereus.emu.decoder import decoder_spec
from nereus.emu.engines.torch.optimizer import AdamW, step
from nereus.emu.layout import shard
from nereus.kernels.dispatch import VARIABLE
from nereus.kernels.language import HAS_TRITON
from tests.emu.engines.torch_cases import SMALL, Case

SETTINGS = AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def after_two_steps(theta: torch.dtype) -> ShardState:
    held = shard(decoder_spec(SMALL), Case(config=SMALL).layout(0), 0)
    state = ShardState.empty(held, training_kinds(theta))
    make = torch.Generator().manual_seed(7)
    size = state["theta"].flat.numel()
    start = torch.randn(size, generator=make)
    for kind in ("theta", "master"):
        if kind in state.arenas:
            state[kind].flat.copy_(start)
    for step_count in (1, 2):
        grad = torch.randn(size, generator=make)
        step(state, grad, SETTINGS, learning_rate=1e-2, step_count=step_count)
    return state


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: pip install triton")
@pytest.mark.parametrize("theta", [torch.float32, torch.bfloat16])
def test_the_kernels_pass_is_torchs_step(monkeypatch: pytest.MonkeyPatch, theta: torch.dtype) -> None:
    found = []
    for form in ("torch", "triton"):
        monkeypatch.setenv(VARIABLE, form)
        found.append(after_two_steps(theta))
    torchs, kernels = found
    for kind, arena in torchs.arenas.items():
        # Two roundings of float32 in another order; a half-precision copy may then round the other way.
        rtol = 1e-5 if arena.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(kernels[kind].flat, arena.flat, rtol=rtol, atol=1e-6)
    if theta == torch.bfloat16:
        assert torch.equal(kernels["theta"].flat, kernels["master"].flat.to(theta))
