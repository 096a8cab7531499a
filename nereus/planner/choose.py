"""Choosing the best plan of a request: candidates, search, and the chosen rows made a plan again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nereus.planner.candidate_set import CandidateSet, candidate_sets, effective, problem_of
from nereus.planner.plan import Assignment, Plan, PoolUse, Proof
from nereus.planner.problem import NUM_STAGES, Evaluation, Problem, evaluate
from nereus.planner.ranks import Block, PoolSize, place
from nereus.planner.request import Arrangement, PlanRequest
from nereus.planner.search import Selection, solve
from nereus.planner.tidy import tidy
from nereus.planner.workload import ModelStage, Stage

_STAGES = tuple(Stage)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """A request with its candidates priced: many questions can share one pricing."""

    request: PlanRequest
    sets: tuple[CandidateSet, ...]

    @classmethod
    def of(cls, request: PlanRequest) -> Self:
        """Price all candidates. Raises ConfigError for a fixed choice that is impossible."""
        return cls(request=request, sets=candidate_sets(request))

    def keep(self, model_stage: ModelStage, rows: NDArray[np.bool_]) -> Priced:
        """Only these candidates of one model-stage."""
        sets = tuple(
            item.take(np.flatnonzero(rows)) if item.model_stage is model_stage else item for item in self.sets
        )
        return Priced(request=self.request, sets=sets)

    def set_of(self, model_stage: ModelStage) -> CandidateSet:
        """The candidates of a model-stage of the workload."""
        return next(item for item in self.sets if item.model_stage is model_stage)


def best_plan(request: PlanRequest) -> Plan | None:
    """The plan with the shortest step among all of the request's space, or None when none fits.

    Exact with respect to the cost and memory model. Raises ConfigError for an impossible fixed choice.
    """
    return best_of(Priced.of(request))


def best_of(priced: Priced, *, shorter_than_s: float = float("inf")) -> Plan | None:
    """The best plan of a priced request if its step is shorter than `shorter_than_s`."""
    start = time.perf_counter()
    best: tuple[Arrangement, Problem, Selection] | None = None
    for arrangement in priced.request.arrangements:
        problem = problem_of(priced.request, priced.sets, arrangement)
        found = solve(problem, upper_s=best[2].step_s if best else shorter_than_s)
        best = best if found is None else (arrangement, problem, found)
    if best is None:
        return None
    arrangement, problem, found = best
    proof = Proof(
        lower_bound_s=found.step_s,
        root_bound_s=found.root_bound_s,
        num_candidates=found.stats.num_candidates,
        num_partial_plans=found.stats.num_partial_plans,
        search_s=time.perf_counter() - start,
    )
    return plan_of(priced, problem, tidy(problem, found.picks), arrangement=arrangement, proof=proof)


def plan_of(
    priced: Priced,
    problem: Problem,
    picks: Sequence[int],
    *,
    arrangement: Arrangement,
    proof: Proof,
) -> Plan:
    """The plan that a choice of candidates stands for."""
    request, sets = priced.request, priced.sets
    value = evaluate(problem, dict(enumerate(picks)))
    assert value.feasible, "the search returned a plan that does not fit"
    assert abs(value.step_s - proof.lower_bound_s) <= 1e-9 * value.step_s, "the bound is the plan's step"
    sharing = {
        serve
        for serve, train in problem.pairs
        if not problem.owns_gpus(serve)
        and problem.seats[serve].layout[picks[serve]] == problem.seats[train].layout[picks[train]]
    }
    ranks = _ranks(request, sets, problem, picks, sharing)
    assignments = tuple(
        _assignment(request, problem, item, at, picks[at], ranks[item.seat.name], at in sharing)
        for at, item in enumerate(sets)
    )
    return Plan(
        assignments=assignments,
        arrangement=arrangement,
        schedule=request.workload.schedule,
        step_s=proof.lower_bound_s,
        stage_s={stage: value.stage_s[at] for at, stage in enumerate(_STAGES)},
        publish_s=value.sync_s,
        pools=_pools(request, problem, value),
        proof=proof,
    )


def _ranks(
    request: PlanRequest,
    sets: Sequence[CandidateSet],
    problem: Problem,
    picks: Sequence[int],
    sharing: Iterable[int],
) -> dict[str, tuple[int, ...]]:
    """Ranks by seat name; the two seats of a pair that shares get the same ones."""
    sharing = set(sharing)
    trainer = dict(problem.pairs)
    blocks = []
    for at, seat in enumerate(problem.seats):
        if at in sharing:
            continue
        row = picks[at]
        partner = problem.partner(at)
        stages = [seat.stage]
        if problem.owns_gpus(at):
            stages = [*range(NUM_STAGES)]
        elif partner in sharing:
            assert partner is not None
            stages = [problem.seats[partner].stage, seat.stage]
        blocks.append(
            Block(
                name=seat.name,
                tp=int(sets[at].tp[row]),
                num_gpus=int(seat.gpus[row]),
                pool=int(seat.pool[row]),
                stages=tuple(stages),
            )
        )
    sizes = [
        PoolSize(num_gpus=pool.num_gpus, gpus_per_node=pool.gpus_per_node) for pool in request.cluster.pools
    ]
    ranks = place(blocks, sizes, problem.in_turn)
    return ranks | {problem.seats[at].name: ranks[problem.seats[trainer[at]].name] for at in sharing}


def _assignment(
    request: PlanRequest,
    problem: Problem,
    item: CandidateSet,
    at: int,
    row: int,
    ranks: tuple[int, ...],
    shares: bool,
) -> Assignment:
    tp, pp, dp, ep, cp = (int(size[row]) for size in (item.tp, item.pp, item.dp, item.ep, item.cp))
    option = effective(item.options[int(item.option[row])], item.model_stage, request.workload, dp)
    workload = option.apply(request.workload)
    kind = request.cluster.gpu_kinds[int(item.seat.pool[row])]
    serves = at in dict(problem.pairs)
    base, extra = divmod(workload.shape(item.model_stage).num_layers, pp)
    return Assignment(
        model_stage=item.model_stage,
        tp=tp,
        pp=pp,
        dp=dp,
        ep=ep,
        cp=cp,
        gpu_kind=kind,
        ranks=ranks,
        layers=tuple(base + (stage < extra) for stage in range(pp)),
        option=option,
        shares_weights=shares,
        publish_s=float(item.seat.sync_s[row]) if serves and not shares else 0.0,
        cost=item.cost_of(row),
        memory=item.memory_of(row),
    )


def _pools(request: PlanRequest, problem: Problem, value: Evaluation) -> tuple[PoolUse, ...]:
    return tuple(
        PoolUse(
            gpu_kind=kind,
            num_gpus=problem.pools[at].num_gpus,
            usable_bytes=int(problem.pools[at].limit_bytes),
            used_bytes=int(value.memory_bytes[at]),
            used_gpus={stage: value.used_gpus[number][at] for number, stage in enumerate(_STAGES)},
        )
        for at, kind in enumerate(request.cluster.gpu_kinds)
    )
