"""An engine's world of torch.distributed beside the worker's: neither knows of the other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nereus.emu.decoder import decoder_spec
from nereus.emu.engines.own_world import OwnWorld
from nereus.emu.groups import Generation
from nereus.emu.layout import Layout
from nereus.emu.store import StoreAddress
from nereus.emu.unit_groups import UnitGroups
from tests.emu.engines.conformance import MODEL
from tests.emu.engines.torch_cases import Pool

TIMEOUT = timedelta(seconds=30)


def two_units(worker: int, address: StoreAddress, number: int, case: Any) -> dict[str, Any]:
    """Four workers in one world; ranks (3, 2) and (1, 0) get worlds of their own, twice."""
    spec, out = decoder_spec(MODEL), {}
    units = [Layout.make(spec, tp=2, pp=1, ranks=ranks) for ranks in ((3, 2), (1, 0))]
    generation = Generation.join(address, number=number, worker=worker, workers=range(4))
    groups = generation.unit_groups(units, model=spec)
    assert groups is not None
    before = set(c10d._world.pg_map)
    for turn in range(2):
        own = OwnWorld.open(groups, backend="gloo", timeout=TIMEOUT)
        with own.entered():
            alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            value = torch.tensor([float(worker)])
            dist.all_reduce(value)
            out[f"own {turn}"] = (dist.get_rank(), dist.get_world_size(), value.item())
            assert alone is not None
        if turn == 0:
            # A new generation of the worker's world leaves the engine's alone.
            dist.barrier()
            generation.leave()
            generation = Generation.join(address, number=number + 500, worker=worker, workers=range(4))
            with own.entered():
                value = torch.tensor([1.0])
                dist.all_reduce(value)
                out["after"] = value.item()
            groups = generation.unit_groups(units, model=spec)
            assert groups is not None
            before = set(c10d._world.pg_map)
        total = torch.tensor([float(worker)])
        dist.all_reduce(total)
        out["outer"] = (dist.get_rank(), dist.get_world_size(), total.item())
        own.close()
        assert set(c10d._world.pg_map) == before
        dist.barrier()
    generation.leave()
    return out


class Four:
    """A case of four workers."""

    world_size = 4


def test_worlds_of_units_live_beside_the_workers_world_and_outlive_its_generations(pool: Pool) -> None:
    results = pool.run(Four(), two_units)  # type: ignore[arg-type]  # it asks a case for its world size only
    for worker, found in enumerate(results):
        rank, total = {3: (0, 5.0), 2: (1, 5.0), 1: (0, 1.0), 0: (1, 1.0)}[worker]
        assert found["own 0"] == found["own 1"] == (rank, 2, total)
        assert found["after"] == 2.0
        assert found["outer"] == (worker, 4, 6.0)


def test_a_unit_of_one_rank_needs_no_worker_world() -> None:
    layout = Layout.make(decoder_spec(MODEL), tp=1, pp=1, ranks=(7,))
    own = OwnWorld.open(UnitGroups.alone(layout), backend="gloo", timeout=TIMEOUT)
    try:
        assert not dist.is_initialized()
        with own.entered():
            assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        with pytest.raises(RuntimeError, match="inside"), own.entered():
            raise RuntimeError("inside")
        assert not dist.is_initialized()
    finally:
        own.close()
