"""An event simulator for transitions: plays a schedule's graph, or local orders, and watches memory.

It shares no code with the scheduler: it sees chains, their edges, and each rank's bytes.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.transition_trials import Trial, loads
from nereus.emu.graph import TransitionGraph
from nereus.emu.layout import Rank
from nereus.emu.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """How a transition went: whether all was done, when, and the most bytes over a cap (0 if never)."""

    complete: bool
    seconds: float
    most_over_bytes: int


@dataclass(slots=True)
class _Job:
    """A chain or a spill on its ranks."""

    seconds: float
    sends: frozenset[Rank]
    receives: frozenset[Rank]
    takes: Counter[Rank]
    gives: Counter[Rank]
    waits: set[int]
    is_spill: bool = False

    @property
    def ranks(self) -> frozenset[Rank]:
        return self.sends | self.receives | frozenset(self.gives)


def _jobs(trial: Trial, graph: TransitionGraph) -> list[_Job]:
    """Chains first, then spills. A spilled shard is given up by the spill and not by its chain."""
    jobs: list[_Job] = []
    for chain in graph.chains:
        takes, gives = Counter[Rank](), Counter[Rank]()
        for counts, units in ((takes, chain.makes), (gives, chain.ends)):
            for unit in units:
                counts.update(dict(zip(unit.layout.ranks, trial.sizes(unit), strict=True)))
        jobs.append(
            _Job(
                seconds=trial.seconds(chain) if chain.makes else 0.0,
                sends=frozenset(rank for unit in chain.reads for rank in unit.layout.ranks),
                receives=frozenset(rank for unit in chain.makes for rank in unit.layout.ranks),
                takes=takes,
                gives=gives,
                waits=set(),
            )
        )
    for first, then, _ in graph.edges:
        jobs[then].waits.add(first)
    for number, (chain_number, spill) in enumerate(graph.spills):
        moved = spill.rank_bytes / trial.room.host_bytes_per_s
        jobs[chain_number].seconds += moved
        for rank in spill.ranks:
            del jobs[chain_number].gives[rank]
        gives = Counter(dict.fromkeys(spill.ranks, spill.rank_bytes))
        jobs.append(_Job(moved, frozenset(), frozenset(), Counter(), gives, set(), True))
        for at, then in graph.spill_edges:
            if at == number:
                jobs[then].waits.add(len(jobs) - 1)
    return jobs


def play(
    trial: Trial, schedule: Schedule, *, noise: float = 0.0, seed: int = 0, links: bool = True
) -> Played:
    """Play the schedule's graph with durations off by up to a factor 1 + `noise` either way.

    With `links` every rank sends and receives once at a time and takes its chains in the schedule's order;
    without, everything starts as soon as the graph allows, which tries the memory hardest.
    """
    jobs = _jobs(trial, schedule.graph)
    draw = random.Random(seed)
    seconds = [job.seconds * (1 + noise) ** draw.uniform(-1, 1) for job in jobs]
    queues = _queues(schedule, jobs) if links else {}
    used, caps = loads(trial.graph.before, trial.sizes), trial.room.cap_by_rank
    busy: list[set[Rank]] = [set(), set()]
    waiting, done = list(range(len(jobs))), set[int]()
    running: list[tuple[float, int]] = []
    now, over = 0.0, 0
    while waiting or running:
        started = [True]
        while started:
            started = []
            for number in waiting:
                job = jobs[number]
                if job.waits - done or (links and not _may_start(number, job, queues, busy)):
                    continue
                started.append(number)
                used.update(job.takes)
                over = max([over, *(used[rank] - caps[rank] for rank in job.takes)])
                busy[0] |= job.sends
                busy[1] |= job.receives
                for rank in job.ranks if links else ():
                    if queues[rank] and queues[rank][0] == number:
                        queues[rank].popleft()
                heapq.heappush(running, (now + seconds[number], number))
            waiting = [number for number in waiting if number not in started]
        if not running:
            return Played(complete=False, seconds=now, most_over_bytes=over)
        now, number = heapq.heappop(running)
        job = jobs[number]
        busy[0] -= job.sends
        busy[1] -= job.receives
        used.subtract(job.gives)
        done.add(number)
    return Played(complete=True, seconds=now, most_over_bytes=over)


def _queues(schedule: Schedule, jobs: list[_Job]) -> dict[Rank, deque[int]]:
    """Each rank's chains in the schedule's order."""
    queues: dict[Rank, deque[int]] = {rank: deque() for rank in schedule.graph.before.ranks}
    for slot in schedule.slots:
        if slot.spill is None:
            for rank in jobs[slot.chain].ranks:
                queues[rank].append(slot.chain)
    return queues


def _may_start(number: int, job: _Job, queues: Mapping[Rank, deque[int]], busy: list[set[Rank]]) -> bool:
    """Links are free, and the chain is next on all of its ranks; a spill is in no queue."""
    if job.sends & busy[0] or job.receives & busy[1]:
        return False
    return job.is_spill or all(queues[rank][0] == number for rank in job.ranks)


def local_orders_complete(trial: Trial, seed: int) -> bool:
    """Whether all chains are done when every rank chooses the order of its own chains, without spills.

    Each model-stage orders its chains alike on all ranks, those that add least first; how a rank merges the
    model-stages is its own affair. A rank allocates for the chain that is next for it as soon as it has room,
    then waits for the chain's other ranks.
    """
    draw = random.Random(seed)
    jobs = _jobs(trial, trial.graph)
    used, caps = loads(trial.graph.before, trial.sizes), trial.room.cap_by_rank
    queues = {rank: _local_queue(trial, jobs, rank, draw) for rank in sorted(trial.graph.before.ranks)}
    holds: dict[Rank, int] = {}
    left = len(jobs)
    while left:
        moved = False
        for rank, queue in queues.items():
            if queue and rank not in holds and used[rank] + jobs[queue[0]].takes[rank] <= caps[rank]:
                holds[rank] = queue[0]
                used[rank] += jobs[queue[0]].takes[rank]
                moved = True
        for number, job in enumerate(jobs):
            if all(holds.get(rank) == number for rank in job.ranks):
                for rank in job.ranks:
                    del holds[rank]
                    queues[rank].popleft()
                used.subtract(job.gives)
                left -= 1
                moved = True
        if not moved:
            return False
    return True


def greedy_completes(trial: Trial) -> bool:
    """Whether all chains are done when one scheduler starts whatever fits, those that add least first.

    No rank waits with memory in hand here; what is missing is the look ahead.
    """
    jobs = _jobs(trial, trial.graph)
    used, caps = loads(trial.graph.before, trial.sizes), trial.room.cap_by_rank
    left = sorted(range(len(jobs)), key=lambda n: (jobs[n].takes.total() - jobs[n].gives.total(), n))
    while left:
        number = next(
            (n for n in left if all(used[r] + jobs[n].takes[r] <= caps[r] for r in jobs[n].takes)), None
        )
        if number is None:
            return False
        used.update(jobs[number].takes)
        used.subtract(jobs[number].gives)
        left.remove(number)
    return True


def _local_queue(trial: Trial, jobs: list[_Job], rank: Rank, draw: random.Random) -> deque[int]:
    chains = trial.graph.chains
    mine = [number for number, job in enumerate(jobs) if rank in job.ranks]
    in_order: dict[str, deque[int]] = {}
    for number in sorted(mine, key=lambda n: (jobs[n].takes.total() - jobs[n].gives.total(), n)):
        in_order.setdefault(chains[number].model_stage, deque()).append(number)
    turns = [chains[number].model_stage for number in mine]
    draw.shuffle(turns)
    return deque(in_order[stage].popleft() for stage in turns)
