"""Group calls on a GPU: what the channel makes of NCCL's answers, played by groups of the tests' own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from nereus.emu.layout import Rank
from nereus.emu.lowering import pairing
from nereus.emu.transport.collective import _CollectiveChannel
from nereus.emu.transport.connecting import end_groups
from nereus.emu.transport.protocol import Broadcast, Deadline, Receive, Send
from nereus.errors import TransportError

GPU = torch.device("cuda", 0)
RANKS = (0, 3, 4)


@dataclass(eq=False)
class Result:
    value_now: int | None = None

    def done(self) -> bool:
        return self.value_now is not None

    def value(self) -> int:
        assert self.value_now is not None
        return self.value_now


@dataclass(eq=False)
class Work:
    """One group call: complete or not, and what the watchdog says of it."""

    complete: bool = False
    result: Result = field(default_factory=Result)

    def is_completed(self) -> bool:
        return self.complete

    def get_future_result(self) -> Result:
        return self.result

    def wait(self) -> None:
        """Orders the stream."""


@dataclass(eq=False)
class Group:
    """Records what it is asked for; every group call ends as `next_works` says."""

    log: list[Any] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    inside: bool = False

    def _start_coalescing(self) -> None:
        assert not self.inside
        self.inside = True

    def _end_coalescing(self) -> Work:
        assert self.inside
        self.inside = False
        self.works.append(Work())
        return self.works[-1]

    def send(self, buffers: list[Tensor], peer: int, tag: int) -> None:
        assert self.inside, "operations of a round are one group call"
        self.log.append(("send", peer))

    def recv(self, buffers: list[Tensor], peer: int, tag: int) -> None:
        assert self.inside
        self.log.append(("recv", peer))

    def broadcast(self, buffers: list[Tensor], options: Any) -> None:
        assert self.inside
        self.log.append(("broadcast", options.rootRank))

    def _group_start(self) -> None:
        self.log.append("start")

    def _group_end(self) -> None:
        self.log.append("end")

    def abort(self) -> None:
        self.log.append("abort")

    def shutdown(self) -> None:
        self.log.append("shutdown")


@dataclass(eq=False)
class Event:
    """A mark that is reached after so many questions."""

    left: int

    def reached(self) -> bool:
        self.left -= 1
        return self.left < 0


def channel(over: str = "", **groups: Group) -> _CollectiveChannel:
    pair: tuple[Rank, ...] = (0, 3)
    held: dict[tuple[Rank, ...], Any] = {RANKS: groups["all"]}
    if "pair" in groups:
        held[pair] = groups["pair"]
    return _CollectiveChannel(groups=held, ranks=RANKS, worker=0, device=GPU, over=lambda: over)


def buffer() -> Tensor:
    return torch.zeros(8, dtype=torch.uint8)


def test_a_round_is_one_group_call_for_each_communicator() -> None:
    everyone, pair = Group(), Group()
    here = channel(all=everyone, pair=pair)
    operations: Sequence[Any] = [
        Send(3, buffer()), Broadcast(3, (0, 3), buffer()),
        Receive(4, buffer()), Broadcast(0, (0, 3), buffer()),
    ]  # fmt: skip
    works = here.post(operations)
    assert everyone.log == [("send", 1), ("recv", 2)]
    assert pair.log == [("broadcast", 1), ("broadcast", 0)]
    for work in works:
        work.wait(Deadline.after(1))
    for group in (everyone, pair):
        assert len(group.works) == 1
        group.works[0].complete = True
    here.settle(Deadline.after(5), Event(3))


def test_a_call_that_the_watchdog_ended_names_its_peers_though_the_device_went_on() -> None:
    group = Group()
    here = channel(all=group)
    here.post([Send(3, buffer()), Receive(4, buffer())])
    group.works[0].complete = True
    group.works[0].result.value_now = 2  # COMM_ERROR
    with pytest.raises(TransportError, match=r"workers \[3, 4\].*was ended"):
        here.settle(Deadline.after(5), Event(0))


def test_a_failure_is_noticed_while_the_device_still_waits() -> None:
    group = Group()
    here = channel(all=group)
    here.post([Receive(4, buffer())])
    group.works[0].result.value_now = 1  # TIMEOUT
    with pytest.raises(TransportError, match=r"workers \[4\]"):
        here.settle(Deadline.after(60), Event(1_000_000))


def test_the_deadline_bounds_what_the_device_does_not_end() -> None:
    group = Group()
    here = channel(all=group)
    here.post([Receive(4, buffer())])
    with pytest.raises(TransportError, match=r"deadline 0.05 s"):
        here.settle(Deadline.after(0.05), Event(1_000_000))


def test_a_decided_epoch_frees_those_whom_the_watchdog_does_not() -> None:
    group = Group()
    here = channel(over="the epoch is decided already", all=group)
    here.post([Receive(4, buffer())])
    with pytest.raises(TransportError, match="decided already"):
        here.settle(Deadline.after(60), Event(1_000_000))


def test_calls_that_ended_well_are_forgotten() -> None:
    group = Group()
    here = channel(all=group)
    for _ in range(50):
        here.post([Receive(4, buffer())])
        group.works[-1].complete = True
    assert len(here._in_flight) <= 2


def test_aborts_of_several_communicators_are_one_group_call() -> None:
    first, second = Group(), Group()
    end_groups([first, second], GPU, broken=True)
    assert first.log == ["start", "abort", "end"]
    assert second.log == ["abort"]
    end_groups([first], GPU, broken=False)
    assert first.log[-1] == "shutdown"


@pytest.mark.parametrize("ranks", [(0, 1), (5, 2, 9), tuple(range(8)), tuple(range(7))])
def test_peers_meet_in_the_steps_of_a_tournament(ranks: tuple[int, ...]) -> None:
    steps = {rank: pairing(ranks, rank) for rank in ranks}
    for one in ranks:
        others = [steps[one][other] for other in ranks if other != one]
        assert len(set(others)) == len(others), "one partner a step"
        assert all(steps[one][other] == steps[other][one] for other in ranks)
    assert pairing(ranks, 99) == {}
