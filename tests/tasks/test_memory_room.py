"""The room of workers: shared on a host, its own on a GPU, and what of it may go to the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from nereus.emu.cluster import Call
from nereus.emu.device_memory import FreeMemory
from nereus.tasks.memory_room import MemoryRoom, memory_room
from tests.tasks.test_transition_plan import TRAINING, stage, stages


@dataclass
class Gpu:
    rank: int
    node: int


@dataclass
class FakeCluster:
    """Two hosts with two workers each; every worker has 1,000 bytes free, every host 2,000."""

    ranks: tuple[int, ...] = (0, 1, 2, 3)
    asked: list[int] = field(default_factory=list)

    def pool(self) -> tuple[Gpu, ...]:
        return tuple(Gpu(rank, rank // 2) for rank in self.ranks)

    def run(self, calls: Mapping[int, Call], *, what: str) -> dict[int, FreeMemory]:
        self.asked += calls
        return dict.fromkeys(calls, FreeMemory(device_bytes=1000, host_bytes=2000))


@dataclass
class ClusterPart:
    device: str
    gpu_memory_gb: float | None = None


@dataclass
class Config:
    cluster: ClusterPart


@dataclass
class FakeJob:
    config: Config
    cluster: FakeCluster = field(default_factory=FakeCluster)
    stages: dict[str, Any] = field(default_factory=lambda: stages(stage(TRAINING, 1, 1, 2)))
    copies: None = None


def room(device: str, cap_gb: float | None = None) -> tuple[MemoryRoom, FakeCluster]:
    job: Any = FakeJob(Config(ClusterPart(device, cap_gb)))
    return memory_room(job, job.cluster.ranks), job.cluster


def test_workers_of_one_host_share_its_memory() -> None:
    found, cluster = room("cpu")
    assert len(cluster.asked) == 2, "one worker of each host"
    free = found.state_bytes
    assert free[2] == free[3] == 500
    assert free[0] == free[1] > 500, "what it holds now counts"
    assert not found.host_bytes, "that is where it lies already"
    assert found.in_parts


def test_a_gpu_has_room_of_its_own_and_shares_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found, cluster = room("cuda")
    assert sorted(cluster.asked) == [0, 1, 2, 3], "once"
    assert found.state_bytes[2] == found.state_bytes[3] == 1000
    assert found.host_bytes == dict.fromkeys(range(4), 800), "and some of it is left to others"
    assert found.is_far
    assert not found.in_parts
    monkeypatch.setenv("NEREUS_GPU_PAGES", "1")
    assert room("cuda")[0].in_parts


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_cap_stands_for_what_is_free_and_leaves_the_host_to_spills(device: str) -> None:
    found, cluster = room(device, 1e-6)
    assert found.state_bytes == dict.fromkeys(range(4), 1000)
    assert found.host_bytes == dict.fromkeys(range(4), 800)
    assert len(cluster.asked) == 2, "one worker of each host"


def test_only_workers_that_have_a_part_are_asked() -> None:
    job: Any = FakeJob(Config(ClusterPart("cuda")))
    found = memory_room(job, (1, 3))
    assert sorted(job.cluster.asked) == [1, 3]
    assert found.state_bytes.keys() == found.host_bytes.keys() == {1, 3}
    assert found.host_bytes[1] == 800, "its share of a host with two workers"
