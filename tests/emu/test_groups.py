"""Generations of process groups, in real gloo processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.groups import Generation, backend_for, kv_groups, tie_groups
from nereus.emu.layout import AXES, Layout
from nereus.emu.store import Store, StoreAddress
from nereus.errors import InvalidLayout
from tests.emu.processes import Died, Raised, Workers

IDS = (0, 2, 3, 7)  # worker ids have gaps once workers have left
MODEL = decoder_spec(
    DecoderConfig(
        vocab_size=32,
        hidden_size=16,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        intermediate_size=16,
        tied=True,
    )
)
HELD: dict[str, Any] = {}


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = Workers(IDS)
    yield pool
    pool.close()


def unit(tp: int, pp: int, *ranks: int) -> Layout:
    return Layout.make(MODEL, tp=tp, pp=pp, ranks=ranks)


def join(
    worker: int, address: StoreAddress, number: int, workers: tuple[int, ...], timeout_s: float = 20.0
) -> int:
    HELD["generation"] = Generation.join(
        address, number=number, worker=worker, workers=workers, timeout_s=timeout_s
    )
    return HELD["generation"].rank


def leave(worker: int, broken: bool = False) -> bool:
    HELD.pop("generation").leave(broken=broken)
    return dist.is_initialized()


def look(worker: int, units: tuple[Layout, ...]) -> dict[str, tuple[int, list[int]]] | None:
    """By group name: this worker's rank in it, and the worker ids in group order, as an all-gather shows."""
    groups = HELD["generation"].unit_groups(units, model=MODEL)
    if groups is None:
        return None
    out = {}
    for name in ("unit", "tp", "pp", "kv", "tie", "dp"):
        group = getattr(groups, name)
        if group is not None:
            seen = [torch.zeros(1, dtype=torch.long) for _ in range(group.size())]
            dist.all_gather(seen, torch.tensor([worker]), group=group)
            out[name] = (dist.get_rank(group), [int(x) for x in seen])
    return out


def sum_over_world(worker: int) -> float:
    total = torch.tensor([float(worker)])
    dist.all_reduce(total)
    return float(total)


def test_backend_follows_the_device() -> None:
    assert backend_for("cpu") == "gloo"
    assert backend_for(torch.device("cuda", 1)) == "nccl"


def test_kv_and_tie_groups_follow_the_layout() -> None:
    layout = unit(4, 2, 9, 4, 5, 6, 3, 2, 1, 0)
    assert kv_groups(layout, 2) == [(9, 4), (5, 6), (3, 2), (1, 0)]
    assert kv_groups(unit(2, 1, 1, 0), 2) == []
    assert tie_groups(layout, MODEL) == [(9, 3), (4, 2), (5, 1), (6, 0)]
    assert tie_groups(unit(2, 1, 1, 0), MODEL) == []


def test_groups_along_ep_and_cp_lie_between_those_of_tp_and_pp() -> None:
    layout = Layout(tp=2, pp=2, ep=2, cp=2, ranks=tuple(range(100, 116)), layers=(1, 1))
    assert layout.groups("tp")[:2] == [(100, 101), (102, 103)]
    assert layout.groups("ep")[:2] == [(100, 102), (101, 103)]
    assert layout.groups("cp")[:2] == [(100, 104), (101, 105)]
    assert layout.groups("pp")[:2] == [(100, 108), (101, 109)]
    assert layout.groups("cp", "ep")[0] == (100, 102, 104, 106)
    assert tie_groups(layout, MODEL)[7] == (107, 115)
    for rank in layout.ranks:
        at = layout.position(rank)
        assert layout.rank_at(at.pp, at.tp, at.ep, at.cp) == rank
        assert all(sum(rank in group for group in layout.groups(axis)) == 1 for axis in AXES)


def test_groups_keep_layout_order_over_generations(workers: Workers, store: Store) -> None:
    cases: list[tuple[tuple[int, ...], tuple[Layout, ...]]] = [
        (IDS, (unit(2, 1, 3, 0), unit(2, 1, 2, 7))),
        ((2, 3, 7), (unit(1, 2, 7, 2),)),
        (IDS, (unit(2, 2, 7, 0, 3, 2),)),
        (IDS, (unit(4, 1, 3, 7, 0, 2),)),
    ]
    for number, (live, units) in enumerate(cases):
        ranks = workers.run(join, store.address, number, live, workers=live)
        assert ranks == {worker: i for i, worker in enumerate(live)}
        seen = workers.run(look, units, workers=live)
        for worker in live:
            mine = next((u for u in units if worker in u.ranks), None)
            if mine is None:
                assert seen[worker] is None
                continue
            at = mine.position(worker)
            expected: dict[str, tuple[int, ...]] = {
                "unit": mine.ranks,
                "tp": mine.tp_group(at.pp),
                "pp": mine.pp_group(at.tp),
                "dp": tuple(u.ranks[mine.ranks.index(worker)] for u in units),
                "kv": next((g for g in kv_groups(mine, MODEL.num_kv_heads) if worker in g), ()),
                "tie": next((g for g in tie_groups(mine, MODEL) if worker in g), ()),
            }
            assert seen[worker] == {
                name: (order.index(worker), list(order)) for name, order in expected.items() if len(order) > 1
            }
        assert not any(workers.run(leave, workers=live).values())


def test_units_of_different_shape_are_refused() -> None:
    generation = Generation(number=0, worker=0, workers=(0, 1, 2), timeout_s=1.0, _store=None)  # type: ignore[arg-type]
    with pytest.raises(InvalidLayout, match="one shape"):
        generation.unit_groups((unit(2, 1, 0, 1), unit(1, 1, 2)), model=MODEL)
    with pytest.raises(InvalidLayout, match="worker 5 is not in generation 0"):
        generation.world_rank(5)


def test_absent_worker_is_named(workers: Workers, store: Store) -> None:
    present = IDS[:3]
    for worker in present:
        workers.call(worker, join, store.address, 100, IDS, 1.0)
    for worker in present:
        with pytest.raises(Raised, match=r"TransportError.*absent: \[7\]"):
            workers.result(worker)
    workers.run(join, store.address, 101, present, workers=present)
    assert set(workers.run(sum_over_world, workers=present).values()) == {5.0}
    workers.run(leave, workers=present)


def die(worker: int) -> None:
    os._exit(1)


def broken_reduce(worker: int) -> float:
    """Seconds until an all-reduce with a dead peer raises; the generation is left at once."""
    start = time.monotonic()
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(100_000))
    except RuntimeError:
        late_s = time.monotonic() - start
        leave(worker, broken=True)
        return late_s
    raise AssertionError("the collective did not notice the dead peer")


def test_death_in_a_collective_frees_the_others_for_a_new_generation(store: Store) -> None:
    pool = Workers(IDS)
    try:
        pool.run(join, store.address, 200, IDS)
        pool.call(7, die)
        with pytest.raises(Died):
            pool.result(7)
        live = IDS[:3]
        assert max(pool.run(broken_reduce, workers=live).values()) < 5.0, "an error, not the 20 s timeout"
        pool.run(join, store.address, 201, live, workers=live)
        assert set(pool.run(sum_over_world, workers=live).values()) == {5.0}
        pool.start(7)
        pool.run(leave, workers=live)
        pool.run(join, store.address, 202, IDS)
        assert set(pool.run(sum_over_world).values()) == {12.0}
    finally:
        pool.close()


def resources(worker: int) -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_generations_leave_no_descriptors_or_threads(workers: Workers, store: Store) -> None:
    def cycle(number: int) -> None:
        workers.run(join, store.address, number, IDS)
        workers.run(look, (unit(2, 2, 7, 0, 3, 2),))
        workers.run(leave)

    for number in range(300, 303):
        cycle(number)
    before = workers.run(resources)
    for number in range(303, 311):
        cycle(number)
    assert workers.run(resources) == before
