"""The cost model beside aiconfigurator and llm-analysis, on the same measured rows, in one run.

    python -m venv /tmp/baselines && /tmp/baselines/bin/pip install aiconfigurator llm-analysis
    python benchmarks/cost.py --baselines /tmp/baselines/bin/python [--answers a.jsonl] [--json out.json]

Without `--baselines` only our own columns are printed. Rows come from `$NEREUS_DATA` (or ../shared/data).
Every number that a fit could have seen is held out; "raw" columns are fitted to nothing that they are
compared with. All serving rows take aiconfigurator about 13 CPU minutes; `--answers` keeps them for the next
run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus.planner import accuracy, accuracy_rl, accuracy_serving, accuracy_training
from nereus.planner.accuracy import Errors
from nereus.planner.accuracy_serving import ServingRow
from nereus.planner.accuracy_training import PlanRow
from nereus.planner.measured import MEASURED_GPUS
from nereus.planner.profile import ClusterProfile, LinkClass

ROOT = Path(__file__).resolve().parent.parent
BASELINES = Path(__file__).with_name("cost_baselines.py")
Floats = NDArray[np.float64]

# aiconfigurator ships these shapes under these names.
_AIC_NAMES = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen/Qwen3-32B": "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """The child interpreter, and a file of answers that earlier runs got from it."""

    python: str
    answers: Path | None

    def ask(self, tool: str, rows: Sequence[Mapping[str, Any]]) -> tuple[Floats, list[str]]:
        """(values, reasons) of one tool for `rows`; NaN where it has no answer."""
        known = self._known()
        requests = [json.dumps({"tool": tool, "row": row}, sort_keys=True) for row in rows]
        new = [request for request in dict.fromkeys(requests) if request not in known]
        if new:
            done = subprocess.run(
                [self.python, str(BASELINES)],
                input="\n".join(new),
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            known |= dict(zip(new, map(json.loads, done.stdout.splitlines()), strict=True))
            if self.answers is not None:
                self.answers.write_text("".join(json.dumps(pair) + "\n" for pair in known.items()))
        answers = [known[request] for request in requests]
        values = [np.nan if answer["value"] is None else answer["value"] for answer in answers]
        return np.array(values, dtype=np.float64), [answer["why"] for answer in answers if answer["why"]]

    def _known(self) -> dict[str, Any]:
        if self.answers is None or not self.answers.is_file():
            return {}
        return dict(json.loads(line) for line in self.answers.read_text().splitlines())


def gpu_row(cluster: ClusterProfile, kind: str) -> dict[str, Any]:
    """Our profile in the words of the child process: every tool gets the same hardware."""
    gpu = cluster.pool(kind).gpu
    return {
        "name": kind,
        "peak_flops": gpu.peak_flops,
        "memory_bandwidth_Bps": gpu.memory_bandwidth_Bps,
        "scale_up_Bps": cluster.link(kind, LinkClass.SCALE_UP).bandwidth_Bps,
        "scale_out_Bps": cluster.link(kind, LinkClass.SCALE_OUT).bandwidth_Bps,
    }


def kernels(folder: Path) -> dict[str, Any]:
    """Held-out kernels and collectives on every measured GPU."""
    print("\n## Kernels and collectives: mean error on unseen shapes and sizes (%)")
    print(
        f"{'GPU':6}{'peak':>8}{'roofline':>10}{'constants':>11}{'table':>8}{'prefill':>9}{'decode':>8}"
        f"{'all-reduce':>12}{'alpha+beta':>12}"
    )
    found = {}
    for name in MEASURED_GPUS:
        gemm = accuracy.gemm_errors(folder, name)
        prefill = accuracy.attention_errors(folder, name, decode=False)
        decode = accuracy.attention_errors(folder, name, decode=True)
        reduce = accuracy.all_reduce_errors(folder, name)
        print(
            f"{name:6}{gemm['peak'].mean:8.1f}{gemm['roofline'].mean:10.1f}{gemm['constants'].mean:11.1f}"
            f"{gemm['table'].mean:8.1f}{prefill.mean:9.1f}{decode.mean:8.1f}"
            f"{reduce['table'].mean:12.1f}{reduce['formula'].mean:12.1f}"
        )
        found[name] = {"gemm": gemm, "prefill": prefill, "decode": decode, "all_reduce": reduce}
    return found


def transfer(folder: Path) -> dict[str, Any]:
    """Another laboratory's layers after one scalar."""
    print("\n## Another laboratory's layer times after one scalar a machine")
    found = {}
    for name in ("A100", "H100"):
        plain = accuracy.transfer_errors(folder, name)
        kept = accuracy.transfer_errors(folder, name, correction=1.0)
        print(f"{name:6} residuals weighed {plain['all']}   residuals kept {kept['all']}")
        found[name] = {"weighed": plain, "kept": kept["all"]}
    return found


def serving(folder: Path, tools: Baselines | None, limit: int | None) -> dict[str, Any]:
    """Seconds per output token of dense 8-bit serving."""
    rows = accuracy_serving.read_serving(folder)
    if limit is not None:
        picked = np.sort(np.random.default_rng(0).permutation(len(rows))[:limit])
        rows = tuple(rows[index] for index in picked)
    measured = np.array([row.seconds_per_token for row in rows])
    raw = {"ours": accuracy_serving.uncalibrated(rows)}
    if tools is not None:
        for tool in ("aiconfigurator", "llm-analysis"):
            began = time.monotonic()
            raw[tool], reasons = tools.ask(f"{tool}.tpot", [serving_row(row) for row in rows])
            print(
                f"({tool}: {np.isnan(raw[tool]).sum()} of {len(rows)} rows without an answer,"
                f" {time.monotonic() - began:.0f} s{'; first: ' + reasons[0][:90] if reasons else ''})"
            )
    factor = {name: accuracy_serving.cross_validated_factor(rows, values) for name, values in raw.items()}
    scalars = accuracy_serving.cross_validated(rows)
    common = ~np.isnan(scalars) & np.all([~np.isnan(values) for values in factor.values()], axis=0)
    if not common.any():
        raise SystemExit(
            "no row has an answer from every tool and enough company in its system: take more rows"
        )
    print(f"\n## Seconds per output token, {common.sum()} rows that every tool answers")
    found: dict[str, Any] = {}
    for name in raw:
        found[name] = {
            "raw": Errors.of(raw[name][common], measured[common]),
            "one factor": Errors.of(factor[name][common], measured[common]),
        }
        print(f"{name:16} raw {found[name]['raw']}   one factor a system {found[name]['one factor']}")
    found["ours"]["three scalars"] = Errors.of(scalars[common], measured[common])
    print(f"{'ours':16} three scalars a system {found['ours']['three scalars']}")
    every = ~np.isnan(scalars)
    found["ours"]["three scalars, all rows"] = Errors.of(scalars[every], measured[every])
    print(f"{'ours':16} three scalars, all rows {found['ours']['three scalars, all rows']}")
    return found


def serving_row(row: ServingRow) -> dict[str, Any]:
    """A serving row in the words of the child process."""
    kind = accuracy_serving.KINDS[row.system]
    shape = accuracy_serving.SHAPES[row.model]
    return {
        "model": _AIC_NAMES[row.model],
        "system": row.system,
        "backend": row.engine,
        "isl": row.input_tokens,
        "osl": row.output_tokens,
        "batch": row.concurrency,
        "tp": row.tp,
        "shape": {**asdict(shape), "gated": True},
        "gpu": gpu_row(ClusterProfile.parse(f"1x8x{kind}"), kind),
    }


def training(folder: Path, tools: Baselines | None) -> dict[str, Any]:
    """Iteration times and peak bytes of multi-node training plans."""
    plans = accuracy_training.read_plans(folder)
    measured = np.array([plan.seconds for plan in plans])
    large = np.array([plan.global_batch >= 512 for plan in plans])
    alone = accuracy_training.uncalibrated(plans)
    predicted = {
        "ours, tables alone": alone,
        "ours, 1 scalar": left_out_factor(alone, measured),
        "ours, 4 scalars": accuracy_training.leave_one_out(plans),
        "constant MFU, 1 scalar": accuracy_training.constant_mfu(plans),
    }
    peaks = {"ours": np.array([plan.predicted_bytes for plan in plans])}
    if tools is not None:
        rows = [plan_row(plan) for plan in plans]
        closed, _ = tools.ask("llm-analysis.iteration", rows)
        predicted["llm-analysis, 1 scalar"] = left_out_factor(closed, measured)
        peaks["llm-analysis"], _ = tools.ask("llm-analysis.peak", rows)
    print(f"\n## Iteration time of {len(plans)} plans, leave one out (aiconfigurator: inference only)")
    found: dict[str, Any] = {}
    for name, values in predicted.items():
        found[name] = {
            "all": Errors.of(values, measured),
            "gbs >= 512": Errors.of(values[large], measured[large]),
        }
        print(f"{name:24} {found[name]['all']}   gbs >= 512: {found[name]['gbs >= 512']}")
    peak = np.array([plan.peak_bytes for plan in plans], dtype=np.float64)
    print("\n## Peak bytes of the same plans")
    for name, values in peaks.items():
        wrong = int((values / 0.9 < peak).sum())
        found[f"peak bytes, {name}"] = {"errors": Errors.of(values, peak), "wrongly feasible": wrong}
        print(f"{name:24} {Errors.of(values, peak)}   wrongly feasible with a 10 % margin: {wrong}")
    return found


def left_out_factor(predicted: Floats, measured: Floats) -> Floats:
    """`predicted` times one factor, for every row the median ratio of the others."""
    ratio = np.log(measured / predicted)
    others = [np.median(np.delete(ratio, index)) for index in range(len(ratio))]
    return np.asarray(predicted * np.exp(others))


def plan_row(plan: PlanRow) -> dict[str, Any]:
    """A plan in the words of the child process: its true block has two matrices of 4 h."""
    shape = {**asdict(plan.shape), "intermediate_size": 4 * plan.shape.hidden_size, "gated": False}
    return {
        "model": plan.model,
        "shape": shape,
        "gpu": gpu_row(ClusterProfile.parse(f"64x4x{accuracy_training.KIND}"), accuracy_training.KIND),
        "tp": plan.tp,
        "pp": plan.pp,
        "dp": plan.dp,
        "dtype": "w16a16e16",
        "micro_batch": plan.micro_batch,
        "global_batch": plan.global_batch,
        "seq": accuracy_training.SEQUENCE_TOKENS,
        "recompute": 0,
        "efficiency": 0.4,
    }


def published(folder: Path) -> dict[str, Any]:
    """Order of published RL steps; layouts that are known to fit."""
    steps = accuracy_rl.read_published(folder)
    predicted = np.array([accuracy_rl.predicted_step_s(step) for step in steps])
    right, pairs = accuracy_rl.concordance(steps, predicted)
    same, same_pairs = accuracy_rl.concordance(steps, predicted, same_lag=True)
    layouts = accuracy_rl.read_recommended(folder)
    fits = sum(layout.fits for layout in layouts)
    print("\n## Published RL runs (nothing fitted)")
    print(f"step times in the right order: {right} of {pairs} pairs; same policy lag: {same} of {same_pairs}")
    print(f"layouts known to fit: {fits} of {len(layouts)} called feasible")
    return {"order": [right, pairs], "order, same lag": [same, same_pairs], "fits": [fits, len(layouts)]}


def plain(value: Any) -> Any:
    """The report as JSON types."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: round(number, 2) for name, number in asdict(value).items()}
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--baselines", help="interpreter that has aiconfigurator and llm-analysis")
    parser.add_argument("--serving-rows", type=int, help="a random sample of the serving rows")
    parser.add_argument("--json", type=Path, help="write the report here too")
    parser.add_argument(
        "--answers", type=Path, help="keep the baselines' answers in this file, and reuse them"
    )
    options = parser.parse_args()
    tools = Baselines(python=options.baselines, answers=options.answers) if options.baselines else None
    data = Path(os.environ.get("NEREUS_DATA", ROOT.parent / "shared" / "data"))
    report = {
        "kernels": kernels(data / "perf" / "aiconfigurator"),
        "transfer": transfer(data / "perf" / "vidur"),
        "training": training(data / "perf" / "sailor", tools),
        "published": published(data / "rl"),
        "serving": serving(data / "perf" / "aiconfigurator", tools, options.serving_rows),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(plain(report), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
