"""The driver's side of the workers: start them, call them in one order, wait so that a stop is obeyed.

    driver thread ──submit under one lock──▶ every rank of a unit ──▶ refs ──wait in slices of 0.5 s──▶ values

Collectives inside workers need the same order of calls on all ranks, so a set of calls is submitted as a
whole under one lock. Actors are owned by this process: when it dies, however it dies, Ray frees them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from nereus.config.environment import workers_per_gpu
from nereus.emu.coordinator import Coordinator
from nereus.emu.decision import StoreRecord
from nereus.emu.layout import Rank
from nereus.emu.ray_calls import answers, end_ray, start_ray, value_of
from nereus.emu.store import Store
from nereus.emu.worker import Worker
from nereus.errors import Cancelled, WorkerLost, explain

START_S = 300.0  # a worker imports torch, on a busy machine from a cold disk
POLL_S = 0.5  # the longest a stop goes unnoticed (docs/design/calls-to-workers.md)
LEAVE_S = 6 * POLL_S  # the longest that Ray's end waits for those who wait
BETWEEN_S = 0.01  # the longest that others who have calls to make in a conversation go unasked


@dataclass(frozen=True, slots=True)
class Call:
    """One method of one worker with its arguments."""

    method: str
    arguments: tuple[Any, ...] = ()
    aside: bool = False
    """Not of its conversation's kind of work: whoever sent it tells how long it took (`add_busy_s`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a worker returned to a call, and for how long it worked on it."""

    rank: Rank
    call: Call
    result: Any
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledGpu:
    """A worker's GPU. `drain_at_s` is the announced end of its node, in seconds since the epoch."""

    rank: Rank
    node: int
    drain_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Starting:
    """A worker that was requested: its rank, its actor, and since when."""

    rank: Rank
    actor: Any
    since_s: float


class Cluster:
    """Workers by rank. Make it with `start`; `close` ends the workers and, if we started it, Ray."""

    def __init__(
        self,
        make: Callable[[Rank], Any],
        store: Store,
        *,
        owns_ray: bool,
        timeout_s: float,
        stop: threading.Event,
        halted: threading.Event | None = None,
    ) -> None:
        self._make = make
        self._actors: dict[Rank, Any] = {}
        self._nodes: dict[Rank, str] = {}
        self._newest: Rank = -1
        self._starting: dict[Any, _Starting] = {}
        self._released_s: dict[Rank, float] = {}
        self._store = store
        self._owns_ray = owns_ray
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._left = threading.Condition()
        self._num_inside = 0
        self._busy_s: dict[str, float] = {}
        self._halted = halted or threading.Event()
        self.num_halts = 0
        """How often `halt` was called: a thread that was under way since before is of a try that failed."""
        self.stop = stop
        self.coordinator = Coordinator(StoreRecord(store.client))
        self._epoch = 0

    @classmethod
    def start(
        cls,
        *,
        address: str,
        num_workers: int,
        max_workers: int,
        device: str,
        threads: int,
        timeout_s: float,
        stop: threading.Event,
        halted: threading.Event | None = None,
    ) -> Cluster:
        """Connect to Ray (or start a private one for `address="local"`) and start one worker for each GPU.

        On `device="cpu"` GPUs are logical: a private Ray is told of `max_workers` of them. `timeout_s` bounds
        every collective. `stop` ends every wait when it is set; `halted` is what `halt` sets, for others that
        wait.
        """
        owns = not ray.is_initialized()
        private = address == "local"
        if owns:
            start_ray(address, num_gpus=max_workers if private and device == "cpu" else None)
        host = "127.0.0.1" if private else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        share = 1 if device == "cpu" else 1 / workers_per_gpu()
        actor = ray.remote(Worker).options(num_cpus=0, num_gpus=share, max_restarts=0)
        cluster = cls(
            lambda rank: actor.remote(rank, device, threads),
            Store(host),
            owns_ray=owns,
            timeout_s=timeout_s,
            stop=stop,
            halted=halted,
        )
        try:
            cluster._start_all(num_workers)
        except BaseException:
            cluster.close()
            raise
        return cluster

    def request(self, num_workers: int) -> None:
        """Begin to start workers on free GPUs; returns at once. `take_started` says which have come up.

        Their ranks are new: a rank is never used twice.
        """
        for _ in range(num_workers):
            self._newest += 1
            actor = self._make(self._newest)
            ref = actor.call.remote("attach", self._store.address, self._timeout_s)
            self._starting[ref] = _Starting(rank=self._newest, actor=actor, since_s=time.monotonic())

    def take_started(self, *, wait_s: float = 0.0) -> tuple[Rank, ...]:
        """The requested workers that have come up since this was last asked; they are in no world yet.

        One whose GPU went away meanwhile is forgotten, and so is one that got none for five minutes: Ray
        counts a GPU as free a little longer than it can place an actor there. Raises StageFailed when a
        worker came up and could not connect.
        """
        if not self._starting:
            return ()
        waiting = list(self._starting)
        ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=wait_s)
        taken: list[Rank] = []
        for ref in ready:
            begun = self._starting.pop(ref)
            try:
                node, _ = value_of(ref, begun.rank, "start the workers")
            except WorkerLost:
                continue
            self._actors[begun.rank] = begun.actor
            self._nodes[begun.rank] = node
            taken.append(begun.rank)
        late = time.monotonic() - START_S
        for ref in [ref for ref, begun in self._starting.items() if begun.since_s < late]:
            ray.kill(self._starting.pop(ref).actor)
        return tuple(sorted(taken))

    @property
    def num_starting(self) -> int:
        """Workers that were requested and have not come up yet."""
        return len(self._starting)

    def _start_all(self, num_workers: int) -> None:
        """Start the first workers and wait for them. Raises WorkerLost when fewer come up."""
        self.request(num_workers)
        while self._starting and not self.stop.is_set():
            self.take_started(wait_s=POLL_S)
        if len(self.ranks) < num_workers:
            raise WorkerLost(
                explain(
                    f"cannot start {num_workers} workers",
                    values=f"{len(self.ranks)} started in {START_S:.0f} s; the cluster has no more free GPUs",
                    rule="every worker needs a GPU of its own",
                    remedy="lower cluster.gpus, or wait until another job has freed its GPUs",
                )
            )

    def end(self, ranks: Iterable[Rank]) -> None:
        """End workers that hold nothing any more; their GPUs are free at once."""
        for rank in ranks:
            ray.kill(self._actors.pop(rank))

    def release(self, ranks: Iterable[Rank]) -> None:
        """Call these workers' GPUs drained from now on: `pool` says so, whoever plans leaves them."""
        self._released_s |= dict.fromkeys(ranks, time.time())

    @property
    def num_free_gpus(self) -> int:
        """GPUs of the Ray cluster that nobody uses, on nodes that stay."""
        leaving = ray._private.state.state.get_draining_nodes()
        free = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
        return sum(int(resources.get("GPU", 0)) for node, resources in free.items() if node not in leaving)

    def pool(self) -> tuple[PooledGpu, ...]:
        """The live workers with their nodes, and when a node that is being drained goes away."""
        deadlines_ms = ray._private.state.state.get_draining_nodes()
        numbers = {node: number for number, node in enumerate(sorted(set(self._nodes.values())))}
        return tuple(
            PooledGpu(
                rank=rank,
                node=numbers[self._nodes[rank]],
                drain_at_s=self._drain_at_s(rank, deadlines_ms),
            )
            for rank in self.ranks
        )

    def _drain_at_s(self, rank: Rank, deadlines_ms: Mapping[str, int]) -> float | None:
        node = self._nodes[rank]
        known = [deadlines_ms[node] / 1e3] if node in deadlines_ms else []
        return min([*known, *([self._released_s[rank]] if rank in self._released_s else [])], default=None)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The live workers."""
        return tuple(sorted(self._actors))

    @property
    def num_local(self) -> int:
        """The live workers on this machine."""
        here = str(ray.get_runtime_context().get_node_id())
        return sum(self._nodes[rank] == here for rank in self.ranks)

    def next_epoch(self) -> int:
        """A number that was never used: generations and transitions are counted together."""
        self._epoch += 1
        return self._epoch

    def join(self) -> None:
        """Put all live workers into a new generation of the world."""
        call = Call("join", (self._store.address, self.next_epoch(), self.ranks, self._timeout_s))
        self.run(dict.fromkeys(self.ranks, call), what="join the world")

    def submit(self, calls: Mapping[Rank, Call]) -> dict[Any, Rank]:
        """Send the calls, all or none before any other caller's; returns the pending results by reference.

        Raises Cancelled when the stop flag is set.
        """
        if self.stop.is_set():
            raise Cancelled(explain("stopped", remedy="run again with --resume"))
        with self._lock:
            return {
                self._actors[rank].call.remote(call.method, *call.arguments): rank
                for rank, call in calls.items()
            }

    def run(self, calls: Mapping[Rank, Call], *, what: str) -> dict[Rank, Any]:
        """Send the calls and wait for all results; `what` names the work in errors and in `take_busy_s`.

        Raises Cancelled when the stop flag is set, StageFailed when a worker raised, WorkerLost when one
        died.
        """
        return self.wait(self.submit(calls), what=what)

    def wait(
        self, pending: Mapping[Any, Rank], *, what: str, until: threading.Event | None = None
    ) -> dict[Rank, Any]:
        """Wait for submitted calls; the first failure is raised at once, without waiting for the others.

        Once `until` is set, the results that have arrived are returned; the calls themselves go on.
        """
        waiting, results, busy_s = list(pending), {}, 0.0
        with self._inside():
            while waiting and not (until is not None and until.is_set()):
                if self.stop.is_set() or self._halted.is_set():
                    raise Cancelled(explain(f"stopped in: {what}", remedy="run again with --resume"))
                ready, waiting = ray.wait(waiting, num_returns=1, timeout=POLL_S)
                for ref in ready:
                    results[pending[ref]], seconds = value_of(ref, pending[ref], what)
                    busy_s = max(busy_s, seconds)
        self.add_busy_s(what, busy_s)
        return results

    def converse(
        self,
        first: Mapping[Rank, Call],
        then: Callable[[Answer], Mapping[Rank, Call]],
        *,
        what: str,
        between: Callable[[bool], Mapping[Rank, Call]] | None = None,
    ) -> None:
        """Send calls and, as each is answered, the calls with which `then` replies, until no call is left.
        Workers do not wait for one another.

        `between` is asked all the while for further calls, and told whether no call is under way: then it may
        wait for something else, and if it has none either, the conversation is over.

        Raises as `run` does. What `take_busy_s` is told is the sum of the busiest worker, calls aside left
        out.
        """
        pending, busy_s = self._sent(first), dict.fromkeys(self.ranks, 0.0)
        poll_s = POLL_S if between is None else BETWEEN_S
        with self._inside():
            while True:
                if self.stop.is_set() or self._halted.is_set():
                    raise Cancelled(explain(f"stopped in: {what}", remedy="run again with --resume"))
                if between is not None:
                    pending |= self._sent(between(not pending))
                if not pending:
                    break
                ready, _ = ray.wait(list(pending), num_returns=1, timeout=poll_s)
                for ref in ready:
                    rank, call = pending.pop(ref)
                    result, seconds = value_of(ref, rank, what)
                    if not call.aside:
                        busy_s[rank] += seconds
                    answer = Answer(rank=rank, call=call, result=result, seconds=seconds)
                    pending |= self._sent(then(answer))
        self.add_busy_s(what, max(busy_s.values()))

    def _sent(self, calls: Mapping[Rank, Call]) -> dict[Any, tuple[Rank, Call]]:
        return {ref: (rank, calls[rank]) for ref, rank in self.submit(calls).items()}

    def add_busy_s(self, what: str, seconds: float) -> None:
        """So long its busiest worker worked on this kind of work."""
        with self._lock:
            self._busy_s[what] = self._busy_s.get(what, 0.0) + seconds

    def halt(self) -> None:
        """End all waits, because a stage failed or a stop is on its way; `reap` lifts it."""
        self.num_halts += 1
        self._halted.set()

    def reap(self, *, timeout_s: float) -> frozenset[Rank]:
        """Find out who is alive after a failure; returns the ranks that are gone, and forgets them.

        A worker answers when its current call is over. One that gives no answer in `timeout_s` hangs: it is
        ended and counts as gone. Raises Cancelled when the stop flag is set.
        """
        self._halted.clear()
        asked = self.submit(dict.fromkeys(self.ranks, Call("ping")))
        gone: set[Rank] = set()
        silent = list(asked)
        end = time.monotonic() + timeout_s
        while silent and time.monotonic() < end:
            if self.stop.is_set():
                raise Cancelled(explain("stopped while looking for workers that live"))
            answered, silent = ray.wait(silent, num_returns=len(silent), timeout=POLL_S)
            gone |= {asked[ref] for ref in answered if not answers(ref)}
        for ref in silent:
            ray.kill(self._actors[asked[ref]])
            gone.add(asked[ref])
        for rank in gone:
            del self._actors[rank]
        return frozenset(gone)

    def take_busy_s(self, of: Callable[[str], bool] = lambda what: True) -> dict[str, float]:
        """Seconds of the busiest worker by kind of work, of these kinds, since this was last asked."""
        with self._lock:
            return {what: self._busy_s.pop(what) for what in list(self._busy_s) if of(what)}

    def share(self, value: object) -> Any:
        """Put a value into the object store once, to be passed to several workers."""
        return ray.put(value)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """While this thread calls Ray, `close` waits before it ends Ray: the two would deadlock."""
        with self._left:
            self._num_inside += 1
        try:
            yield
        finally:
            with self._left:
                self._num_inside -= 1
                self._left.notify_all()

    def close(self) -> None:
        """End all waits, the workers, the store and, if we started it, Ray."""
        self.stop.set()
        with self._left:
            self._left.wait_for(lambda: self._num_inside == 0, timeout=LEAVE_S)
        for handle in (*self._actors.values(), *(begun.actor for begun in self._starting.values())):
            ray.kill(handle)
        self._actors.clear()
        self._starting.clear()
        self._store.close()
        if self._owns_ray:
            end_ray()
