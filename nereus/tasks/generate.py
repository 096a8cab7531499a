"""Stage generate: the actor answers the step's prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE

from nereus.data.prompt import Prompt
from nereus.emu.batch import PromptBatch, Rollouts, Sampling, join_rows
from nereus.emu.cluster import Call
from nereus.tasks.dealing import run_dealt
from nereus.tasks.feeding import run_fed
from nereus.tasks.job import Job
from nereus.tasks.segments import Growing
from nereus.tasks.stages import GENERATION


@task(name="generate", cache_policy=NO_CACHE)
def generate(job: Job, prompts: Sequence[Prompt]) -> Rollouts:
    """Responses to every prompt: `batch.samples` rows each, prompt after prompt; with ReMax the greedy
    answers follow, one a prompt.

    Units of the torch engine take rows as they have room (`feeding`), the rows first that were long before;
    others get their rows in turn. Each row's randomness is keyed by its own id, so the dealing has no
    influence on what is sampled. Where the job has boundaries, one comes before every
    `asynchrony.segment_tokens` tokens, and what was drawn is kept in `job.done` for a try after a failure.
    """
    with job.stage("generate"):
        batch = prompt_batch(
            prompts, job.config.batch.samples, with_greedy=job.config.algorithm.kind == "remax"
        )
        sampling = sampling_of(job)
        if job.at_boundary is not None:
            return _in_segments(job, batch, sampling, job.at_boundary)
        order = job.lengths.longest_first(batch)
        rollouts = drawn(job, batch, sampling, job.state.policy_version, order)
        job.lengths.add(batch, rollouts.batch.response_lens_b)
        return rollouts


def drawn(
    job: Job,
    batch: PromptBatch,
    sampling: Sampling,
    version: int,
    order: Sequence[int] | None = None,
    *,
    what: str = "generate",
) -> Rollouts:
    """Responses of the policy that generation has, of this version; rows in the batch's order, whatever the
    `order` in which they are begun. `what` names the work in errors.
    """
    spec, order = job.stages[GENERATION], order or range(batch.num_rows)
    if spec.engine == "torch":
        slots = min(filter(None, (spec.resident_rows, job.config.sampling.max_rows)), default=None)
        return run_fed(job, GENERATION, batch, order, sampling, version, slots=slots, what=what)
    parts, way_back = run_dealt(
        job,
        GENERATION,
        torch.tensor(order),
        lambda rows: Call("generate", (GENERATION, batch.select(rows), sampling, version)),
        what=what,
    )
    rollouts: Rollouts = join_rows(parts, way_back)
    return rollouts


def _in_segments(
    job: Job, batch: PromptBatch, sampling: Sampling, at_boundary: Callable[[], int]
) -> Rollouts:
    """Draw until all responses are whole, each segment with the policy that is in generation then."""
    asynchrony = job.config.asynchrony
    assert asynchrony is not None, "only an asynchronous job has boundaries"
    assert asynchrony.segment_tokens is not None, "only segments have boundaries"
    name = f"segments of {int(batch.sample_ids_b[0])}"  # DAPO draws several batches in a step
    growing = job.done.setdefault(name, Growing(prompts=batch, max_new_tokens=sampling.max_new_tokens))
    assert isinstance(growing, Growing), name
    while len(growing.open_r):
        version = at_boundary()
        segment = growing.sampling(sampling, asynchrony.segment_tokens)
        growing.add(drawn(job, growing.to_go_on(), segment, version), segment.max_new_tokens)
    return growing.finished()


def sampling_of(job: Job) -> Sampling:
    """How the policy answers in the job's step."""
    settings = job.config.sampling
    return Sampling(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        stop_token_ids=job.prepared.stop_token_ids,
        seed=job.config.seed,
        step=job.state.step,
    )


def prompt_batch(prompts: Sequence[Prompt], samples: int, *, with_greedy: bool) -> PromptBatch:
    """Rows to decode: each prompt `samples` times, then each once greedily if asked.

    Row ids are `sample_id * samples + copy`: unique over the whole run, independent of any layout. A
    greedy row needs no randomness and carries the prompt's first id.
    """
    rows = [(prompt, copy, False) for prompt in prompts for copy in range(samples)]
    if with_greedy:
        rows += [(prompt, 0, True) for prompt in prompts]
    width = max(len(prompt.token_ids) for prompt in prompts)
    tokens_bs = torch.zeros(len(rows), width, dtype=torch.long)
    for i, (prompt, _, _) in enumerate(rows):
        tokens_bs[i, : len(prompt.token_ids)] = torch.tensor(prompt.token_ids)
    return PromptBatch(
        tokens_bs=tokens_bs,
        lens_b=torch.tensor([len(prompt.token_ids) for prompt, _, _ in rows]),
        sample_ids_b=torch.tensor([prompt.sample_id * samples + copy for prompt, copy, _ in rows]),
        greedy_b=torch.tensor([greedy for _, _, greedy in rows]),
    )
