"""The certificate finds an order where there is one, and no start that it admits leads into a dead end."""

from __future__ import annotations

import random
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.certificate import Certificate, components, find_sequence
from nereus.emu.list_schedule import shortest
from nereus.emu.schedule_problem import Problem, Task

SEEDS = st.integers(0, 1_000_000)


def random_problem(seed: int, *, num_tasks: int, num_bins: int, slack: int) -> Problem:
    """Tasks that take and free memory on a few bins; as in a transition, what is freed was there before."""
    draw = random.Random(seed)
    used = [0] * num_bins
    tasks = []
    for number in range(num_tasks):
        places = draw.sample(range(num_bins), draw.randint(1, min(3, num_bins)))
        takes = tuple((place, draw.randint(1, 5)) for place in places if draw.random() < 0.8)
        frees = tuple((place, draw.randint(1, 5)) for place in range(num_bins) if draw.random() < 0.4)
        for place, amount in frees:
            used[place] += amount
        link = 1 << draw.randrange(4)
        tasks.append(
            Task(
                chain=number,
                seconds=float(draw.randint(1, 9)),
                sends=link,
                receives=link,
                acquires=takes,
                releases=frees,
            )
        )
    final = list(used)
    for task in tasks:
        for place, amount in task.acquires:
            final[place] += amount
        for place, amount in task.releases:
            final[place] -= amount
    cap = tuple(max(a, b) + slack for a, b in zip(used, final, strict=True))
    bins = tuple((place,) for place in range(num_bins))
    return Problem(tasks=tuple(tasks), bins=bins, used=tuple(used), cap=cap)


def fits_in_order(problem: Problem, order: tuple[int, ...] | list[int]) -> bool:
    """Whether the tasks, one after the other, stay within every cap."""
    used = list(problem.used)
    for number in order:
        task = problem.tasks[number]
        for place, amount in task.acquires:
            used[place] += amount
        if any(level > cap for level, cap in zip(used, problem.cap, strict=True)):
            return False
        for place, amount in task.releases:
            used[place] -= amount
    return True


@settings(max_examples=150, deadline=None)  # brute force over 720 orders
@given(SEEDS, st.integers(0, 6))
def test_a_sequence_is_found_exactly_where_some_order_fits(seed: int, slack: int) -> None:
    problem = random_problem(seed, num_tasks=6, num_bins=3, slack=slack)
    found = find_sequence(problem, range(6), problem.used)
    exists = any(fits_in_order(problem, order) for order in permutations(range(6)))
    assert (found is not None) == exists
    if found is not None:
        assert sorted(found) == list(range(6))
        assert fits_in_order(problem, found)


@settings(max_examples=150, deadline=None)
@given(SEEDS, st.integers(2, 8), st.randoms(use_true_random=False))
def test_i13_every_admitted_start_leaves_an_order_for_the_rest(
    seed: int, slack: int, draw: random.Random
) -> None:
    problem = random_problem(seed, num_tasks=10, num_bins=4, slack=slack)
    groups = components(problem)
    sequences = [find_sequence(problem, group, problem.used) for group in groups]
    if any(sequence is None for sequence in sequences):
        return
    certificate = Certificate(problem, [sequence for sequence in sequences if sequence is not None])
    used, waiting, running = list(problem.used), list(range(10)), list[int]()
    while waiting or running:
        draw.shuffle(waiting)
        for number in tuple(waiting):
            task = problem.tasks[number]
            if all(used[p] + a <= problem.cap[p] for p, a in task.acquires) and certificate.admits(number):
                for place, amount in task.acquires:
                    used[place] += amount
                waiting.remove(number)
                running.append(number)
                if draw.random() < 0.5:
                    break
        assert running, "a dead end was admitted"
        done = running.pop(draw.randrange(len(running)))
        for place, amount in problem.tasks[done].releases:
            used[place] -= amount
        assert all(level <= cap for level, cap in zip(used, problem.cap, strict=True))


@settings(max_examples=100, deadline=None)
@given(SEEDS, st.integers(0, 8))
def test_a_timeline_never_exceeds_a_cap_and_uses_a_link_once_at_a_time(seed: int, slack: int) -> None:
    problem = random_problem(seed, num_tasks=12, num_bins=4, slack=slack)
    sequences = [find_sequence(problem, group, problem.used) for group in components(problem)]
    if any(sequence is None for sequence in sequences):
        return
    timeline = shortest(problem, [sequence for sequence in sequences if sequence is not None], tries=6)
    for place, cap in enumerate(problem.cap):
        changes = [
            (timeline.end_s[n], -amount)
            for n, task in enumerate(problem.tasks)
            for at, amount in task.releases
            if at == place
        ]
        changes += [
            (timeline.start_s[n], amount)
            for n, task in enumerate(problem.tasks)
            for at, amount in task.acquires
            if at == place
        ]
        level = problem.used[place]
        for _, change in sorted(changes):  # at one moment, what ends is gone first
            level += change
            assert level <= cap
    for a, first in enumerate(problem.tasks):
        for b in range(a):
            if first.sends & problem.tasks[b].sends:
                assert timeline.end_s[a] <= timeline.start_s[b] or timeline.end_s[b] <= timeline.start_s[a]


def test_a_greedy_start_that_would_end_in_a_dead_end_is_not_admitted() -> None:
    """Two ranks of cap 4 hold 3 and 3. Tasks 0 and 1 swap shards of 2 through the free byte pair of rank 0.

    Task 2 would fit first on rank 0, and then neither swap could ever start.
    """
    swap = Task(chain=0, seconds=1.0, acquires=((0, 1),), releases=((1, 2),))
    back = Task(chain=1, seconds=1.0, acquires=((1, 2),), releases=((0, 2),))
    late = Task(chain=2, seconds=9.0, acquires=((0, 1),))
    problem = Problem(tasks=(swap, back, late), bins=((0,), (1,)), used=(3, 3), cap=(4, 4))
    sequence = find_sequence(problem, (0, 1, 2), problem.used)
    assert sequence == [0, 1, 2]
    assert not Certificate(problem, [sequence]).admits(2)
    assert Certificate(problem, [sequence]).admits(0)


def test_tasks_that_share_no_memory_are_searched_apart() -> None:
    tasks = tuple(Task(chain=n, seconds=1.0, acquires=((n // 2, 1),)) for n in range(6))
    problem = Problem(tasks=tasks, bins=((0,), (1,), (2,)), used=(0, 0, 0), cap=(2, 2, 2))
    assert components(problem) == ((0, 1), (2, 3), (4, 5))


def test_a_large_group_is_sequenced_without_deep_recursion() -> None:
    tasks = tuple(Task(chain=n, seconds=1.0, acquires=((n, 1),), releases=((n + 1, 1),)) for n in range(1500))
    used = (0, *([1] * 1500))
    problem = Problem(tasks=tasks, bins=tuple((n,) for n in range(1501)), used=used, cap=(1,) * 1501)
    assert find_sequence(problem, range(1500), problem.used) == list(range(1500))


def test_a_group_holds_everything_that_its_tasks_wait_for() -> None:
    # Only the last of three in a row touches memory; the first must be in its group all the same.
    tasks = (
        Task(chain=0, seconds=1.0),
        Task(chain=1, seconds=1.0, after=(0,)),
        Task(chain=2, seconds=1.0, after=(1,), acquires=((0, 1),)),
        Task(chain=3, seconds=1.0),
    )
    problem = Problem(tasks=tasks, bins=((0,),), used=(0,), cap=(1,))
    assert components(problem) == ((0, 1, 2),)
