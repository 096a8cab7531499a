"""Units that have ended score what is whole: each row once, in fixed chunks; nobody who answers is asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from nereus.config import BatchConfig
from nereus.emu.batch import Rollouts, Sampling, Scores, TokenBatch
from nereus.emu.cluster import Answer, Call
from nereus.emu.layout import Layout, Rank
from nereus.errors import Cancelled
from nereus.tasks.early import EARLY, Early, cut, may_score_early
from nereus.tasks.generate import answers
from nereus.tasks.job import Job
from nereus.tasks.length_history import LengthHistory
from nereus.tasks.micro_batches import Limit
from nereus.tasks.score import score_stage
from nereus.tasks.scoring import OF_REFERENCE, OF_REWARDS, OF_VALUES, Scoring
from nereus.tasks.stages import CRITIC, GENERATION, REFERENCE, REWARD
from tests.emu.engines.generate_cases import alone, make_prompts
from tests.emu.engines.torch_cases import SMALL

KINDS = (OF_REWARDS, OF_REFERENCE, OF_VALUES)
HOW = Sampling(max_new_tokens=12, seed=3, stop_token_ids=tuple(range(0, 60, 3)))


def unit(*ranks: Rank) -> Layout:
    return Layout(tp=len(ranks), pp=1, ranks=ranks, layers=(2,))


def rows_of(numbers: Sequence[int]) -> TokenBatch:
    """Rows whose one prompt token is their number; their lengths differ."""
    lens_b = torch.tensor([1 + number * 7 % 5 for number in numbers])
    tokens_bs = torch.zeros(len(numbers), 6, dtype=torch.long)
    tokens_bs[:, 0] = torch.tensor(numbers)
    return TokenBatch(
        tokens_bs=tokens_bs, prompt_lens_b=torch.ones(len(numbers), dtype=torch.long), response_lens_b=lens_b
    )


def found_in(call: Call) -> Any:
    """What a unit finds: the first token of every row."""
    batch: TokenBatch = call.arguments[1]
    first_b = batch.tokens_bs[:, 0].float()
    if call.method == "rewards":
        return first_b
    column_bt = first_b[:, None] * batch.response_mask()
    return Scores(logprobs_bt=column_bt) if call.arguments[0] == REFERENCE else Scores(values_bt=column_bt)


@dataclass(kw_only=True)
class Workers:
    """Stands for the cluster: one call after the other on a worker, which of them is next nobody knows."""

    draw: random.Random
    leads: Mapping[str, frozenset[Rank]]
    answers_to: Callable[[Rank, Call], Any] = field(default=lambda rank, call: None)
    fails_at: int | None = None
    scored: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=dict)
    num_halts: int = 0

    def converse(
        self,
        first: Mapping[Rank, Call],
        then: Callable[[Answer], Mapping[Rank, Call]],
        *,
        what: str,
        between: Callable[[bool], Mapping[Rank, Call]] | None = None,
    ) -> None:
        assert between is None, "rows come once"
        queues: dict[Rank, list[Call]] = {rank: [call] for rank, call in first.items()}
        while busy := sorted(rank for rank, queue in queues.items() if queue):
            rank = self.draw.choice(busy)
            call = queues[rank].pop(0)
            result = self.work(call) if call.aside else self.answers_to(rank, call)
            leads = not call.aside or rank in self.leads[call.arguments[0]]
            answer = Answer(rank=rank, call=call, result=result if leads else None, seconds=1.0)
            for asked, one in then(answer).items():
                queue = queues.setdefault(asked, [])
                if one.aside and asked in self.leads[GENERATION]:  # the others of a unit may still return
                    assert all(other.aside for other in queue), "asked of a unit that still has rows"
                queue.append(one)

    def work(self, call: Call) -> Any:
        if len(self.scored) == self.fails_at:
            self.fails_at = None
            raise RuntimeError("a worker died")
        batch: TokenBatch = call.arguments[1]
        self.scored.append((call.arguments[0], tuple(batch.tokens_bs[:, 0].tolist())))
        return found_in(call)

    def add_busy_s(self, what: str, seconds: float) -> None:
        self.busy_s[what] = self.busy_s.get(what, 0.0) + seconds


def job_of(
    generation: Sequence[Layout],
    scoring: Mapping[str, Sequence[Layout]],
    draw: random.Random,
    *,
    rows: int = 3,
) -> Job:
    """A job that generates and scores, and has nothing else."""
    stages = {
        name: SimpleNamespace(units=tuple(units), score_rows=None, engine="torch", resident_rows=None)
        for name, units in {GENERATION: generation, **scoring}.items()
    }
    stages[GENERATION].ranks = tuple(rank for one in generation for rank in one.ranks)
    config = SimpleNamespace(
        batch=BatchConfig(micro_batch_rows=rows),
        prompts=SimpleNamespace(max_tokens=64),
        sampling=SimpleNamespace(max_new_tokens=64, temperature=1.0, max_rows=None),
        reward=SimpleNamespace(kind="model"),
        algorithm=SimpleNamespace(kind="ppo", kl=object()),
        scores_reference_frozen=False,
        rescores=False,
        staleness=0,
    )
    leads = {name: frozenset(one.ranks[0] for one in spec.units) for name, spec in stages.items()}
    workers = Workers(draw=draw, leads=leads)
    return cast(
        Job,
        SimpleNamespace(
            cluster=workers, stages=stages, config=config, done={}, tools=None, lengths=LengthHistory()
        ),
    )


SHARED = {REWARD: [unit(0), unit(1), unit(2)], REFERENCE: [unit(0, 1)], CRITIC: [unit(2, 3), unit(1, 0)]}
APART = {REWARD: [unit(4)], REFERENCE: [unit(5, 6)], CRITIC: [unit(3), unit(4)]}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Job, Workers, list[list[int]]]:
    generation = draw(st.sampled_from([[unit(0), unit(1), unit(2), unit(3)], [unit(0, 1), unit(2, 3)]]))
    job = job_of(
        generation,
        draw(st.sampled_from([SHARED, APART])),
        random.Random(draw(st.integers(0, 99))),
        rows=draw(st.integers(1, 4)),
    )
    shares = [draw(st.integers(0, 9)) for _ in generation]
    assume(any(shares))
    numbers = iter(range(sum(shares)))
    return job, cast(Workers, job.cluster), [[next(numbers) for _ in range(share)] for share in shares]


def generate(job: Job, shares: Sequence[Sequence[int]]) -> Early:
    """Units that answer their rows in one call each."""
    early, units = Early(job), job.stages[GENERATION].units
    by_rank = {one.ranks[0]: (one, list(share)) for one, share in zip(units, shares, strict=True)}

    def then(answer: Answer) -> Mapping[Rank, Call]:
        if answer.rank in by_rank:
            one, share = by_rank[answer.rank]
            if share:
                early.take_rows(one, share, rows_of(share))
            early.end(one)
        return {}

    calls = {rank: Call("generate") for one in units for rank in one.ranks}
    job.cluster.converse(calls, early.beside(then), what="generate")
    job.done[EARLY] = early
    return early


def check(job: Job, workers: Workers, kinds: Sequence[Scoring], num: int) -> None:
    """All kinds have found every row, in order, and each was scored once."""
    everything = rows_of(range(num))
    for kind in kinds:
        found = score_stage(job, kind, everything)
        expected = found_in(kind.call(job, everything))
        if isinstance(found, Scores):
            found = found.logprobs_bt if kind is OF_REFERENCE else found.values_bt
            expected = expected.logprobs_bt if kind is OF_REFERENCE else expected.values_bt
        width = int(everything.response_lens_b.max())
        assert torch.equal(found, expected[:, :width] if expected.dim() > 1 else expected)
        done = [number for stage, numbers in workers.scored if stage == kind.stage for number in numbers]
        assert set(done) == set(range(num))


@given(cases())
def test_every_row_is_scored_once_wherever_units_lie_and_whoever_ends_first(
    case: tuple[Job, Workers, list[list[int]]],
) -> None:
    job, workers, shares = case
    num = sum(map(len, shares))
    early = generate(job, shares)
    num_early = {kind.stage: 0 for kind in KINDS}
    for stage, numbers in {(stage, numbers) for stage, numbers in workers.scored}:
        num_early[stage] += len(numbers)
    check(job, workers, KINDS, num)
    for kind in KINDS:
        name = kind.what.removeprefix("score ")
        assert early.stats()[f"early/{name}"] == pytest.approx(num_early[kind.stage] / num)
        work = early.work(kind)
        assert workers.busy_s[kind.what] == pytest.approx(len(work.chunks) / len(work.units))


@given(cases(), st.integers(0, 12))
def test_what_was_scored_before_a_worker_died_is_kept(
    case: tuple[Job, Workers, list[list[int]]], fails_at: int
) -> None:
    job, workers, shares = case
    num = sum(map(len, shares))
    early = generate(job, shares)
    before = len(workers.scored)
    workers.fails_at = before + fails_at
    for kind in KINDS:
        try:
            score_stage(job, kind, rows_of(range(num)))
        except RuntimeError:
            check(job, workers, [kind], num)
    assert sum(len(early.work(kind).chunks) for kind in KINDS) >= len({*workers.scored})


def test_scoring_under_way_when_another_stage_fails_sends_nothing_more() -> None:
    job = job_of([unit(0), unit(1)], APART, random.Random(0), rows=1)
    generate(job, [[], [0, 1, 2, 3, 4, 5]])
    workers = cast(Workers, job.cluster)
    before, work = len(workers.scored), workers.work

    def work_until_halted(call: Call) -> Any:
        workers.num_halts += 1
        return work(call)

    workers.work = work_until_halted  # type: ignore[method-assign]
    with pytest.raises(Cancelled):
        score_stage(job, OF_REFERENCE, rows_of(range(6)))
    assert len(workers.scored) == before + 1
    workers.work = work  # type: ignore[method-assign]
    check(job, workers, KINDS, 6)


def test_chunks_do_not_depend_on_who_ends_first() -> None:
    cuts = set()
    for seed in range(20):
        job = job_of([unit(0), unit(1)], SHARED, random.Random(seed))
        generate(job, [[0, 2, 4, 6, 8], [1, 3, 5, 7]])
        check(job, cast(Workers, job.cluster), KINDS, 9)
        cuts.add(frozenset(cast(Workers, job.cluster).scored))
    assert len(cuts) == 1


def test_workers_that_generate_nothing_score_while_all_others_generate() -> None:
    job = job_of([unit(0), unit(1)], APART, random.Random(0))
    early = Early(job)
    early.take_rows(unit(0), [0, 1], rows_of([0, 1]))
    early.end(unit(0))
    assert {rank: call.arguments[0] for rank, call in early.calls().items()} == {
        4: REWARD,
        5: REFERENCE,
        6: REFERENCE,
        3: CRITIC,
    }
    early.end(unit(1))
    assert early.calls() == {}, "generation is over: its end waits for nothing new"


@given(
    lens=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    rows=st.integers(1, 5),
    tokens=st.none() | st.integers(1, 60),
    depth=st.integers(1, 3),
)
def test_a_chunk_is_a_micro_batch_for_every_stage_of_a_pipeline(
    lens: list[int], rows: int, tokens: int | None, depth: int
) -> None:
    batch = TokenBatch(
        tokens_bs=torch.zeros(len(lens), 32, dtype=torch.long),
        prompt_lens_b=torch.ones(len(lens), dtype=torch.long),
        response_lens_b=torch.tensor(lens),
    )
    parts = cut(batch, Limit(rows=rows, tokens=tokens), depth)
    assert sorted(row for part in parts for row in part) == list(range(len(lens)))
    for part in parts:
        if tokens is None:
            assert len(part) <= rows * depth
        else:
            assert len(part) == 1 or sum(lens[row] + 1 for row in part) <= tokens * depth


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_generation_answers_the_same_with_scoring_beside_it(engine: str) -> None:
    prompts = make_prompts([[1 + number % 5, 2 + number] for number in range(14)])
    found: list[Rollouts] = []
    for seed in range(3):
        job = job_of([unit(0), unit(1), unit(2)], APART, random.Random(seed))
        job.stages[GENERATION].engine = engine  # type: ignore[misc,assignment]
        workers, generators = cast(Workers, job.cluster), [alone(SMALL) for _ in range(3)]

        def work(rank: Rank, call: Call, generators: Any = generators) -> Any:
            if call.method == "generate":
                return generators[rank].generate(*call.arguments[1:])
            _, part, sampling, version, begin, more = call.arguments
            return generators[rank].feed(part, sampling, version, begin=begin, more=more)

        workers.answers_to = work
        early = Early(job)
        found.append(answers(job, prompts, [], HOW, 0, early=early))
        assert sum(len(chunk.numbers) for chunk in early.work(OF_VALUES).chunks) == 14
        assert early.calls() == {}
    assert all(torch.equal(one.batch.tokens_bs, found[0].batch.tokens_bs) for one in found)


def test_only_where_units_end_apart_and_all_of_their_rows_are_scored() -> None:
    job = job_of([unit(0), unit(1)], SHARED, random.Random(0))
    assert may_score_early(job)
    assert not may_score_early(job_of([unit(0)], SHARED, random.Random(0)))
    for name, value in (("staleness", 1), ("algorithm", SimpleNamespace(kind="dapo", kl=object()))):
        other = job_of([unit(0), unit(1)], SHARED, random.Random(0))
        setattr(other.config, name, value)
        assert not may_score_early(other), name
