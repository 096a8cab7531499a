"""`plan` as a flow: the fastest parallelism for a job, with its table as an artifact of the run."""

from __future__ import annotations

from typing import Any, Literal

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from pydantic import BaseModel, ConfigDict, Field

from nereus.planner.choose import Priced
from nereus.planner.explain import runner_ups
from nereus.planner.plan import Plan
from nereus.planner.remedy import require_plan
from nereus.planner.words import PlanWords, read_request


class PlanQuestion(BaseModel):
    """Which job is to be planned, and on which GPUs."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str
    """Hugging Face folder, config.json, or a known name such as llama-3.1-8b."""
    cluster: str
    """Nodes x GPUs x kind, e.g. 2x8xH100, parts joined by +, or a profile's YAML file."""
    algo: Literal["ppo", "grpo", "remax"] = "ppo"
    """The algorithm."""
    prompt_len: str = "1k"
    """Tokens of a prompt."""
    response_len: str = "1k,2k,4k"
    """Tokens of a response: mean,p95,max, or one number."""
    batch: int = Field(default=512, ge=1)
    """Prompts of a step."""
    samples: int | None = Field(default=None, ge=1)
    """Responses to a prompt; 8 for grpo and 1 otherwise when absent."""
    space: Literal["pow2", "general"] = "pow2"
    """Which parallel sizes are considered."""
    placement: Literal["auto", "colocated", "disaggregated"] = "auto"
    """Whether model-stages share GPUs."""

    def words(self) -> PlanWords:
        """The question in the words of the command line."""
        return PlanWords(
            **self.model_dump(),
            critic=None,
            reference=None,
            reward=None,
            mini_batches=1,
            epochs=1,
            calibration=None,
            schedule="sync",
            turns="never",
            share=(),
            fix=(),
        )


@flow(name="plan", flow_run_name="plan {question.model} on {question.cluster}")
def plan(question: PlanQuestion) -> dict[str, Any]:
    """Find the fastest parallelism for a job and prove, within the cost model, that none is faster.

    Args:
        question: The job and the cluster.

    Raises ConfigError or ModelError for what cannot be read, Infeasible where nothing fits.
    """
    request = read_request(question.words())
    priced = Priced.of(request)
    best = require_plan(priced)
    others = runner_ups(priced, best, 3)
    create_markdown_artifact(key="plan", markdown=_page(question, best, others), description="the plan")
    return best.to_json()


def _page(question: PlanQuestion, best: Plan, others: tuple[Plan, ...] | list[Plan]) -> str:
    lines = [
        f"# {question.model} · {question.algo} · {question.cluster}",
        "",
        f"{best.step_s:.4g} s a step, {best.arrangement}",
        "",
        "| model-stage | tp | pp | ep | cp | dp | GPUs |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {item.model_stage} | {item.tp} | {item.pp} | {item.ep} | {item.cp} | {item.dp} "
        f"| {item.num_gpus} |"
        for item in best.assignments
    ]
    lines += ["", "| stage | seconds |", "|---|---|"]
    lines += [f"| {stage} | {seconds:.4g} |" for stage, seconds in best.stage_s.items()]
    if others:
        lines += ["", "| next best | seconds a step |", "|---|---|"]
        for other in others:
            layouts = "; ".join(f"{item.model_stage} {item.text}" for item in other.assignments)
            lines.append(f"| {layouts} | {other.step_s:.4g} |")
    return "\n".join(lines)
