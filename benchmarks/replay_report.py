"""The page docs/results.md from what `benchmarks/replay.py` measured."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

from nereus.planner.transition_time import FixedCosts

POLICIES = (
    "cautious",
    "lasting",
    "fixed",
    "frozen",
    "never",
    "any_gain",
    "every_3",
    "verl_gate",
    "payback",
    "oracle",
)
SEEN = ("p3", "HH", "LL", "load", "small", "churn")
"""Traces that were looked at while the policies were made, unlike the others."""
Results = dict[str, dict[str, Any]]
"""By trace: its size, and a row of numbers for every policy."""


def report(results: Results, traces: Sequence[str], fixed: FixedCosts) -> str:
    """docs/results.md."""
    parts = (
        heading(),
        goals(results),
        missing(results, traces),
        table(results),
        against(results),
        sweep(results),
        costs(results, fixed),
    )
    return "\n".join((*filter(None, parts), ""))


def missing(results: Results, traces: Sequence[str]) -> str:
    """What was not run, so that no empty cell stays unexplained."""
    absent = [name for name in traces if name not in results]
    lacking = [
        f"{name} ({', '.join(word for word in POLICIES if word not in result['rows'])})"
        for name, result in results.items()
        if any(word not in result["rows"] for word in POLICIES)
    ]
    found = [*absent, *lacking]
    return f"Not run for this page: {'; '.join(found)}.\n" if found else ""


def goals(results: Results) -> str:
    """What was aimed at, and what came out."""
    words = ("cautious", "lasting", "fixed", "oracle", "never")
    cautious, lasting, fixed, oracle, never = (changes_against(results, word) for word in words)
    if not (cautious and lasting and fixed and oracle and never):
        return ""
    far = max(oracle, key=oracle.__getitem__)
    worst = max(never, key=never.__getitem__)
    near = sum(value <= 0.03 for value in oracle.values())
    rows = (
        ("27.7 % below `lasting`: tp and pp never change", _below(lasting), _mean(lasting) <= -0.277),
        ("27.7 % below `cautious`: nor do micro-batches", _below(cautious), _mean(cautious) <= -0.277),
        ("27.7 % below `fixed`: chosen anew by hand", _below(fixed), _mean(fixed) <= -0.277),
        (
            "within 3 % of `oracle`",
            f"{near} of {len(oracle)}; furthest {oracle[far]:+.1%} ({far})",
            near == len(oracle),
        ),
        ("never worse than `never`", f"closest {never[worst]:+.2%} ({worst})", never[worst] <= 0),
    )
    lines = [f"| {goal} | {found} | {'met' if is_met else 'missed'} |" for goal, found, is_met in rows]
    return "\n".join(
        [
            "## Against the goals",
            "",
            "| goal for payback | over the traces measured | |",
            "|---|---|---|",
            *lines,
            "",
            f"""The goal of 27.7 % is stated against tp and pp that are fixed while dp follows the GPUs.
Taken by its words that is `lasting` (or `cautious`: the words leave micro-batches open): tp and pp never
change, so they have to fit the longest answers from the start, as people choose them who know that running
out of memory ends their run. `fixed` begins with the best tp and pp for short answers and changes them by
hand later, which is adapting, too, at the price of restarts. All are planned by the same exact search, and
but for `cautious` choose their micro-batches anew at every step, so that tp and pp alone are what adapting
adds to a step. Steps alone, without restarts, work done again and the stalls of who does not fit, differ from
those of `lasting` by {_mean(_pure(results, "lasting")):+.1%} and from those of `fixed` by
{_mean(_pure(results, "fixed")):+.1%} on average. Where nodes vanish, `oracle` has what only it can know: it
leaves a node before it is lost.

No policy that was tried comes near 27.7 % on these traces by this cost model. `oracle`, for which nothing is
unknown, is {_bound(results, "lasting")} below `lasting`, {_bound(results, "cautious")} below `cautious` and
{_bound(results, "fixed")} below `fixed` on average.
""",
        ]
    )


def _pure(results: Results, word: str) -> dict[str, float]:
    return changes_against(results, word, "pure_step_s")


def _mean(changes: dict[str, float]) -> float:
    return sum(changes.values()) / len(changes)


def _bound(results: Results, word: str) -> str:
    return f"{-_mean(changes_against(results, word, policy='oracle')):.1%}"


def _below(changes: dict[str, float]) -> str:
    best, least = (pick(changes, key=changes.__getitem__) for pick in (min, max))
    spread = f"from {-changes[least]:.1%} ({least}) to {-changes[best]:.1%} ({best})"
    return f"{-_mean(changes):.1%} on average, {spread}"


def changes_against(
    results: Results, word: str, of: str = "mean_step_s", *, policy: str = "payback"
) -> dict[str, float]:
    """A policy's mean step against another's, relative, by trace."""
    return {
        name: result["rows"][policy][of] / result["rows"][word][of] - 1
        for name, result in results.items()
        if word in result["rows"] and policy in result["rows"]
    }


def heading() -> str:
    """What was run."""
    return f"""# Replay: what adapting is worth

`python benchmarks/replay.py --keep FOLDER` writes this page (Python {platform.python_version()}, one thread a
trace). The controller, search, transition graph and schedule are those of a running job; GPUs are replaced by
the cost model (docs/cost-model.md). These are predictions of that model, not measurements on GPUs.
docs/adaptation.md says what each policy does.

The jobs are PPO with four models of one shape. Mean response lengths grow along an S from 500 to
6,000 tokens (supplied traces) or 8,000 (synthetic ones), the longest responses to at most 16,384.
Supplied traces are Parcae's, a node of 8 H100 for each instance, Llama-3.1-70B, 512 prompts a step;
in the segments of one hour (HH to LL) a minute spans three steps, in p3 a step spans 200 s. The
synthetic ones: `spot` (70B, 80 to 192 H100 that come and go in bursts, spells of slow computing and
network), `load` (8B on 16 H100 that stay), `small` and `churn` (8B on 16 to 48 L40S that come and go, slow
spells), `ebb` (8B on 16 to 40 H100 that come and go, slow spells; lengths rise and fall again), `grow` (70B,
from 128 to 1,024 H100 in 1,000 steps). {", ".join(SEEN)} were looked at while the policies were made, the
others only afterwards (LH and spot had been run with earlier policies; nothing was changed for their
sake). Plans are of the general space (any dp, pp any divisor of the layers), for `grow` of
powers of two.

Four things that people do without elasticity, with Nereus's own planner in the place of their experience:
`lasting` keeps the tp and pp that fit the longest answers of the trace and are fastest at its start, `fixed`
those that are best at the start; both scale dp with the GPUs, in place, at the same price as everybody, and
choose micro-batch, recomputation and residency anew at every step. `cautious` is `lasting` with micro-batch
and recomputation fixed for the longest answers too. `frozen` is `fixed` with micro-batch and
recomputation kept too. Where one of these two fits no more it restarts, by hand, with the best choice of that
moment, before memory runs out. `never` moves as well as can be when forced, and only then. `oracle` knows
the trace, sudden losses included. Everything that is not a step counts into the mean: transitions, restarts,
work lost with a node and done again, time in which nothing fits. A node that is announced and goes in the
middle of a step is left between two stages; where no stage ends in between, what that stage had done is lost.
"""


def table(results: Results) -> str:
    """Mean step, transitions and their share, by trace and policy."""
    lines = [
        "## Mean step",
        "",
        "Seconds a step; in brackets transitions (restarts among them), their share of the time.",
        "",
    ]
    lines += ["| trace | GPUs, changes | " + " | ".join(POLICIES) + " |", "|---" * (len(POLICIES) + 2) + "|"]
    for name, result in results.items():
        size = result["trace"]
        cells = [f"{size['least_gpus']}-{size['most_gpus']}, {size['changes']}"]
        for word in POLICIES:
            row = result["rows"].get(word)
            if row is None:
                cells.append("")
                continue
            restarts = f" ({row['restarts']})" if row["restarts"] else ""
            cells.append(
                f"{row['mean_step_s']:.1f} [{row['transitions']}{restarts}, {row['transition_share']:.2%}]"
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def against(results: Results) -> str:
    """Payback against the others, in percent."""
    lines = ["## Payback against the others", "", "How much longer (+) or shorter (-) its mean step is.", ""]
    others = [word for word in POLICIES if word != "payback"]
    lines += ["| trace | " + " | ".join(others) + " |", "|---" * (len(others) + 1) + "|"]
    sums: dict[str, dict[str, float]] = {word: {} for word in others}
    for name, result in results.items():
        rows = result["rows"]
        cells = []
        for word in others:
            if word not in rows or "payback" not in rows:
                cells.append("")
                continue
            change = rows["payback"]["mean_step_s"] / rows[word]["mean_step_s"] - 1
            sums[word][name] = change
            cells.append(f"{change:+.2%}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for title, wanted in (("mean", (*results,)), ("mean, held out", (*(set(results) - {*SEEN}),))):
        means = [fmean_of(values, wanted) for values in sums.values()]
        lines.append(f"| {title} | " + " | ".join(means) + " |")
    return "\n".join([*lines, ""])


def fmean_of(values: dict[str, float], wanted: Sequence[str]) -> str:
    """The mean change over the wanted traces that were measured."""
    found = [values[name] for name in wanted if name in values]
    return f"{sum(found) / len(found):+.2%}" if found else ""


def sweep(results: Results) -> str:
    """The share of the horizon, gamma."""
    words = ("payback=0.25", "payback", "payback=0.75", "payback=1")
    note = "Mean step (transitions) of payback. Gamma counts once a cause has fired five times."
    lines = ["## Gamma", "", note, ""]
    lines += ["| trace | 0.25 | 0.5 | 0.75 | 1 |", "|---|---|---|---|---|"]
    for name, result in results.items():
        rows = result["rows"]
        if all(word in rows for word in words):
            cells = (f"{rows[word]['mean_step_s']:.2f} ({rows[word]['transitions']})" for word in words)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def costs(results: Results, fixed: FixedCosts) -> str:
    """Lost work and CPU time."""
    lines = [
        "## Where time goes beside steps, and the CPU it took",
        "",
        f"""A transition costs the seconds that its schedule predicts over the links, times
{fixed.moving_factor:g} (measured: our exchange over the bare transport, median of docs/reshard-benchmark.md
on a quiet machine), with 10 % noise, and {fixed.transition_s:g} s for votes, process groups and engines. Of
these, some 0.3 s were seen with a few workers on CPUs; the rest is an allowance for communicators and
captured graphs of a large job, which were not measured. A restart from a checkpoint takes
{fixed.restart_s:g} s for everybody, an assumption: neither the steps since the checkpoint nor the time until
somebody notices count.
""",
        *share_of_grow(results, fixed),
        "| trace | policy | step itself | redone | stalled | steps done | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        for word in POLICIES:
            row = result["rows"].get(word)
            if row is not None:
                shares = f"{row['redone_share']:.2%} | {row['stalled_share']:.2%}"
                itself = f"{row['pure_step_s']:.1f} s"
                lines.append(
                    f"| {name} | {word} | {itself} | {shares} | {row['steps']} | {row['cpu_s']:.0f} |"
                )
    return "\n".join(lines) + "\n"


def share_of_grow(results: Results, fixed: FixedCosts) -> list[str]:
    """How long the fixed part of a transition may be for transitions to stay below 0.1 % of `grow`."""
    row = results.get("grow", {}).get("rows", {}).get("payback")
    if row is None:
        return []
    count, total_s = row["transitions"], row["mean_step_s"] * row["steps"]
    moving_s = row["transition_s"] - count * fixed.transition_s
    most_s = (0.001 * total_s - moving_s) / count
    return [
        f"""Over `grow`, payback's {count} transitions take {row["transition_share"]:.3%} of the time,
{moving_s:.0f} s of it moving bytes. They stay below 0.1 % as long as the fixed part is below {most_s:.1f} s;
a generation engine that is made anew around its weights (vLLM) takes some 6 s on a CPU.
"""
    ]
