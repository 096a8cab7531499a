"""Faults at every point of a transition: survivors agree on the recorded epoch and hold it bit for bit.

The few unmarked scenarios are a sample; the campaign behind `slow` injects more than 200 faults.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest

from nereus.emu.ballot import collect
from nereus.emu.coordinator import Coordinator
from nereus.emu.decision import CopiedRecord, Decision, FileRecord, Outcome, StoreRecord
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.kinds import training_kinds
from nereus.emu.layout import Layout
from nereus.emu.orders import Order, Phase
from nereus.emu.reshard import Limits, ReshardPlan, plan_reshard
from nereus.emu.store import Store, StoreAddress
from nereus.emu.unit import Unit, UnitId
from tests.emu.faults import KEY, Answer, Fault, Point, begin, coordinate, open_store, take_part
from tests.emu.processes import Died, Workers

RANKS = tuple(range(6))
COORDINATOR = 100
MODEL = decoder_spec(
    DecoderConfig(
        vocab_size=37,
        hidden_size=12,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        intermediate_size=20,
        tied=True,
    ),
    vocab_multiple=4,
)
KINDS = training_kinds("bf16")
LIMITS = Limits(bucket_bytes=4096, direct_bytes=256)  # several rounds, direct and packed


def unit(index: int, tp: int, pp: int, *ranks: int) -> Unit:
    layout = Layout.make(MODEL, tp=tp, pp=pp, ranks=ranks)
    return Unit(id=UnitId(KEY, index), model="actor", layout=layout, kinds=KINDS)


CASES: dict[str, ReshardPlan] = {
    name: plan_reshard(MODEL, old, new, limits=LIMITS)
    for name, (old, new) in {
        "split": ([unit(0, 4, 1, 0, 1, 2, 3)], [unit(1, 2, 1, 0, 1), unit(2, 2, 1, 2, 3)]),
        "merge": ([unit(0, 1, 2, 0, 1), unit(1, 1, 2, 3, 2)], [unit(2, 4, 1, 0, 1, 2, 3)]),
        "extend": ([unit(0, 2, 1, 1, 0)], [unit(0, 2, 1, 1, 0), unit(1, 2, 1, 4, 5)]),
        "remap": ([unit(0, 2, 2, 3, 1, 0, 2)], [unit(1, 4, 1, 0, 1, 2, 3)]),
        "grow": ([unit(0, 2, 1, 2, 4)], [unit(1, 2, 2, 0, 1, 2, 3)]),
        "shrink": ([unit(0, 2, 2, 5, 4, 3, 2)], [unit(1, 1, 2, 2, 3)]),
    }.items()
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One transition with its faults. `coordinator_fault` moves the coordinator to a process of its own."""

    case: str
    faults: tuple[Fault, ...]
    coordinator_fault: Fault | None = None
    store_dies: bool = False
    deadline_s: float = 15.0
    spills: bool = False
    expected: Outcome | None = None

    def __str__(self) -> str:
        faults = [*self.faults, *([self.coordinator_fault] if self.coordinator_fault else [])]
        return f"{self.case}:" + "+".join(f"{f.action}@{f.point}/{f.worker}" for f in faults)


class World:
    """The driver: owns the store, the processes and the epochs."""

    def __init__(self, folder: Path) -> None:
        self.store, self.workers, self.folder = Store(), Workers(RANKS), folder
        self.epoch = 0

    def close(self) -> None:
        self.workers.close()
        self.store.close()

    def run(self, scenario: Scenario) -> Decision:
        """Run it and check every survivor; dead workers are replaced, all of them after a failure."""
        try:
            return self._run(scenario)
        except BaseException:
            for rank in RANKS:
                self.workers.start(rank)
            raise

    def _run(self, scenario: Scenario) -> Decision:
        self.epoch += 1
        plan = CASES[scenario.case]
        address, folder = self.store.address, None
        if scenario.coordinator_fault is not None:
            self.workers.start(COORDINATOR)
            folder = self.folder / str(self.epoch)
            if scenario.store_dies:
                address = self.workers.run(open_store, workers=[COORDINATOR])[COORDINATOR]
        self.workers.run(begin, address, MODEL, plan.old, workers=plan.ranks)
        for rank in plan.ranks:
            order = Order(source=KEY, target=KEY, model=MODEL, plan=plan.rank_plan(rank))
            fault = next((fault for fault in scenario.faults if fault.worker == rank), None)
            rest = fault, scenario.deadline_s, scenario.spills
            self.workers.call(rank, take_part, address, folder, self.epoch, order, *rest)
        decision = self._decide(scenario, address, folder)
        answers = self._answers(scenario)
        assert answers, f"{scenario}: nobody survived"
        for rank, answer in answers.items():
            held = self.epoch if decision.commits else answer.epoch
            assert answer.epoch == held, f"{scenario}: worker {rank} holds epoch {answer.epoch}"
            assert answer.epoch == self.epoch or not decision.commits
            assert answer.epoch < self.epoch or decision.commits, f"{scenario}: worker {rank} committed"
            assert not answer.wrong, f"{scenario}: worker {rank} differs: {answer.wrong}"
            assert answer.decision in (decision, None)
            assert answer.decision == decision or answer.raised
        self.store.forget(f"vote/{self.epoch}")
        self.store.forget(f"exchange/{self.epoch}")
        return decision

    def _decide(self, scenario: Scenario, address: StoreAddress, folder: Path | None) -> Decision:
        ranks = CASES[scenario.case].ranks
        if scenario.coordinator_fault is None:
            votes = collect(
                self.store.client, self.epoch, ranks, deadline_s=scenario.deadline_s + 1, dead=self._dead
            )
            return Coordinator(StoreRecord(self.store.client)).decide(self.epoch, ranks, votes)
        self.workers.call(
            COORDINATOR, coordinate, address, folder, self.epoch, ranks, scenario.coordinator_fault
        )
        with pytest.raises(Died):
            self.workers.result(COORDINATOR)
        assert folder is not None
        return self._successor(folder, scenario.store_dies)

    def _successor(self, folder: Path, store_died: bool) -> Decision:
        """The successor reads the durable record, or writes abort there; the store may be gone."""
        copies = [] if store_died else [StoreRecord(self.store.client)]
        return Coordinator(CopiedRecord(FileRecord(folder), copies)).recover(self.epoch)

    def _dead(self) -> list[int]:
        return [rank for rank in RANKS if not self.workers.alive(rank)]

    def _answers(self, scenario: Scenario) -> dict[int, Answer]:
        killed = {fault.worker for fault in scenario.faults if fault.action == "kill"}
        answers = {}
        for rank in CASES[scenario.case].ranks:
            try:
                answers[rank] = self.workers.result(rank, timeout_s=60)
            except Died:
                assert rank in killed, f"{scenario}: worker {rank} died of itself"
                self.workers.start(rank)
        return answers


@pytest.fixture(scope="module", params=["reads", pytest.param("gloo", marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Workers that read one another's memory, and workers that may not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEREUS_READ_MEMORY", "1" if request.param == "reads" else "0")
        world = World(tmp_path_factory.mktemp("decisions"))
        yield world
        world.close()


BEFORE_VOTE: tuple[Point, ...] = (
    Phase.BEGUN,
    Phase.ALLOCATED,
    "opening",
    "opened",
    "posted",
    "waited",
    Phase.MOVED,
    Phase.PREPARED,
)
AFTER_VOTE: tuple[Point, ...] = ("voted", Phase.COMMITTING, Phase.COMMITTED)


def communicating(case: str) -> tuple[int, ...]:
    """Workers that send or receive, so that every point is reached there."""
    plan = CASES[case]
    return tuple(rank for rank in plan.ranks if plan.rank_plan(rank).rounds) or plan.ranks


def victims(case: str) -> tuple[int, int]:
    ranks = communicating(case)
    return ranks[0], ranks[-1]


def kills(case: str) -> list[Scenario]:
    out = []
    for point, victim in product((*BEFORE_VOTE, *AFTER_VOTE), victims(case)):
        wire = point in ("opening", "opened", "posted", "waited")
        if wire and not CASES[case].rank_plan(victim).rounds:
            continue
        expected = Outcome.COMMIT if point in AFTER_VOTE else Outcome.ABORT
        fault = Fault(worker=victim, point=point, action="kill")
        out.append(Scenario(case=case, faults=(fault,), expected=expected))
    return out


def double_kills(case: str) -> list[Scenario]:
    """Two workers die in one transition, at different points."""
    first, last = victims(case)
    pairs: list[tuple[Point, Point]] = [
        (Phase.BEGUN, Phase.MOVED),
        (Phase.ALLOCATED, Phase.PREPARED),
        (Phase.MOVED, "voted"),
    ]
    return [
        Scenario(
            case=case,
            faults=(Fault(worker=first, point=a, action="kill"), Fault(worker=last, point=b, action="kill")),
            expected=Outcome.ABORT,
        )
        for a, b in pairs
    ]


def delays(case: str) -> list[Scenario]:
    """A worker sleeps past the transfer's deadline; past the vote's too, where it is about to vote."""
    out = []
    for point, victim in product((Phase.BEGUN, Phase.MOVED, Phase.PREPARED, "voted"), victims(case)[:1]):
        fault = Fault(worker=victim, point=point, action="delay", delay_s=2.5)
        expected = Outcome.ABORT if point == Phase.PREPARED else None
        out.append(Scenario(case=case, faults=(fault,), deadline_s=1.0, expected=expected))
    return out


def memory_failures(case: str) -> list[Scenario]:
    plan = CASES[case]
    ranks = [r for r in plan.ranks if plan.new_unit(r) not in (None, plan.old_unit(r))]
    return [
        Scenario(
            case=case,
            faults=(Fault(worker=rank, point="allocating", action="raise"),),
            expected=Outcome.ABORT,
        )
        for rank in (ranks[0], ranks[-1])
    ]


def abort_failures(case: str) -> list[Scenario]:
    """Something fails on one worker, and while the abort runs another one fails."""
    plan = CASES[case]
    ranks = [r for r in plan.ranks if plan.new_unit(r) not in (None, plan.old_unit(r))]
    cause = Fault(worker=ranks[0], point="allocating", action="raise")
    other = ranks[-1]
    second = [
        Fault(worker=other, point=Phase.ABORTING, action="kill"),
        Fault(worker=other, point=Phase.ABORTING, action="raise"),
        Fault(worker=other, point=Phase.ABORTED, action="kill"),
        Fault(worker=other, point=Phase.ABORTED, action="raise"),
    ]
    return [Scenario(case=case, faults=(cause, fault), expected=Outcome.ABORT) for fault in second]


def coordinator_deaths(case: str) -> list[Scenario]:
    """Before it collects, before it decides, after it decided; with a store elsewhere and with its own."""
    points: tuple[Point, ...] = ("opening", "collected", "decided")
    return [
        Scenario(
            case=case,
            faults=(),
            coordinator_fault=Fault(worker=COORDINATOR, point=point, action="kill"),
            store_dies=store_dies,
            expected=Outcome.COMMIT if point == "decided" else Outcome.ABORT,
        )
        for point, store_dies in product(points, (False, True))
    ]


def spills(case: str) -> list[Scenario]:
    """Old shards lie in host memory when something happens; an abort brings them back."""
    ended = [r for r in CASES[case].ranks if CASES[case].old_unit(r) not in (None, CASES[case].new_unit(r))]
    if not ended:
        return []
    dies = Scenario(
        case=case,
        faults=(Fault(worker=ended[0], point=Phase.SPILLED, action="kill"),),
        expected=Outcome.ABORT,
    )
    others = [dies, *kills(case), *memory_failures(case), *abort_failures(case)]
    return [replace(scenario, spills=True) for scenario in others]


FAMILIES = {
    "spills": spills,
    "kills": kills,
    "double_kills": double_kills,
    "delays": delays,
    "memory_failures": memory_failures,
    "abort_failures": abort_failures,
    "coordinator_deaths": coordinator_deaths,
}


def check(world: World, scenarios: Sequence[Scenario]) -> None:
    for scenario in scenarios:
        decision = world.run(scenario)
        assert scenario.expected in (decision.outcome, None), f"{scenario}: {decision}"


@pytest.mark.parametrize("spilled", [False, True])
def test_without_a_fault_every_case_commits(world: World, spilled: bool) -> None:
    check(world, [Scenario(case=case, faults=(), spills=spilled, expected=Outcome.COMMIT) for case in CASES])


@pytest.mark.parametrize("family", FAMILIES)
def test_one_fault_of_each_family_leaves_the_old_or_the_new_layout(world: World, family: str) -> None:
    check(world, FAMILIES[family]("remap")[-1:])


@pytest.mark.slow
def test_the_campaign_injects_at_least_200_faults() -> None:
    scenarios = [scenario for family in FAMILIES.values() for case in CASES for scenario in family(case)]
    assert sum(len(s.faults) + (s.coordinator_fault is not None) for s in scenarios) >= 200


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_faults_leave_the_old_or_the_new_layout(world: World, family: str, case: str) -> None:
    check(world, FAMILIES[family](case))
