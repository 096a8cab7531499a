"""`replay` as a flow: a job over a trace, policy against policy, with the comparison as an artifact."""

from __future__ import annotations

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from pydantic import BaseModel, ConfigDict, Field

from nereus.flows.plan import PlanQuestion
from nereus.planner.contest import UNCONFIGURED, Contest, parse_policy
from nereus.planner.replay_run import Run
from nereus.planner.replay_words import TraceWords, read_trace
from nereus.planner.transition_time import FixedCosts
from nereus.planner.words import read_request


class ReplayQuestion(BaseModel):
    """Which trace is replayed, and which policies are compared on it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    job: PlanQuestion
    """The job; its cluster is the largest that the trace may use."""
    trace: str = "spot"
    """GPU supply: steady, spot, grow, or a trace's file on the worker."""
    policies: str = "payback,any_gain,never,fixed"
    """Policies, divided by commas."""
    mean_len: str = "512..8k"
    """Mean response length: FROM..TO in tokens, or a CSV's path."""
    limit: str | None = None
    """Longest response allowed, e.g. 16k."""
    steps: int = Field(default=200, ge=2)
    """Steps to replay."""
    step_s: float = Field(default=100.0, gt=0)
    """Seconds of the trace that one step spans."""
    notice_s: float = Field(default=120.0, ge=0)
    """Seconds by which departures are announced."""
    slow_spells: bool = False
    """Spells of slow computing and of a slow network."""
    transition_s: float = Field(default=1.0, ge=0)
    """Seconds of a transition that no byte explains."""
    restart_s: float = Field(default=300.0, ge=0)
    """Seconds of a restart from a checkpoint."""
    seed: int = Field(default=0, ge=0)
    """Of generators and noise."""


@flow(name="replay", flow_run_name="replay {question.trace} of {question.job.model}")
def replay(question: ReplayQuestion) -> dict[str, float]:
    """Play a job over a trace of GPUs and lengths with the cost model; returns seconds by policy.

    Args:
        question: The job, the trace and the policies.

    Raises ConfigError, ModelError or DataError for what cannot be read, Infeasible where nothing fits.
    """
    words = [word.strip() for word in question.policies.split(",") if word.strip()]
    for word in words:
        if word not in UNCONFIGURED:
            parse_policy(word)  # a mistake is found before minutes of work
    request = read_request(question.job.words())
    trace = read_trace(
        TraceWords(
            supply=question.trace,
            mean_len=question.mean_len,
            limit=question.limit,
            steps=question.steps,
            step_s=question.step_s,
            notice_s=question.notice_s,
            slow_spells=question.slow_spells,
            seed=question.seed,
        ),
        most_nodes=request.cluster.pools[0].num_nodes,
    )
    costs = FixedCosts(transition_s=question.transition_s, restart_s=question.restart_s)
    contest = Contest(request=request, trace=trace, costs=costs, seed=question.seed)
    runs = [contest.run(word) for word in words]
    create_markdown_artifact(key="replay", markdown=page(question, runs), description="policies compared")
    return {run.policy: run.total_s for run in runs}


def page(question: ReplayQuestion, runs: list[Run]) -> str:
    """The comparison in Markdown."""
    lines = [
        f"# {question.job.model} · {question.job.cluster} · {question.trace}",
        "",
        "| policy | seconds | transitions | restarts |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {run.policy} | {run.total_s:.5g} | {run.num_transitions} | {run.num_restarts} |" for run in runs
    ]
    return "\n".join(lines)
