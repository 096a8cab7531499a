"""The ring between files and a device: whole numbers in order, however late the device is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from nereus.emu.host_ring import HostRing
from nereus.emu.tensor_writer import Outgoing, sum_file, write_tensors
from tests.emu.late_device import LateDevice

CPU = torch.device("cpu")


def ring(seed: int, buffer_bytes: int, *, heeds: bool = True) -> tuple[HostRing, LateDevice]:
    device = LateDevice(seed, heeds)
    engine, pack, _, _ = device.lanes
    return HostRing(CPU, lane=pack, engine=engine, buffer_bytes=buffer_bytes), device


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=5
    ),
    buffer_bytes=st.sampled_from([16, 64, 100, 4096]),
    seed=st.integers(0, 1000),
)
def test_what_is_put_arrives_in_strided_views_and_other_dtypes(
    shapes: list[tuple[int, int, int]], buffer_bytes: int, seed: int
) -> None:
    here, device = ring(seed, buffer_bytes)
    wanted, found = [], []
    for number, shape in enumerate(shapes):
        source = torch.arange(shape[0] * shape[1] * shape[2], dtype=torch.float32).view(shape) + number
        wide = torch.zeros(shape[0], shape[1], shape[2] + 2, dtype=torch.bfloat16)
        here.put(source, wide[..., 1:-1])
        wanted.append(source.to(torch.bfloat16))
        found.append(wide)
        del source  # the ring has its own copy
    here.finish()
    device.drain()
    for want, wide in zip(wanted, found, strict=True):
        assert torch.equal(wide[..., 1:-1], want)
        assert not wide[..., 0].any()


@pytest.mark.parametrize("buffer_bytes", [64, 1 << 16])
@pytest.mark.parametrize("seed", range(5))
def test_a_file_written_through_the_ring_is_the_same_file(
    tmp_path: Path, seed: int, buffer_bytes: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    whole = {f"t{n}": torch.randn(5 + n, 24, generator=make)[:, n : 20 - n] for n in range(4)}
    tensors = [
        Outgoing(name=name, shape=tuple(one.shape), dtype=one.dtype, load=lambda one=one: one)  # type: ignore[misc]
        for name, one in whole.items()
    ]
    plain = write_tensors(tmp_path / "plain", tensors)
    here, device = ring(seed, buffer_bytes)
    assert write_tensors(tmp_path / "ring", tensors, here) == plain == sum_file(tmp_path / "ring")
    assert device.done > 0
    for name, read in load_file(tmp_path / "ring").items():
        assert torch.equal(read, whole[name])


def test_a_buffer_that_is_used_before_its_mark_would_show() -> None:
    """Asked too early, a late device gives another tensor's numbers: the marks are what keeps them apart."""
    here, device = ring(1, 64)
    for slot in here._slots:
        slot.wait = lambda: None  # type: ignore[method-assign]
    target = torch.zeros(6, 16)
    here.put(torch.arange(96, dtype=torch.float32).view(6, 16), target)
    device.drain()
    assert not torch.equal(target, torch.arange(96, dtype=torch.float32).view(6, 16))


def test_a_cpu_needs_no_ring() -> None:
    assert HostRing.of(CPU) is None
