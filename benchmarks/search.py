"""Plan selection: ours against SCIP, HiGHS, CP-SAT and ReaL-style MCMC, on the same instances, in one run.

    python benchmarks/search.py                       # the whole table
    python benchmarks/search.py --gpus 32,1024 --spaces pow2 --limit 30

Every (instance, solver) runs in a process of its own, on one thread, with the priced instance read from a
file and the solver's library loaded before the clock starts. CPU is the time to the proven optimum (for
MCMC: its budget), the building of a solver's program included; RSS is the growth of the peak. A solver
stopped at the wall limit (240 s, so that a busy machine does not stop it early) shows its incumbent. All
times are rounded to microseconds and all sizes to MiB beforehand, so that CP-SAT solves exactly the same
problem. Ours solves each instance five times and shows the median.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from nereus.errors import NereusError
from nereus.planner.candidate_set import candidate_sets, problem_of
from nereus.planner.layouts import Space
from nereus.planner.lengths import LengthDistribution
from nereus.planner.models import model_shape
from nereus.planner.oracle import whole_numbers
from nereus.planner.problem import PoolLimit, Problem, Seat
from nereus.planner.profile import ClusterProfile
from nereus.planner.request import PlanRequest
from nereus.planner.workload import Algorithm, ModelShapes, Workload

SOLVERS = ("ours", "scip", "highs", "cp-sat", "mcmc")
GPUS = (32, 128, 512, 1024, 4096, 16384)
ARRAYS = ("pool", "gpus", "persistent_bytes", "transient_bytes", "latency_s", "sync_s", "layout")
MCMC_BUDGET_S = 3.0


def instance(num_gpus: int, space: Space) -> tuple[Problem, float]:
    """PPO on H100 nodes of 8 with models that suit the cluster, and the CPU seconds of its pricing."""
    large = num_gpus >= 256
    actor = model_shape("llama-3.1-70b" if large else "llama-3.1-8b")
    small = model_shape("llama-3.1-8b")
    request = PlanRequest(
        workload=Workload(
            algorithm=Algorithm.PPO,
            models=ModelShapes(
                actor=actor,
                critic=actor.with_head("value"),
                reference=actor,
                reward=small.with_head("value"),
            ),
            num_prompts=8192 if num_gpus > 4096 else 2048 if large else 512,
            prompt_tokens=1024,
            response=LengthDistribution.from_mean_p95_max(4096, 10000, 16384),
        ),
        cluster=ClusterProfile.parse(f"{num_gpus // 8}x8xH100"),
        space=space,
    )
    start = time.process_time()
    problem = problem_of(request, candidate_sets(request))
    return whole_numbers(problem), time.process_time() - start


def save(problem: Problem, path: Path) -> None:
    """Write a problem so that another process can solve it without pricing it again."""
    arrays = {f"{at}.{name}": vars_of(seat)[name] for at, seat in enumerate(problem.seats) for name in ARRAYS}
    head = {
        "seats": [(seat.name, seat.stage) for seat in problem.seats],
        "pools": [(pool.num_gpus, pool.limit_bytes) for pool in problem.pools],
        "pairs": problem.pairs,
    }
    np.savez(path, head=json.dumps(head), **arrays)


def vars_of(seat: Seat) -> dict[str, Any]:
    """A seat's arrays by name."""
    return {
        "pool": seat.pool,
        "gpus": seat.gpus,
        "persistent_bytes": seat.persistent_bytes,
        "transient_bytes": seat.transient_bytes,
        "latency_s": seat.latency_s,
        "sync_s": seat.sync_s,
        "layout": seat.layout,
    }


def load(path: Path) -> Problem:
    """Read what `save` wrote."""
    with np.load(path) as file:
        head = json.loads(str(file["head"]))
        seats = tuple(
            Seat(name=name, stage=stage, **{key: file[f"{at}.{key}"] for key in ARRAYS})
            for at, (name, stage) in enumerate(head["seats"])
        )
    return Problem(
        seats=seats,
        pools=tuple(PoolLimit(num_gpus=gpus, limit_bytes=limit) for gpus, limit in head["pools"]),
        pairs=tuple((serve, train) for serve, train in head["pairs"]),
    )


def solve_one(path: Path, solver: str, limit_s: float) -> dict[str, Any]:
    """Solve in this process and say what it took."""
    problem = load(path)
    warm = _warm(solver)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if solver == "ours":
        found = _ours(problem)
    elif solver == "mcmc":
        from mcmc import search

        walks = [search(problem, cpu_limit_s=min(MCMC_BUDGET_S, limit_s), seed=seed) for seed in range(3)]
        steps = [walk.step_s for walk in walks]
        kept = [step for step in steps if step is not None]
        found = {
            "step_s": median(kept) if kept else None,
            "proven": False,
            "cpu_s": median(walk.cpu_s for walk in walks),
            "note": f"{len(kept)}/3 walks met a plan",
        }
    else:
        from nereus.planner.oracle import ask

        start = time.process_time()
        try:
            answer = ask(problem, solver, time_limit_s=limit_s)  # type: ignore[arg-type]
            found = {"step_s": answer.step_s, "proven": answer.proven, "cpu_s": answer.cpu_s}
        except NereusError:
            cpu_s = time.process_time() - start
            found = {"step_s": None, "proven": False, "cpu_s": cpu_s, "note": "no plan in time"}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**found, "rss_mb": (peak - before) / 1024, "warm": warm}


def _ours(problem: Problem) -> dict[str, Any]:
    from nereus.planner.search import solve

    times, found = [], None
    for _ in range(5):
        start = time.process_time()
        found = solve(problem)
        times.append(time.process_time() - start)
    return {"step_s": found.step_s if found else None, "proven": True, "cpu_s": median(times)}


def _warm(solver: str) -> str:
    """Load what the solver needs, so that imports count for nobody."""
    name = {"scip": "pyscipopt", "highs": "highspy", "cp-sat": "ortools.sat.python.cp_model"}.get(solver)
    __import__(name or "nereus.planner.search")
    return name or "nereus"


def run(path: Path, solver: str, limit_s: float) -> dict[str, Any]:
    """`solve_one` in a fresh process; a solver that dies or overruns far is reported, not hidden."""
    command = [sys.executable, __file__, "--one", str(path), solver, "--limit", str(limit_s)]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s * 3 + 300,
            env={**os.environ, **one_thread},
        )
    except subprocess.TimeoutExpired:
        return {
            "step_s": None,
            "proven": False,
            "cpu_s": float("nan"),
            "rss_mb": float("nan"),
            "note": "killed",
        }
    if done.returncode:
        note = (done.stderr.strip().splitlines() or ["no message"])[-1][:60]
        return {"step_s": None, "proven": False, "cpu_s": float("nan"), "rss_mb": float("nan"), "note": note}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def machine() -> str:
    """The machine and the versions behind the table."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "pyscipopt", "highspy", "ortools"))
    load_1 = os.getloadavg()[0]
    return (
        f"{name}, {os.cpu_count()} cores, load {load_1:.1f}; Python {platform.python_version()}, {packages}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpus", default=",".join(map(str, GPUS)))
    parser.add_argument("--spaces", default="pow2,general")
    parser.add_argument("--solvers", default=",".join(SOLVERS))
    parser.add_argument(
        "--limit", type=float, default=240.0, help="wall seconds for one solver on one instance"
    )
    parser.add_argument("--one", nargs=2, metavar=("FILE", "SOLVER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(solve_one(Path(given.one[0]), given.one[1], given.limit)))
        return
    print(machine(), flush=True)
    print("| GPUs | space | candidates | pricing ms | solver | CPU s | RSS MB | step s | proven | gap % |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for num_gpus in map(int, given.gpus.split(",")):
            for space in map(Space, given.spaces.split(",")):
                path = Path(folder) / f"{num_gpus}-{space}.npz"
                problem, pricing_s = instance(num_gpus, space)
                save(problem, path)
                head = f"| {num_gpus} | {space} | {sum(map(len, problem.seats)):,} | {pricing_s * 1e3:.0f} "
                best: float | None = None
                for solver in given.solvers.split(","):
                    found = run(path, solver, given.limit)
                    step = found["step_s"]
                    best = step if solver == "ours" else best
                    gap = "—" if step is None or best is None else f"{max(0.0, step / best - 1):.3%}"[:-1]
                    shown = "—" if step is None else f"{step:.6f}"
                    proven = "yes" if found["proven"] else found.get("note", "time limit")
                    print(
                        f"{head}| {solver} | {found['cpu_s']:.3f} | {found['rss_mb']:.0f} | {shown} "
                        f"| {proven} | {gap} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
