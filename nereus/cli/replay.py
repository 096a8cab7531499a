"""`nereus replay`: a job over a trace, policy against policy, with the cost model instead of GPUs."""

from __future__ import annotations

from pathlib import Path

import typer

from nereus.cli.plan_options import (
    Algo,
    Batch,
    CalibrationFile,
    Cluster,
    FixedChoices,
    Model,
    PromptLen,
    Reference,
    Reward,
    Samples,
    SpaceName,
)
from nereus.cli.replay_options import (
    CsvFile,
    Decisions,
    FixedSeconds,
    LongestLen,
    MeanLen,
    Notice,
    PlotFile,
    Policies,
    RestartSeconds,
    Seed,
    SlowSpells,
    Steps,
    StepSeconds,
    TraceWord,
)


def replay(
    trace: TraceWord,
    *,
    model: Model,
    cluster: Cluster,
    policy: Policies = "payback,any_gain,never,fixed",
    algo: Algo = "ppo",
    prompt_len: PromptLen = "1k",
    batch: Batch = 512,
    samples: Samples = None,
    reference: Reference = None,
    reward: Reward = None,
    space: SpaceName = "pow2",
    fix: FixedChoices = None,
    calibration: CalibrationFile = None,
    mean_len: MeanLen = "512..8k",
    limit: LongestLen = None,
    steps: Steps = 200,
    step_s: StepSeconds = 100.0,
    notice_s: Notice = 120.0,
    slow_spells: SlowSpells = False,
    seed: Seed = 0,
    transition_s: FixedSeconds = 1.0,
    restart_s: RestartSeconds = 300.0,
    csv: CsvFile = None,
    plot: PlotFile = None,
    decisions: Decisions = False,
) -> None:
    """Play a job over a trace of GPUs and response lengths, and compare admission policies.

    The signals, search, admission, transition graph and schedule are those of a running job; only the workers
    are replaced by the cost model. `--cluster` is the largest that the trace may use. No GPU and no network
    is needed.
    """
    from nereus.planner.contest import UNCONFIGURED, Contest, parse_policy
    from nereus.planner.replay_words import TraceWords, read_trace
    from nereus.planner.transition_time import FixedCosts
    from nereus.planner.words import PlanWords, read_request

    words = [word.strip() for word in policy.split(",") if word.strip()]
    for word in words:
        if word not in UNCONFIGURED:
            parse_policy(word)  # a mistake is found before minutes of work
    request = read_request(
        PlanWords(
            model=model,
            critic=None,
            reference=reference,
            reward=reward,
            cluster=cluster,
            algo=algo,
            prompt_len=prompt_len,
            response_len="1k",
            batch=batch,
            samples=samples,
            mini_batches=1,
            epochs=1,
            calibration=calibration,
            schedule="sync",
            placement="auto",
            turns="never",
            share=(),
            space=space,
            fix=tuple(fix or ()),
        )
    )
    over = read_trace(
        TraceWords(
            supply=trace,
            mean_len=mean_len,
            limit=limit,
            steps=steps,
            step_s=step_s,
            notice_s=notice_s,
            slow_spells=slow_spells,
            seed=seed,
        ),
        most_nodes=request.cluster.pools[0].num_nodes,
    )
    contest = Contest(
        request=request,
        trace=over,
        costs=FixedCosts(transition_s=transition_s, restart_s=restart_s),
        seed=seed,
    )
    _show(contest, words, f"{model} · {algo} · {cluster} · {trace}", csv, plot, decisions=decisions)


def _show(
    contest: object, words: list[str], title: str, csv: Path | None, plot: Path | None, *, decisions: bool
) -> None:
    from rich.console import Console
    from rich.progress import track

    from nereus.cli.replay_view import decisions_view, replay_view, write_csv
    from nereus.planner.contest import Contest

    assert isinstance(contest, Contest)
    console = Console()
    work = track(words, description="replaying", console=Console(stderr=True), transient=True)
    runs = [contest.run(word) for word in work]
    console.print(replay_view(runs, contest.trace, title))
    if decisions:
        console.print(decisions_view(runs[0]))
    if csv is not None:
        write_csv(runs, csv)
        typer.echo(f"wrote {csv}")
    if plot is not None:
        from nereus.cli.replay_plot import draw_replay

        draw_replay(runs, plot, title)
        typer.echo(f"wrote {plot}")
