"""Shards on a GPU whose memory comes and goes in pages, with a driver on paper."""

from __future__ import annotations

import gc
import threading
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.device_pages import LARGE_PAGE_BYTES, SMALL_ARENA_BYTES, page_size
from nereus.emu.gpu_driver import NAMES, gpu_driver
from nereus.emu.pages import Pages
from tests.emu.paper_driver import PaperDriver
from tests.emu.test_lanes import bounded_plan, moved

CPU = torch.device("cpu")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 3 * 4096), min_size=1, max_size=10).flatmap(
        lambda sizes: st.tuples(st.just(sizes), st.permutations(range(len(sizes))))
    )
)
def test_what_is_held_keeps_its_numbers_and_fresh_memory_is_zero(case: tuple[list[int], list[int]]) -> None:
    sizes, order = case
    ends = torch.tensor(sizes).cumsum(0).tolist()
    spans = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    driver = PaperDriver()
    pages = Pages(ends[-1], CPU, whole=True, driver=driver)
    assert driver.mapped_bytes == 0
    for index, (lo, hi) in enumerate(spans):
        pages.hold(lo, hi)
        assert not pages.flat[lo:hi].any()
        pages.flat[lo:hi] = index + 1
    held = set(range(len(spans)))
    for index in order:
        pages.release(*spans[index])
        held.remove(index)
        for other in held:
            lo, hi = spans[other]
            assert bool((pages.flat[lo:hi] == other + 1).all())
    assert driver.mapped_bytes == 0
    pages.hold(*spans[order[0]])
    assert not pages.flat[slice(*spans[order[0]])].any()


def test_without_room_nothing_is_held_and_torchs_cache_is_asked_first() -> None:
    driver = PaperDriver(room_bytes=8 * 4096, cached_bytes=5 * 4096)
    pages = Pages(12 * 4096, CPU, whole=False, driver=driver)
    pages.hold(0, 6 * 4096)  # more than was left beside the cache
    assert driver.cached_bytes == 0
    with pytest.raises(MemoryError):
        pages.hold(6 * 4096, 12 * 4096)
    assert driver.mapped_bytes == 6 * 4096
    pages.release(0, 6 * 4096)
    pages.hold(6 * 4096, 12 * 4096)
    assert driver.mapped_bytes == 6 * 4096


def test_memory_lives_as_long_as_any_view_of_it() -> None:
    driver = PaperDriver()
    pages = Pages(3 * 4096, CPU, whole=True, driver=driver)
    pages.hold(0, 3 * 4096)
    view = pages.flat[4096:8192].view(torch.float32)
    view.fill_(2.5)
    del pages
    gc.collect()
    assert bool((view == 2.5).all())
    assert driver.mapped_bytes == 3 * 4096
    del view
    gc.collect()
    assert driver.mapped_bytes == 0 == len(driver.reserved)
    assert driver.synchronized == 1, "kernels may still have used it"


def test_pages_are_larger_where_there_would_be_many() -> None:
    assert page_size(SMALL_ARENA_BYTES, 2 << 20) == 2 << 20
    assert page_size(SMALL_ARENA_BYTES + 1, 2 << 20) == LARGE_PAGE_BYTES
    assert page_size(SMALL_ARENA_BYTES + 1, 64 << 20) == 64 << 20


def pages_of_the_thread(
    drivers: dict[threading.Thread, PaperDriver], *arguments: Any, **options: Any
) -> Pages:
    driver = drivers.setdefault(threading.current_thread(), PaperDriver(granularity=64))
    return Pages(*arguments, **options, driver=driver)


def test_a_bounded_move_holds_less_at_its_peak_and_ends_as_a_direct_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = {}
    for mode in ("shadow", "bounded"):
        drivers: dict[threading.Thread, PaperDriver] = {}  # a thread is a rank

        monkeypatch.setattr("nereus.emu.arena.Pages", partial(pages_of_the_thread, drivers))
        assert not any(moved(bounded_plan(7), 3, mode=mode).values())  # type: ignore[arg-type]
        peaks[mode] = sum(driver.peak_bytes for driver in drivers.values())
        gc.collect()
        assert not any(driver.mapped_bytes for driver in drivers.values()), "every shard was given back"
    assert peaks["bounded"] < peaks["shadow"]


def test_a_machine_without_a_gpu_has_no_driver_and_both_vendors_have_all_calls() -> None:
    if not torch.cuda.is_available():
        assert gpu_driver(torch.device("cuda", 0)) is None
    assert NAMES["cuda"].keys() == NAMES["hip"].keys()
