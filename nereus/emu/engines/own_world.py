"""A world of torch.distributed that belongs to one engine, beside the one that the worker has.

vLLM and DeepSpeed keep their process groups in globals and take the default world for their own: ranks 0 to
tp*pp - 1. A worker lives in a default world of all workers, which changes with every generation. So such an
engine gets a registry of groups of its own, put in place of torch's while the engine runs, and unseen by all
others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _unregister_process_group
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from nereus.emu.groups import Backend
from nereus.emu.unit_groups import UnitGroups

_FIRST_NAME = 1 << 20  # numbers name groups for the whole process; the worker's own start at 0


class _Registry(c10d._World):
    """What torch.distributed knows of its groups, held by the object and not by the module."""

    def __init__(self) -> None:
        super().__init__()
        self._maps: dict[str, dict[Any, Any]] = {}
        self._next_name = _FIRST_NAME

    def _map(self, name: str) -> dict[Any, Any]:
        return self._maps.setdefault(name, {})

    @property
    def pg_map(self) -> dict[ProcessGroup, Any]:
        return self._map("pg_map")

    @property
    def pg_names(self) -> dict[ProcessGroup, Any]:
        return self._map("pg_names")

    @property
    def pg_group_ranks(self) -> dict[ProcessGroup, dict[int, int]]:
        return self._map("pg_group_ranks")

    @property
    def pg_backend_config(self) -> dict[ProcessGroup, str]:
        return self._map("pg_backend_config")

    @property
    def tags_to_pg(self) -> dict[str, list[ProcessGroup]]:
        return self._map("tags_to_pg")

    @property
    def pg_to_tag(self) -> dict[ProcessGroup, str]:
        return self._map("pg_to_tag")

    @property
    def group_count(self) -> int:
        return self._next_name

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._next_name = value


class OwnWorld:
    """The world of one engine: the ranks of a unit in layout order, numbered from 0."""

    def __init__(self) -> None:
        self._registry = _Registry()

    @classmethod
    def open(cls, groups: UnitGroups, *, backend: Backend, timeout: timedelta) -> OwnWorld:
        """Connect the unit's ranks once more, as a world. Collective over the unit."""
        world = cls()
        ranks = groups.layout.ranks
        store: Store = HashStore()
        if groups.unit is not None:
            shared = c10d._get_process_group_store(groups.unit)
            # The n-th world that these ranks make over this group; all count alike.
            number = shared.add(f"own_world/{groups.rank}", 1)
            store = PrefixStore(f"own_world/number/{number}", shared)
        with world.entered():
            dist.init_process_group(
                backend,
                store=store,
                rank=ranks.index(groups.rank),
                world_size=len(ranks),
                timeout=timeout,
            )
        return world

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, torch.distributed knows this world and no other. Not for two threads at once."""
        outer = c10d._world
        c10d._world = self._registry
        try:
            yield
        finally:
            c10d._world = outer

    def close(self) -> None:
        """End every group that is left. Not collective: a peer that still waits gets an error."""
        names = self._registry.pg_names
        for group in sorted(names, key=lambda group: str(names[group]), reverse=True):
            group.shutdown()
            _unregister_process_group(group.group_name)
        self._registry = _Registry()
