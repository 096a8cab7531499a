"""A device whose lanes do their work late and in any order that their marks allow.

What is given to a lane is kept as a closure and done when the test's schedule comes to it: a mark is the only
thing that makes one lane follow another, as on a GPU. A wait that is missing in the code under test shows as
wrong numbers under some schedule.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nereus.emu.lanes import Lanes
from nereus.emu.transport.protocol import Channel, Deadline, Mark, Operation, Pending
from nereus.kernels.regions import Pairs, copy_regions


def always() -> bool:
    return True


@dataclass(frozen=True)
class Job:
    work: Callable[[], None]
    may_run: Callable[[], bool] = always


@dataclass(eq=False)
class LateDevice:
    """`heeds`: whether lanes wait for marks; a device that does not shows that the waits matter."""

    seed: int
    heeds: bool = True
    lanes: list[LateLane] = field(default_factory=list)
    done: int = 0

    def __post_init__(self) -> None:
        self._choose = random.Random(self.seed)
        self.lanes = [LateLane(self, name) for name in ("engine", "pack", "wire", "unpack")]
        self._lazy = self._choose.choice(self.lanes)  # moves only when nothing else can

    @property
    def for_move(self) -> Lanes:
        engine, pack, wire, unpack = self.lanes
        return Lanes(engine=engine, pack=pack, wire=wire, unpack=unpack)

    def step(self) -> bool:
        """Do one job of a lane whose next one may run; whether there was one."""
        able = [lane for lane in self.lanes if lane.queue and lane.queue[0].may_run()]
        eager = [lane for lane in able if lane is not self._lazy] or able
        if not eager:
            return False
        self._choose.choice(eager).queue.popleft().work()
        self.done += 1
        return True

    def drain(self) -> None:
        """Do everything."""
        while self.step():
            pass
        assert not any(lane.queue for lane in self.lanes), "a lane waits for ever"


@dataclass(eq=False)
class LateMark:
    device: LateDevice
    passed: bool = False

    def reached(self) -> bool:
        for _ in range(5):  # time goes by between two questions
            if self.passed or not self.device.step():
                break
        return self.passed


@dataclass(eq=False)
class LatePending:
    """An operation that its lane has posted, or not yet."""

    inner: Pending | None = None

    def wait(self, deadline: Deadline) -> None:
        assert self.inner is not None, "a lane landed what was not posted"
        self.inner.wait(deadline)

    def is_posted(self) -> bool:
        return self.inner is not None


@dataclass(eq=False)
class LateLane:
    device: LateDevice
    name: str
    queue: deque[Job] = field(default_factory=deque)

    def copy(self, pairs: Pairs) -> None:
        self.queue.append(Job(lambda: copy_regions(pairs)))

    def give(self, work: Callable[[], None]) -> None:
        self.queue.append(Job(work))

    def carry(self, source: Tensor, target: Tensor) -> None:
        self.queue.append(Job(lambda: target.copy_(source)))  # type: ignore[arg-type, return-value]

    def post(self, channel: Channel, operations: Sequence[Operation]) -> Sequence[Pending]:
        out = [LatePending() for _ in operations]

        def work() -> None:
            for late, inner in zip(out, channel.post(operations), strict=True):
                late.inner = inner

        self.queue.append(Job(work))
        return out

    def land(self, pending: Pending, deadline: Deadline) -> None:
        assert isinstance(pending, LatePending)
        self.queue.append(Job(lambda: pending.wait(deadline), lambda: has_arrived(pending)))

    def mark(self) -> Mark:
        mark = LateMark(self.device)

        def work() -> None:
            mark.passed = True

        self.queue.append(Job(work))
        return mark

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, LateMark)
        if self.device.heeds:
            self.queue.append(Job(lambda: None, lambda: mark.passed))

    def keep(self, tensor: Tensor) -> None:
        pass


def has_arrived(pending: LatePending) -> bool:
    """Whether the wait would return at once: the peer's buffer lies in the hub's mail, or none is awaited."""
    if pending.inner is None:
        return False
    inner: Any = pending.inner
    if not hasattr(inner, "buffer"):
        return True  # a send; it was copied when it was posted
    channel = inner.channel
    return bool(channel.hub.mail[channel.key, inner.peer, channel.worker])
