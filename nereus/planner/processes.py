"""How many processes call the reward or the tools: chosen from what calls took, with hysteresis. Pure.

A reward is hidden where its calls end while something else runs that takes as long: `hide_s`. n calls on k
processes end, by list scheduling, after at most

    T(k) = W / k + (1 - 1 / k) m          W seconds of all calls, m the longest one (Graham 1969)

A tool is waited for by its row alone, so what counts is that its call begins at once. Calls that come at
`num / window` a second and find all k processes busy wait, in the mean (Erlang C, M/M/k),

    w(k) = C(k, a) s / (k - a)            s seconds of a call, a = num s / window the load in processes

More processes than the free cores feed gain nothing: k c <= cores, with c the CPU's share of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

NEWEST = 0.5  # weight of the newest step in the mean of all
LEAST_SHARE = 0.05  # of a step: shorter work is not worth hiding
WAIT_SHARE = 0.1  # of a call: how long it may wait in the mean
AIM = 0.7  # part of the limit that a new number keeps to
SLACK = 0.5  # part of the limit within which a number is left for a smaller one; above the limit for a larger
MOST_PROCESSES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsSeen:
    """What the calls of one step took: their number, mean and longest seconds, and the CPU's share of them.

    `window_s` are the seconds in which they come (tools), or are to end without being waited for (rewards);
    `step_s` those of the whole step.
    """

    num_calls: float
    call_s: float
    longest_s: float
    cpu_share: float
    window_s: float
    step_s: float

    def blended(self, before: CallsSeen | None) -> CallsSeen:
        """The mean with what was seen before, in which each step counts half as much as the one after."""
        if before is None:
            return self
        new, old = asdict(self), asdict(before)
        return CallsSeen(**{name: NEWEST * new[name] + (1 - NEWEST) * old[name] for name in new})


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A number of processes, the seconds that count with it and with the number before, the limit that they
    are held to, and why, in words.
    """

    number: int
    before: int
    now_s: float
    then_s: float
    limit_s: float
    why: str


def reward_processes(seen: CallsSeen, now: int, *, cores: float) -> Chosen:
    """As many as end the step's rewards within `window_s`, or within 5 % of the step where that is longer."""
    limit_s = max(seen.window_s, LEAST_SHARE * seen.step_s)
    return _chosen(seen, now, limit_s, cores, "scoring ends after", lambda k: scoring_s(seen, k))


def tool_processes(seen: CallsSeen, now: int, *, cores: float) -> Chosen:
    """As many as let a call wait for a tenth of its own time at most, in the mean."""
    limit_s = WAIT_SHARE * seen.call_s
    return _chosen(seen, now, limit_s, cores, "a call waits for", lambda k: waiting_s(seen, k))


def scoring_s(seen: CallsSeen, processes: int) -> float:
    """T(k): when the last of the step's calls has ended, at the latest."""
    work_s = seen.num_calls * seen.call_s
    return work_s / processes + (1 - 1 / processes) * min(seen.longest_s, work_s)


def waiting_s(seen: CallsSeen, processes: int) -> float:
    """w(k): how long a call waits in the mean; infinite where calls come faster than they are served."""
    load = seen.num_calls * seen.call_s / seen.window_s if seen.window_s > 0 else float(seen.num_calls)
    if load >= processes:
        return float("inf")
    blocked = 1.0  # Erlang B by its recursion, then C
    for k in range(1, processes + 1):
        blocked = load * blocked / (k + load * blocked)
    waits = blocked / (1 - load / processes * (1 - blocked))
    return waits * seen.call_s / (processes - load)


def most_processes(seen: CallsSeen, *, cores: float) -> int:
    """As many as the free cores feed, and no more than there are calls."""
    fed = int(cores / max(seen.cpu_share, cores / MOST_PROCESSES) + 1e-9)
    return max(1, min(fed, round(seen.num_calls)))


def _chosen(
    seen: CallsSeen, now: int, limit_s: float, cores: float, what: str, seconds: Callable[[int], float]
) -> Chosen:
    """Grow when the limit is crossed, shrink when half of it is left: what is chosen aims in between, so that
    a small change of the load moves nothing.
    """
    most = most_processes(seen, cores=cores)
    wanted = _fewest(seconds, AIM * limit_s, most)
    number, why = now, "enough"
    if now > most:
        number, why = wanted, f"no more than {most} are fed by {cores:.3g} free cores"
    elif seconds(now) > limit_s and wanted > now:
        number, why = wanted, "too few"
    elif wanted < now and seconds(now) <= SLACK * limit_s:
        number, why = wanted, "more than needed"
    text = f"{why}: {what} {seconds(now):.3g} s with {now}, {seconds(number):.3g} s with {number}"
    return Chosen(
        number=number,
        before=now,
        now_s=seconds(now),
        then_s=seconds(number),
        limit_s=limit_s,
        why=f"{text}; limit {limit_s:.3g} s",
    )


def _fewest(seconds: Callable[[int], float], limit_s: float, most: int) -> int:
    """The smallest number within the limit; where none is, the smallest that is within 5 % of the best, and
    all where even these fall behind.
    """
    if seconds(most) == float("inf"):
        return most
    for processes in range(1, most + 1):
        if seconds(processes) <= limit_s:
            return processes
    return next(k for k in range(1, most + 1) if seconds(k) <= 1.05 * seconds(most))
