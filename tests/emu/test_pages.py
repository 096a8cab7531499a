"""Ranges of memory whose parts can be given back."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.pages import Pages, mappable

PAGE = mmap.PAGESIZE
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gives memory back on Linux alone")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=12).flatmap(
        lambda sizes: st.tuples(st.just(sizes), st.permutations(range(len(sizes))))
    )
)
def test_what_is_held_keeps_its_numbers_whatever_is_released(case: tuple[list[int], list[int]]) -> None:
    sizes, order = case
    ends = torch.tensor(sizes).cumsum(0).tolist()
    spans = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    pages = Pages(ends[-1], CPU, whole=True)
    for index, (lo, hi) in enumerate(spans):
        pages.hold(lo, hi)
        pages.flat[lo:hi] = index + 1
    held = set(range(len(spans)))
    for index in order:
        pages.release(*spans[index])
        held.remove(index)
        for other in held:
            lo, hi = spans[other]
            assert bool((pages.flat[lo:hi] == other + 1).all())
    assert not pages.flat.any(), "all memory was given back, shared pages with the last that held them"


def resident_bytes() -> int:
    with open("/proc/self/statm") as counts:
        return int(counts.read().split()[1]) * PAGE


@pytest.mark.parametrize("whole", [True, False])
def test_released_memory_leaves_the_process_and_the_range_stays(whole: bool) -> None:
    size = 64 << 20
    pages = Pages(size, CPU, whole=whole)
    before = resident_bytes()
    pages.hold(0, size // 2)
    pages.hold(size // 2, size)
    assert resident_bytes() - before < 4 << 20, "untouched memory is not there"
    pages.flat.fill_(7)
    full = resident_bytes()
    assert full - before > 0.9 * size
    pages.release(0, size // 2)
    assert full - resident_bytes() > 0.45 * size
    assert bool((pages.flat[size // 2 :] == 7).all())


def test_an_empty_range_and_other_devices_have_plain_memory() -> None:
    assert Pages(0, CPU, whole=True).flat.numel() == 0
    assert not mappable(torch.device("meta"))
    assert not Pages(16, torch.device("meta"), whole=True).releases
