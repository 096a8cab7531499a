"""Admission policies over supplied and synthetic traces: the tables of docs/results.md.

python benchmarks/replay.py                  # all traces, writes docs/results.md and its picture
python benchmarks/replay.py --traces LL,spot # some, to the terminal only
python benchmarks/replay.py --keep FOLDER    # traces already measured there are not run again

Each trace runs in a process of its own, on one thread, `--jobs` of them at once. The supplied traces are
Parcae's (AWS p3 instances); they are looked for in $NEREUS_DATA, or ../shared/data beside the repository, and
left out where absent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.replay_report import report
from nereus.planner.conditions import Trace, trace_of
from nereus.planner.contest import Contest
from nereus.planner.layouts import Space
from nereus.planner.models import model_shape
from nereus.planner.profile import ClusterProfile
from nereus.planner.replay_run import Run
from nereus.planner.request import PlanRequest
from nereus.planner.synthetic import (
    growing_lengths,
    growing_supply,
    slow_spells,
    spot_supply,
    steady_supply,
)
from nereus.planner.traces import read_supply
from nereus.planner.transition_time import FixedCosts
from nereus.planner.workload import Algorithm, ModelShapes, Workload

ROOT = Path(__file__).resolve().parent.parent
PARCAE = {
    "p3": "parcae_p3trace.csv",
    "HH": "parcae_gpt6.7b_hh_55_65.txt",
    "HL": "parcae_gpt6.7b_hl_15_25.txt",
    "LH": "parcae_gpt6.7b_lh_80_90.txt",
    "LL": "parcae_gpt6.7b_ll_10_11.txt",
}
SYNTHETIC = ("spot", "churn", "ebb", "load", "small")
TRACES = (*PARCAE, *SYNTHETIC, "grow")
DRAWN = ("fixed", "payback", "any_gain", "oracle")
RUN = (
    "payback",
    "never",
    "fixed",
    "oracle",
    "lasting",
    "cautious",
    "frozen",
    "any_gain",
    "verl_gate",
    "every_3",
)
GAMMAS = ("payback=0.25", "payback=0.75", "payback=1")
COSTS = FixedCosts(transition_s=5.0, restart_s=300.0, moving_factor=1.67)
LIMIT = 16384.0


def job(model: str, gpu: str, batch: int, nodes: int, space: Space = Space.GENERAL) -> PlanRequest:
    """PPO with prompts of 1,024 tokens; all four models have one shape."""
    return PlanRequest(
        workload=Workload(
            algorithm=Algorithm.PPO,
            models=ModelShapes.same(model_shape(model), Algorithm.PPO),
            num_prompts=batch,
            prompt_tokens=1024,
            response=growing_lengths(0, 2, start=500, end=500)[0].distribution,
        ),
        cluster=ClusterProfile.parse(f"{nodes}x8x{gpu}"),
        space=space,
    )


def contest(name: str, data: Path | None) -> Contest | None:
    """A trace by its name; None where its file is absent."""
    if name in PARCAE:
        path = None if data is None else data / "traces/spot" / PARCAE[name]
        if path is None or not path.exists():
            return None
        # A node of 8 GPUs stands for an instance of the trace. A minute of the segments spans three steps.
        steps, step_s, notice_s = (200, 200.0, 120.0) if name == "p3" else (180, 20.0, 20.0)
        lengths = growing_lengths(11, steps, start=500, end=6000, limit=LIMIT)
        supply = read_supply(path, notice_s=notice_s)
        trace = trace_of(name, supply, lengths, step_s=step_s, most_nodes=32)
        return Contest(request=job("llama-3.1-70b", "H100", 512, 32), trace=trace, costs=COSTS)
    if name == "grow":
        return large()
    return synthetic(name)


def synthetic(name: str) -> Contest:
    """Spot supply with slow spells; load alone, on steady GPUs; small jobs; lengths that rise and fall."""
    steps = 200
    growth = growing_lengths(21, steps, start=500, end=8000, limit=LIMIT)
    if name == "spot":
        supply = spot_supply(22, duration_s=steps * 100.0, least=10, most=24)
        trace = trace_of(name, supply, growth, slow_spells(23, steps), step_s=100.0, most_nodes=24)
        return Contest(request=job("llama-3.1-70b", "H100", 512, 24), trace=trace, costs=COSTS)
    if name == "load":
        trace = trace_of(name, steady_supply(2), growth, step_s=100.0, most_nodes=2)
        return Contest(request=job("llama-3.1-8b", "H100", 512, 2), trace=trace, costs=COSTS)
    if name == "ebb":
        rise = growing_lengths(51, steps // 2, start=500, end=8000, limit=LIMIT)
        supply = spot_supply(52, duration_s=steps * 100.0, least=2, most=5)
        trace = trace_of(
            name, supply, (*rise, *rise[::-1]), slow_spells(53, steps), step_s=100.0, most_nodes=5
        )
        return Contest(request=job("llama-3.1-8b", "H100", 512, 5), trace=trace, costs=COSTS)
    seed = 24 if name == "small" else 44
    supply = spot_supply(seed, duration_s=steps * 200.0, least=2, most=6)
    trace = trace_of(name, supply, growth, slow_spells(seed + 1, steps), step_s=200.0, most_nodes=6)
    return Contest(request=job("llama-3.1-8b", "L40S", 256, 6), trace=trace, costs=COSTS)


def large() -> Contest:
    """1,000 steps from 128 to 1,024 GPUs."""
    steps = 1000
    supply = growing_supply(16, 128, duration_s=steps * 100.0, stages=6)
    lengths = growing_lengths(31, steps, start=500, end=8000, limit=LIMIT)
    trace = trace_of("grow", supply, lengths, step_s=100.0, most_nodes=128)
    asked = job("llama-3.1-70b", "H100", 1024, 128, Space.POW2)
    return Contest(request=asked, trace=trace, costs=COSTS)


def measure(
    name: str, words: Sequence[str], data: Path | None, plot: Path | None, kept: Path | None
) -> dict[str, Any]:
    """Every policy over one trace, as plain numbers. `kept` has those that are done, and grows."""
    made = contest(name, data)
    if made is None:
        return {}
    result: dict[str, Any] = {"trace": about(made.trace), "rows": {}}
    if kept is not None and kept.exists():
        result = json.loads(kept.read_text())
    runs: list[Run] = []
    for word in words:
        if word in result["rows"]:
            continue
        start = time.process_time()
        run = made.run(word)
        runs.append(run)
        result["rows"][word] = row_of(run) | {"cpu_s": time.process_time() - start}
        print(f"{name} {word}: {result['rows'][word]}", file=sys.stderr, flush=True)
        if kept is not None:
            kept.write_text(json.dumps(result))
        if plot is not None and word in DRAWN:
            from nereus.cli.replay_plot import draw_replay

            draw_replay([run for run in runs if run.policy in DRAWN], plot, name)
    return result


def row_of(run: Run) -> dict[str, float]:
    """The numbers of one replay."""
    return {
        "mean_step_s": run.mean_step_s,
        "pure_step_s": sum(row.step_s for row in run.rows) / max(run.num_steps, 1),
        "steps": run.num_steps,
        "transitions": run.num_transitions,
        "restarts": run.num_restarts,
        "transition_s": run.transition_s,
        "transition_share": run.transition_share,
        "redone_share": run.redone_s / run.total_s,
        "stalled_share": run.stalled_s / run.total_s,
    }


def about(trace: Trace) -> dict[str, int]:
    """Size of a trace."""
    counts = [len(step.nodes) for step in trace.steps]
    return {
        "steps": len(counts),
        "least_gpus": 8 * min(counts),
        "most_gpus": 8 * max(counts),
        "changes": sum(a.nodes != b.nodes for a, b in zip(trace.steps, trace.steps[1:], strict=False)),
    }


def measure_apart(name: str, words: Sequence[str], plot: Path | None, keep: Path | None) -> dict[str, Any]:
    """`measure` in a process of its own, so that no trace profits from another's remembered plans."""
    command = [sys.executable, __file__, "--one", name, "--policies", ",".join(words)]
    command += [] if plot is None else ["--plot", str(plot)]
    command += [] if keep is None else ["--keep", str(keep)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Run the traces that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--policies", default=",".join((*RUN, *GAMMAS)))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="traces at once")
    parser.add_argument("--as-is", action="store_true", help="run nothing: write from what --keep has")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--plot", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, help="what was measured, as JSON: it is read, and added to")
    arguments = parser.parse_args()
    words = arguments.policies.split(",")
    named = os.environ.get("NEREUS_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    data = folder if folder.is_dir() else None
    if arguments.one:
        kept = None if arguments.keep is None else arguments.keep / f"{arguments.one}.json"
        print(json.dumps(measure(arguments.one, words, data, arguments.plot, kept)))
        return
    names = arguments.traces.split(",")
    whole = names == [*TRACES]
    if arguments.as_is and arguments.keep is None:
        parser.error("--as-is needs --keep")
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)

    def measured(name: str) -> dict[str, Any]:
        if arguments.as_is:
            kept = arguments.keep / f"{name}.json"
            return dict(json.loads(kept.read_text())) if kept.exists() else {}
        plot = ROOT / "docs/images/replay.png" if whole and name == "spot" else None
        return measure_apart(name, words, plot, arguments.keep)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = {name: pool.submit(measured, name) for name in sorted(names, key="grow".__ne__)}
        results = {name: running[name].result() for name in names}
    text = report({name: result for name, result in results.items() if result}, TRACES, COSTS)
    if whole:
        (ROOT / "docs/results.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
