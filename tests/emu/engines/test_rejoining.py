"""An engine that is dear to make goes on where its unit is as it was and all of its ranks have theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

from nereus.emu import worker as worker_module
from nereus.emu.arena import ShardState
from nereus.emu.decoder import decoder_spec
from nereus.emu.engines.rejoining import made_alike
from nereus.emu.layout import Layout, shard
from nereus.emu.serving import Serving
from nereus.emu.stage import FromStage, StageSpec
from nereus.emu.store import Store, StoreAddress
from nereus.emu.unit_groups import UnitGroups
from nereus.emu.worker import Worker
from tests.emu.engines.torch_cases import SMALL
from tests.emu.processes import Workers

NAME = "actor.generation"


@dataclass
class DearEngine:
    """Counts what happens to it; the weights are never read."""

    state: ShardState
    groups: UnitGroups
    rejoined: int = 0
    closed: bool = False
    made: list[int] = field(default_factory=list)

    def rejoin(self, groups: UnitGroups) -> None:
        self.groups, self.rejoined = groups, self.rejoined + 1

    def close(self) -> None:
        self.closed = True


_worker: Worker | None = None
_made: list[DearEngine] = []


def open_dear(
    spec: StageSpec, groups: UnitGroups, *, device: torch.device, state: ShardState | None
) -> DearEngine:
    """Stands for the registry's way to make a generator."""
    mine = shard(spec.tensors, groups.layout, groups.rank)
    _made.append(DearEngine(state=ShardState.empty(mine, {"theta": torch.float32}, device), groups=groups))
    return _made[-1]


def build(rank: int, address: StoreAddress, number: int, spec: StageSpec, forget: bool) -> tuple[int, int]:
    """Join a world of four workers and build; how many engines were made here, how often one rejoined."""
    global _worker
    if _worker is None:
        worker_module.open_generator = open_dear  # type: ignore[assignment]
        _worker = Worker(rank, "cpu", 1)
        _worker.connect(address, 60.0)
    if forget:
        _worker._forget(NAME)
    _worker.join(address, number, range(4), 60.0)
    _worker.build(spec)
    assert all(one.closed for one in _made[:-1]), "an engine that is replaced is closed"
    if rank in spec.ranks:
        assert not _made[-1].closed
        group = _made[-1].groups.unit
        assert group is not None
        total = torch.tensor([1.0])
        torch.distributed.all_reduce(total, group=group)
        assert total.item() == 2.0, "it has the groups of the new generation"
    return len(_made), sum(one.rejoined for one in _made)


@pytest.fixture
def workers() -> Iterator[tuple[Workers, Store]]:
    store, made = Store(), Workers(range(4))
    yield made, store
    made.close()
    store.close()


def stage(*units: tuple[int, ...]) -> StageSpec:
    spec = decoder_spec(SMALL)
    return StageSpec(
        name=NAME,
        role="generation",
        model=SMALL,
        units=tuple(Layout.make(spec, tp=len(ranks), pp=1, ranks=ranks) for ranks in units),
        origin=FromStage(stage="actor.training"),
        engine="vllm",
    )


def test_a_unit_that_stays_keeps_its_engine_and_others_are_made(workers: tuple[Workers, Store]) -> None:
    pool, store = workers
    built = []
    for number, (spec, forgets) in enumerate(
        [
            (stage((0, 1)), None),
            (stage((0, 1), (2, 3)), None),  # a unit more
            (stage((0, 1), (3, 2)), None),  # ranks in another order are another unit
            (stage((0, 1), (3, 2)), 1),  # a rank has lost its engine: its peer's is of no use
        ]
    ):
        for rank in range(4):
            pool.call(rank, build, store.address, number, spec, rank == forgets)
        built.append([pool.result(rank) for rank in range(4)])
    assert built[0] == [(1, 0), (1, 0), (0, 0), (0, 0)]
    assert built[1] == [(1, 1), (1, 1), (1, 0), (1, 0)]
    assert built[2] == [(1, 2), (1, 2), (2, 0), (2, 0)]
    assert built[3] == [(2, 2), (2, 2), (2, 1), (2, 1)]


def test_an_engine_made_for_other_settings_is_no_substitute() -> None:
    spec = stage((0, 1), (2, 3))
    assert made_alike(spec, replace(spec, units=spec.units[:1], resident_rows=7), 0)
    assert not made_alike(spec, replace(spec, serving=Serving(rows=8)), 0)
    assert not made_alike(spec, replace(spec, model=replace(SMALL, num_layers=2)), 0)
    assert not made_alike(spec, stage((1, 0)), 0)
