"""Transition scheduling: completion, deadlocks of local orders, makespan against CP-SAT, planning time.

    python benchmarks/transition_schedule.py                  # everything, about five minutes
    python benchmarks/transition_schedule.py --trials 30      # a look

1. Random overlapped transitions (serve/serve, serve/train, train/train) with memory for the larger of both
   states and `slack` mean shards: each is scheduled, then played event by event with durations off by up to
   1.5x, once in the schedule's order with exclusive links and once with everything started as early as the
   graph allows. The same trials under independent local orders, and under a greedy central order.
2. The same scheduling problems by CP-SAT, which starts from our timeline and has `--limit` seconds. Where no
   order fits without spills (CP-SAT proves it), both schedule the problem with our spills.
3. Dense problems, harder than transitions are, with and without an order.
4. CPU time of planning at 1,024 GPUs: graph from two states, and schedule.

All times are CPU seconds of one thread unless named otherwise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.dense_transfers import dense_problem
from benchmarks.large_transitions import EVERYTHING, LONGER, START, large_models, large_state
from benchmarks.transition_events import greedy_completes, local_orders_complete, play
from benchmarks.transition_optimum import solve
from benchmarks.transition_trials import KINDS, Trial, trial
from nereus.emu.certificate import components, find_sequence
from nereus.emu.graph import TransitionGraph, build_graph
from nereus.emu.list_schedule import shortest
from nereus.emu.schedule import Schedule, schedule
from nereus.emu.schedule_problem import Problem, Room, problem_of
from nereus.emu.shard_bytes import sizes_of
from nereus.emu.spilling import with_spills
from nereus.emu.topology import Topology

TIGHT, LOOSE = (0.0, 0.5, 1.0), (2.0,)
NOISE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One trial. `gap` is None where CP-SAT found nothing; `unneeded_spill` where an order fits without."""

    kind: str
    slack: float
    num_chains: int
    complete: bool
    over_bytes: int
    spilled: bool
    unneeded_spill: bool
    local_orders_complete: bool
    greedy_completes: bool
    gap: float | None
    cpu_s: float


def run_trial(seed: int, slack: float, *, num_ranks: int, limit_s: float) -> Outcome:
    """Schedule, play and compare one trial."""
    given = trial(seed, num_ranks=num_ranks, slack=slack)
    started = time.process_time()
    found = schedule(given.graph, given.sizes, given.room, given.topology, given.seconds)
    cpu_s = time.process_time() - started
    played = [
        play(given, found, noise=noise, seed=seed, links=links)
        for noise in (0.0, NOISE)
        for links in (True, False)
    ]
    plain = _problem(given)
    spilled = found.spilled_bytes > 0
    problem = with_spills(plain, given.graph, given.room, given.topology)[0] if spilled else plain
    best = solve(problem, limit_s=limit_s, hint=_starts(problem))
    return Outcome(
        kind=given.kind,
        slack=slack,
        num_chains=len(given.graph.chains),
        complete=all(outcome.complete for outcome in played),
        over_bytes=max(outcome.most_over_bytes for outcome in played),
        spilled=spilled,
        unneeded_spill=spilled and solve(plain, limit_s=limit_s).status != "INFEASIBLE",
        local_orders_complete=local_orders_complete(given, seed),
        greedy_completes=greedy_completes(given),
        gap=None if not best.makespan_s else found.makespan_s / best.makespan_s - 1,
        cpu_s=cpu_s,
    )


def _problem(given: Trial) -> Problem:
    return problem_of(given.graph, given.sizes, given.room, given.seconds)


def _starts(problem: Problem) -> tuple[float, ...]:
    sequences = [find_sequence(problem, group, problem.used) for group in components(problem)]
    return shortest(problem, [found for found in sequences if found is not None]).start_s


def trials_table(num_trials: int, num_ranks: int, limit_s: float) -> list[Outcome]:
    """Run the trials; print one line for each slack and kind."""
    slacks = TIGHT + LOOSE
    outcomes = [
        run_trial(seed, slacks[seed // len(KINDS) % len(slacks)], num_ranks=num_ranks, limit_s=limit_s)
        for seed in range(num_trials)
    ]
    print(f"\n{num_trials} trials on {num_ranks} GPUs (slack in mean shards)")
    print(
        "slack kind         trials chains complete over-cap spill(unneeded) local-dead greedy-dead "
        " gap% max%  cpu ms"
    )
    for slack in slacks:
        for kind in KINDS:
            _line(f"{slack:<5} {kind:<12}", [o for o in outcomes if (o.slack, o.kind) == (slack, kind)])
    for name, chosen in (("tight", TIGHT), ("slack", LOOSE)):
        _line(f"{name:<18}", [o for o in outcomes if o.slack in chosen])
    fitting = [o for o in outcomes if not o.spilled]
    dead = sum(not o.local_orders_complete for o in fitting)
    print(f"local orders dead where an order without spills exists: {dead}/{len(fitting)}")
    return outcomes


def _line(name: str, rows: list[Outcome]) -> None:
    if not rows:
        return
    gaps = [100 * row.gap for row in rows if row.gap is not None]
    print(
        f"{name} {len(rows):6} {mean(row.num_chains for row in rows):6.1f} "
        f"{sum(row.complete for row in rows):8} {sum(row.over_bytes > 0 for row in rows):8} "
        f"{sum(row.spilled for row in rows):5}({sum(row.unneeded_spill for row in rows)})       "
        f"{sum(not row.local_orders_complete for row in rows):10} "
        f"{sum(not row.greedy_completes for row in rows):11} "
        f"{mean(gaps) if gaps else float('nan'):5.2f} {max(gaps, default=float('nan')):4.1f} "
        f"{1e3 * median(row.cpu_s for row in rows):7.1f}"
    )


def dense_table(num_problems: int, limit_s: float) -> None:
    """Dense problems: orders missed, and the gap where there is one."""
    print("\ndense problems (CP-SAT from our timeline)")
    print("GPUs slack  problems infeasible missed  gap%  max%  optimal  cpu ms")
    for num_gpus in (8, 16):
        for slack in (0.5, 1.0, 2.0):
            gaps, cpu, missed, infeasible, optimal = [], [], 0, 0, 0
            for seed in range(num_problems):
                problem = dense_problem(seed, num_gpus=num_gpus, slack=slack)
                started = time.process_time()
                sequences = [find_sequence(problem, group, problem.used) for group in components(problem)]
                complete = [found for found in sequences if found is not None]
                timeline = shortest(problem, complete) if len(complete) == len(sequences) else None
                cpu.append(time.process_time() - started)
                best = solve(problem, limit_s=limit_s, hint=timeline.start_s if timeline else ())
                infeasible += best.status == "INFEASIBLE"
                optimal += best.status == "OPTIMAL"
                missed += timeline is None and best.makespan_s is not None
                if timeline is not None and best.makespan_s:
                    gaps.append(100 * (timeline.makespan_s / best.makespan_s - 1))
            print(
                f"{num_gpus:4} {slack:5} {num_problems:9} {infeasible:10} {missed:6} "
                f"{mean(gaps) if gaps else float('nan'):5.1f} {max(gaps, default=float('nan')):5.1f} "
                f"{optimal:8} {1e3 * median(cpu):7.1f}"
            )


def planning_table(num_gpus: int) -> None:
    """CPU of the graph and the schedule of large transitions; the least and the median of fifteen."""
    models = large_models()
    sizes, topology = sizes_of(models), Topology.uniform(num_gpus, 8)
    start = large_state(models, START, num_gpus)
    print(f"\nplanning at {num_gpus} GPUs, CPU ms (least / median of 15)")
    print("transition  memory  chains operations tight   graph        schedule     both         DiGraph")
    for name, places in (("longer", LONGER), ("everything", EVERYTHING)):
        target = large_state(models, places, num_gpus)
        graph = build_graph(start, target, topology)
        for memory, cap_bytes in (("ample", 1 << 60), ("110 GB", int(110e9))):
            room = Room(cap_bytes=cap_bytes)
            found = schedule(graph, sizes, room, topology)
            build = partial(build_graph, start, target, topology)
            fit = partial(schedule, sizes=sizes, room=room, topology=topology)
            rows = (
                _cpu_ms(build),
                _cpu_ms(partial(fit, graph)),
                _cpu_ms(partial(_both, build, fit)),
                _cpu_ms(partial(_digraph, found.graph)),
            )
            print(
                f"{name:<11} {memory:<7} {len(graph.chains):6} {len(graph.nodes):10} {len(found.tight):5}   "
                + "  ".join(f"{least:5.2f}/{middle:5.2f}" for least, middle in rows)
            )


def _both(build: Callable[[], TransitionGraph], fit: Callable[[TransitionGraph], Schedule]) -> Schedule:
    return fit(build())


def _digraph(graph: TransitionGraph) -> object:
    return graph.with_edges(graph.edges, graph.spills, graph.spill_edges).digraph


def _cpu_ms(work: Callable[[], object]) -> tuple[float, float]:
    spent = []
    for _ in range(15):
        started = time.process_time()
        work()
        spent.append(1e3 * (time.process_time() - started))
    return min(spent), median(spent)


def main(arguments: Iterable[str] | None = None) -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--dense", type=int, default=20, help="dense problems for each size and slack")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds of CP-SAT for each problem")
    options = parser.parse_args(None if arguments is None else list(arguments))
    planning_table(1024)
    trials_table(options.trials, options.gpus, options.limit)
    if options.dense:
        dense_table(options.dense, options.limit)


if __name__ == "__main__":
    main()
