"""A shard goes to host memory and comes back: equal, in its place, and without memory meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nereus.emu.arena import Arena, ShardState
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.host_copy import HostCopy
from nereus.emu.lanes import HostLane, Lanes
from nereus.emu.layout import Layout, shard
from nereus.emu.transport.protocol import Deadline, Mark
from nereus.errors import TransportError
from tests.emu.late_device import LateDevice
from tests.emu.states import differences, direct_state
from tests.emu.test_transaction import MODEL, unit

UNIT = unit(0, 1, 1, 0)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def deadline() -> Deadline:
    return Deadline.after(30)


def state_on(device: str) -> ShardState:
    built = direct_state(MODEL, UNIT, 0)
    out = ShardState.empty(built.shard, {kind: a.dtype for kind, a in built.arenas.items()}, device)
    for kind, arena in built.arenas.items():
        out[kind].flat.copy_(arena.flat)
    return out


@pytest.mark.parametrize("device", DEVICES)
def test_a_shard_comes_back_as_it_was(device: str) -> None:
    state, lanes = state_on(device), Lanes.of(torch.device(device))
    views = dict(state["theta"].views)
    copy = HostCopy.take(state, lanes, deadline())
    assert state.num_bytes == 0
    assert all(arena.device.type == "cpu" for arena in copy.state.arenas.values())
    assert not differences(copy.state, direct_state(MODEL, UNIT, 0))
    copy.put_back(lanes, deadline())
    assert not differences(copy.vacated, copy.state)
    for name, view in views.items():
        assert torch.equal(view, state["theta"][name]), "a tensor that an engine kept shows it, too"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("mapped", [True, False])
def test_a_vacated_arena_takes_no_memory(mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not mapped:  # as on a GPU with torch's own allocator
        monkeypatch.setattr("nereus.emu.pages.mappable", lambda device: False)
    large = decoder_spec(
        DecoderConfig(
            vocab_size=1024,
            hidden_size=1024,
            num_layers=4,
            num_heads=16,
            num_kv_heads=16,
            head_dim=64,
            intermediate_size=4096,
        )
    )
    arena = Arena(shard(large, Layout.make(large, tp=1, pp=1, ranks=(0,)), 0), torch.float32)
    names = list(arena.views)
    arena.flat.fill_(1)
    assert arena.num_bytes > 256 << 20
    before = resident_bytes()
    arena.vacate()
    assert before - resident_bytes() > 250 << 20
    assert arena.num_bytes == 0
    arena.occupy()
    arena.flat.fill_(2)
    assert float(arena[names[-1]].sum()) == 2 * arena[names[-1]].numel()


@pytest.mark.parametrize("seed", range(10))
def test_memory_is_given_back_when_the_device_has_copied_it(seed: int) -> None:
    state, device = state_on("cpu"), LateDevice(seed)
    copy = HostCopy.take(state, device.for_move, deadline())
    assert not differences(copy.state, direct_state(MODEL, UNIT, 0))
    copy.put_back(device.for_move, deadline())
    assert not differences(state, direct_state(MODEL, UNIT, 0))


class Hung(HostLane):
    """A lane that never gets past anything."""

    def mark(self) -> Mark:
        return Never()

    def wait(self, mark: Mark) -> None:
        pass


class Never:
    def reached(self) -> bool:
        return False


def test_a_device_that_hangs_is_not_waited_for() -> None:
    state, lane = state_on("cpu"), Hung()
    lanes = Lanes(engine=lane, pack=lane, wire=lane, unpack=lane)
    with pytest.raises(TransportError, match=r"deadline 0\.05 s"):
        HostCopy.take(state, lanes, Deadline.after(0.05))
    assert not differences(state, direct_state(MODEL, UNIT, 0)), "nothing was given back"
