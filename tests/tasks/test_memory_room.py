"""The room of workers: shared on a host, its own on a GPU whose memory can be given back in parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from nereus.emu.cluster import Call
from nereus.tasks.memory_room import memory_room
from tests.tasks.test_transition_plan import TRAINING, stage, stages


@dataclass
class Gpu:
    rank: int
    node: int


@dataclass
class FakeCluster:
    """Two hosts with two workers each; every worker that is asked has 1,000 bytes free."""

    ranks: tuple[int, ...] = (0, 1, 2, 3)
    asked: list[int] = field(default_factory=list)

    def pool(self) -> tuple[Gpu, ...]:
        return tuple(Gpu(rank, rank // 2) for rank in self.ranks)

    def run(self, calls: Mapping[int, Call], *, what: str) -> dict[int, int]:
        self.asked += calls
        return dict.fromkeys(calls, 1000)


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


def room(device: str, cap_gb: float | None = None) -> tuple[dict[int, int], FakeCluster]:
    job: Any = FakeJob(Config(ClusterPart(device, cap_gb)))
    return memory_room(job), job.cluster


def test_workers_of_one_host_share_its_memory() -> None:
    found, cluster = room("cpu")
    assert len(cluster.asked) == 2, "one worker of each host"
    assert found[2] == found[3] == 500
    assert found[0] == found[1] > 500, "what it holds now counts"


def test_a_gpu_has_room_of_its_own_where_it_can_be_emptied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert room("cuda") == ({}, FakeCluster())
    monkeypatch.setenv("NEREUS_GPU_PAGES", "1")
    found, cluster = room("cuda")
    assert sorted(cluster.asked) == [0, 1, 2, 3]
    assert found[2] == found[3] == 1000
    assert room("cuda", 1e-6)[0] == dict.fromkeys(range(4), 1000)
