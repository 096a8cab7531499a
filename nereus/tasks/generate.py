"""Stage generate: the actor answers the step's prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE

from nereus.data.prompt import Prompt
from nereus.emu.batch import PromptBatch, Rollouts, Sampling, join_rows
from nereus.emu.cluster import Call
from nereus.tasks.dealing import run_dealt
from nereus.tasks.early import EARLY, Early, may_score_early
from nereus.tasks.feeding import Plain, run_fed
from nereus.tasks.growing import Growing
from nereus.tasks.job import GENERATE, Job
from nereus.tasks.stages import GENERATION
from nereus.tasks.turns import Turns


@task(name="generate", cache_policy=NO_CACHE)
def generate(job: Job, prompts: Sequence[Prompt]) -> Rollouts:
    """Responses to every prompt: `batch.samples` rows each, prompt after prompt; with ReMax the greedy
    answers follow, one a prompt.

    Where the job has boundaries, one comes before every `asynchrony.segment_tokens` tokens, and what was
    drawn is kept in `job.done` for a try after a failure.
    """
    with job.stage(GENERATE):
        samples = job.config.batch.samples
        batch = prompt_batch(prompts, samples, with_greedy=job.config.algorithm.kind == "remax")
        of_row, sampling = prompt_of_rows(prompts, samples, batch.num_rows), sampling_of(job)
        if job.at_boundary is not None:
            return _in_segments(job, batch, of_row, sampling, job.at_boundary)
        early = Early(job) if may_score_early(job) else None
        rollouts = answers(job, batch, of_row, sampling, job.state.policy_version, early=early)
        job.lengths.add(batch, rollouts.batch.response_lens_b)
        if early is not None:
            job.done[EARLY] = early
        return rollouts


def answers(
    job: Job,
    batch: PromptBatch,
    prompt_of_row: Sequence[Prompt],
    sampling: Sampling,
    version: int,
    *,
    what: str = GENERATE,
    early: Early | None = None,
) -> Rollouts:
    """Whole responses to the rows, whose prompts these are, by the policy that generation has.

    Units of the torch engine take rows as they have room (`feeding`), the rows first that were long before;
    others get their rows in turn. Each row's randomness is keyed by its own id, so the dealing has no
    influence on what is sampled. With `early` (and no tools) units that end first score what is whole.
    """
    order = job.lengths.longest_first(batch)
    if job.tools is None:
        return _drawn(job, batch, order, sampling, version, what, early)
    turns = turns_with(job, batch, prompt_of_row, sampling)
    turns.begin_again()
    if job.stages[GENERATION].engine == "torch":
        run_fed(job, GENERATION, turns, order, sampling, version, slots=_slots(job), what=what)
    else:
        _in_rounds(job, turns, sampling, lambda: version, what)
    return turns.growing.finished()


def turns_with(job: Job, batch: PromptBatch, prompt_of_row: Sequence[Prompt], sampling: Sampling) -> Turns:
    """Rows that have not begun."""
    return Turns(
        growing=Growing(prompts=batch, max_new_tokens=sampling.max_new_tokens),
        prompt_of_row=prompt_of_row,
        tokenizer=job.prepared.tokenizer,
        vocab_size=job.stages[GENERATION].model.vocab_size,
        config=job.config.tools,
        tools=job.tools,
    )


def _drawn(
    job: Job,
    batch: PromptBatch,
    order: Sequence[int],
    sampling: Sampling,
    version: int,
    what: str,
    early: Early | None = None,
) -> Rollouts:
    """Rows up to their first stop token or their limit."""
    if job.stages[GENERATION].engine == "torch":
        rows = Plain(batch=batch)
        run_fed(job, GENERATION, rows, order, sampling, version, slots=_slots(job), what=what, early=early)
        return rows.rollouts()
    parts, way_back = run_dealt(
        job,
        GENERATION,
        torch.tensor(order),
        lambda rows: Call("generate", (GENERATION, batch.select(rows), sampling, version)),
        what=what,
        early=early,
    )
    rollouts: Rollouts = join_rows(parts, way_back)
    return rollouts


def _slots(job: Job) -> int | None:
    """Rows that a unit decodes at once; None: all of its share."""
    given = (job.stages[GENERATION].resident_rows, job.config.sampling.max_rows)
    return min(filter(None, given), default=None)


def _in_segments(
    job: Job,
    batch: PromptBatch,
    prompt_of_row: Sequence[Prompt],
    sampling: Sampling,
    at_boundary: Callable[[], int],
) -> Rollouts:
    """Each segment with the policy that is in generation then."""
    asynchrony = job.config.asynchrony
    assert asynchrony is not None, "only an asynchronous job has boundaries"
    assert asynchrony.segment_tokens is not None, "only segments have boundaries"
    name = f"segments of {int(batch.sample_ids_b[0])}"  # DAPO draws several batches in a step
    turns = job.done.setdefault(name, turns_with(job, batch, prompt_of_row, sampling))
    assert isinstance(turns, Turns), name
    turns.begin_again()
    piece = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, asynchrony.segment_tokens))
    _in_rounds(job, turns, piece, at_boundary, GENERATE)
    return turns.growing.finished()


def _in_rounds(job: Job, turns: Turns, piece: Sampling, version_of: Callable[[], int], what: str) -> None:
    """Draw until all responses are whole: in each round one more piece of every open row, at most
    `piece.max_new_tokens` and not beyond its turn; then wait for the tools.
    """
    turns.settle()
    while len(rows := turns.growing.open_r):
        version = version_of()
        part = _drawn(job, turns.growing.to_go_on(rows), range(len(rows)), piece, version, what)
        turns.take(rows.tolist(), part)
        turns.settle()


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


def prompt_of_rows(prompts: Sequence[Prompt], samples: int, num_rows: int) -> list[Prompt]:
    """The prompt of every row of `prompt_batch`: `samples` rows a prompt, then the greedy rows, one a
    prompt.
    """
    sampled = [prompt for prompt in prompts for _ in range(samples)]
    return sampled + list(prompts)[: num_rows - len(sampled)]
