"""Reads of strided memory, within one process: the system call takes our own process id as well."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nereus.emu.transport import process_memory
from nereus.emu.transport.process_memory import Lease, ReadFailed, num_bytes, read, reads_well, runs, window

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process_vm_readv is Linux's")


def nothing() -> None:
    """A check that always passes."""


def windows(views: list[Tensor]) -> np.ndarray:
    found = [window(view) for view in views]
    assert None not in found
    return np.array(found, dtype=np.int64).reshape(-1, 6)


def fetch(into: list[Tensor], out: list[Tensor], check: Callable[[], None] = nothing) -> None:
    read(os.getpid(), runs(windows(into)), runs(windows(out)), check=check)


@st.composite
def view_of_shape(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    """A view of that shape inside a larger tensor."""
    margins = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in shape]
    whole = torch.randint(-99, 99, [lo + n + hi for n, (lo, hi) in zip(shape, margins, strict=True)])
    return whole.to(torch.int16)[tuple(slice(lo, lo + n) for n, (lo, _) in zip(shape, margins, strict=True))]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[Tensor], list[Tensor]]:
    shapes = draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=6))
    sources = [draw(view_of_shape(shape)) for shape in shapes]
    return [draw(view_of_shape(shape)) for shape in shapes], sources


@settings(max_examples=150, deadline=None)
@given(pairs(), st.sampled_from([1, 3, 1024]), st.sampled_from([2, 7, 16 << 20]))
def test_strided_memory_is_read_bit_for_bit_whatever_the_calls(
    both: tuple[list[Tensor], list[Tensor]], iovecs: int, call_bytes: int
) -> None:
    into, out = both
    patch = pytest.MonkeyPatch()
    patch.setattr(process_memory, "IOV_MAX", iovecs)
    patch.setattr(process_memory, "CALL_BYTES", call_bytes)
    try:
        fetch(into, out)
    finally:
        patch.undo()
    assert all(torch.equal(a, b) for a, b in zip(into, out, strict=True))


def test_the_two_sides_may_cut_the_bytes_differently() -> None:
    flat = torch.arange(60, dtype=torch.int16)
    into = torch.zeros(6, 20, dtype=torch.int16)
    fetch([into[:, 5:15]], [flat[:23], flat[23:]])
    assert torch.equal(into[:, 5:15].reshape(-1), flat)
    assert not into[:, :5].any()
    assert not into[:, 15:].any()


def test_a_view_with_three_levels_of_strides_has_no_window() -> None:
    whole = torch.zeros(4, 4, 4, 4)
    assert window(whole[:2, :2, :2, :2]) is None
    found = window(whole[:2, :2, :2])
    assert found is not None
    assert num_bytes(np.array([found]))[0] == 2 * 2 * 2 * 4 * 4


def test_many_short_runs_are_better_packed() -> None:
    whole = torch.zeros(512, 512)
    narrow, wide, few = window(whole[:, :100]), window(whole), window(whole[:8, :100])
    assert narrow is not None
    assert wide is not None
    assert few is not None
    assert not reads_well(narrow)
    assert reads_well(wide)
    assert reads_well(few)


def test_memory_that_is_not_mapped_is_named_and_not_read() -> None:
    into = torch.zeros(16, dtype=torch.uint8)
    out = np.array([4096]), np.array([16])
    with pytest.raises(ReadFailed, match="Bad address"):
        read(os.getpid(), runs(windows([into])), out, check=nothing)


def test_a_lease_holds_until_it_is_revoked_and_for_this_host_and_process_alone() -> None:
    lease = Lease()
    card = lease.card
    card.check()
    with pytest.raises(ReadFailed, match="host"):
        replace(card, host=card.host ^ 1).check()
    with pytest.raises(ReadFailed, match="revoked"):
        replace(card, word=card.word ^ 1).check()  # the id now belongs to another process
    lease.revoke()
    with pytest.raises(ReadFailed, match="revoked"):
        card.check()
