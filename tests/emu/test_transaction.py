"""Prepare, vote, decide, swap: what a participant promises. Ranks are threads on the memory transport."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from nereus.emu.arena import Arena, ShardState
from nereus.emu.ballot import Vote, cast, collect
from nereus.emu.coordinator import Coordinator, check_bounded, require_commit
from nereus.emu.decision import Decision, MemoryRecord, Outcome, StoreRecord
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.executor import Executor
from nereus.emu.groups import Generation
from nereus.emu.host_copy import HostCopy
from nereus.emu.kinds import training_kinds
from nereus.emu.layout import Layout
from nereus.emu.orders import Moved, Order, Phase, SpillOrder
from nereus.emu.rank_plan import Mode
from nereus.emu.reshard import ReshardPlan, plan_reshard
from nereus.emu.staging import StagingPool
from nereus.emu.store import Store, StoreAddress
from nereus.emu.transaction import Participant
from nereus.emu.transport.memory import Hub, MemoryTransport
from nereus.emu.unit import Unit, UnitId
from nereus.errors import InvalidOperation, TransitionAborted
from tests.emu.faults import HELD, allocate, participant_of
from tests.emu.processes import Workers
from tests.emu.states import differences, direct_state
from tests.emu.test_reshard_storage import stored_otherwise

MODEL = decoder_spec(
    DecoderConfig(
        vocab_size=32,
        hidden_size=8,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        intermediate_size=12,
    )
)
KINDS = training_kinds("bf16")
ACTOR, CRITIC = "actor.training", "critic.training"


def unit(index: int, tp: int, pp: int, *ranks: int, stage: str = ACTOR) -> Unit:
    layout = Layout.make(MODEL, tp=tp, pp=pp, ranks=ranks)
    return Unit(id=UnitId(stage, index), model=stage.partition(".")[0], layout=layout, kinds=KINDS)


REMAP = plan_reshard(MODEL, [unit(0, 2, 1, 1, 0)], [unit(1, 1, 2, 0, 1)])
EXTEND = plan_reshard(MODEL, [unit(0, 1, 1, 0)], [unit(0, 1, 1, 0), unit(1, 1, 1, 1)])
ONE_OF_TWO = plan_reshard(
    MODEL,
    [unit(0, 1, 1, 2, stage=ACTOR), unit(1, 2, 1, 0, 1)],
    [unit(0, 1, 1, 2, stage=ACTOR), unit(2, 1, 2, 0, 1)],
)


def order_of(plan: ReshardPlan, rank: int, stage: str = ACTOR, mode: Mode = "shadow") -> Order:
    return Order(source=stage, target=stage, model=MODEL, plan=plan.rank_plan(rank, mode))


def voted(participant: Participant, epoch: int, *orders: Order, deadline_s: float = 5) -> Vote:
    """Begin, prepare every operation, vote."""
    participant.begin(epoch)
    for order in orders:
        participant.prepare(order, deadline_s=deadline_s)
    return participant.vote()


class World:
    """Participants that share a hub; each runs on its own thread when asked together."""

    def __init__(self, *plans: tuple[str, ReshardPlan]) -> None:
        hub = Hub()
        self.ranks = sorted({rank for _, plan in plans for rank in plan.ranks})
        self.participants = {
            rank: Participant(rank, Executor(MemoryTransport(hub, rank), torch.device("cpu")), allocate)
            for rank in self.ranks
        }
        for stage, plan in plans:
            for rank in plan.ranks:
                if (old := plan.old_unit(rank)) is not None:
                    self[rank].live[stage] = direct_state(MODEL, old, rank)

    def __getitem__(self, rank: int) -> Participant:
        return self.participants[rank]

    def together(self, act: Callable[[int, Participant], Any]) -> dict[int, Any]:
        results: dict[int, Any] = {}

        def body(rank: int) -> None:
            results[rank] = act(rank, self[rank])

        threads = [threading.Thread(target=body, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(results) == len(self.ranks), f"only {sorted(results)} answered"
        return results

    def prepare(self, epoch: int, plan: ReshardPlan, mode: Mode = "shadow") -> dict[int, Vote]:
        return self.together(lambda rank, p: voted(p, epoch, order_of(plan, rank, mode=mode)))


def decision(epoch: int, outcome: Outcome = Outcome.COMMIT, control: str = "") -> Decision:
    return Decision(epoch=epoch, outcome=outcome, control=control)


def pointer(state: ShardState) -> int:
    return state["exp_avg"].flat.data_ptr()


def test_the_old_layout_holds_until_the_commit_and_the_new_one_after_it() -> None:
    world = World((ACTOR, REMAP))
    before = {rank: pointer(world[rank].live[ACTOR]) for rank in world.ranks}
    votes = world.prepare(1, REMAP)
    assert all(vote.yes for vote in votes.values())
    assert sum(vote.sent_bytes for vote in votes.values()) == REMAP.bytes > 0
    for rank in world.ranks:
        assert pointer(world[rank].live[ACTOR]) == before[rank]
        assert not differences(world[rank].live[ACTOR], direct_state(MODEL, REMAP.old[0], rank))
        assert world[rank].undecided == 1
    world.together(lambda rank, p: p.apply(decision(1, control='{"step": 4}')))
    for rank in world.ranks:
        assert not differences(world[rank].live[ACTOR], direct_state(MODEL, REMAP.new[0], rank))
        assert (world[rank].epoch, world[rank].control, world[rank].undecided) == (1, '{"step": 4}', None)


def test_an_abort_leaves_the_old_layout_in_its_storage() -> None:
    world = World((ACTOR, REMAP))
    before = {rank: pointer(world[rank].live[ACTOR]) for rank in world.ranks}
    world.prepare(1, REMAP)
    world.together(lambda rank, p: p.apply(decision(1, Outcome.ABORT)))
    for rank in world.ranks:
        assert pointer(world[rank].live[ACTOR]) == before[rank]
        assert not differences(world[rank].live[ACTOR], direct_state(MODEL, REMAP.old[0], rank))
        assert (world[rank].epoch, world[rank].undecided) == (0, None)
    assert all(vote.yes for vote in world.prepare(2, REMAP).values()), "the next epoch starts clean"


def test_a_kept_replica_keeps_its_storage_through_the_commit() -> None:
    world = World((ACTOR, EXTEND))
    before = pointer(world[0].live[ACTOR])
    world.prepare(1, EXTEND)
    world.together(lambda rank, p: p.apply(decision(1)))
    assert pointer(world[0].live[ACTOR]) == before
    assert not differences(world[1].live[ACTOR], direct_state(MODEL, EXTEND.new[1], 1))


def test_two_model_stages_move_together_or_not_at_all() -> None:
    critic = plan_reshard(MODEL, [unit(0, 1, 1, 0, stage=CRITIC)], [unit(1, 1, 2, 1, 0, stage=CRITIC)])
    for outcome in Outcome:
        world = World((ACTOR, REMAP), (CRITIC, critic))

        def prepare(rank: int, participant: Participant) -> Vote:
            return voted(participant, 1, order_of(REMAP, rank), order_of(critic, rank, CRITIC))

        assert all(vote.yes for vote in world.together(prepare).values())
        world.together(lambda rank, p, outcome=outcome: p.apply(decision(1, outcome)))
        for rank in world.ranks:
            for stage, plan in ((ACTOR, REMAP), (CRITIC, critic)):
                wanted = plan.new_unit(rank) if outcome is Outcome.COMMIT else plan.old_unit(rank)
                if wanted is None:
                    assert stage not in world[rank].live
                else:
                    assert not differences(world[rank].live[stage], direct_state(MODEL, wanted, rank))


SPLIT_CRITIC = plan_reshard(MODEL, [unit(0, 2, 1, 1, 2, stage=CRITIC)], [unit(1, 1, 2, 2, 1, stage=CRITIC)])


def test_a_failed_operation_fails_the_epoch_and_later_ones_are_declined_at_once() -> None:
    world = World((ACTOR, REMAP), (CRITIC, SPLIT_CRITIC))

    def no_room_for_the_actor(order: Order) -> ShardState:
        if order.target == ACTOR:
            raise MemoryError("planted")
        return allocate(order)

    world[1].allocate = no_room_for_the_actor

    def act(rank: int, participant: Participant) -> list[Moved]:
        participant.begin(1)
        plans = ((ACTOR, REMAP), (CRITIC, SPLIT_CRITIC))
        return [
            participant.prepare(order_of(plan, rank, stage), deadline_s=20)
            for stage, plan in plans
            if rank in plan.ranks
        ]

    moved = world.together(act)
    assert all(part.reason for parts in moved.values() for part in parts)
    assert max(part.seconds for parts in moved.values() for part in parts) < 10, "nobody waits in vain"
    assert "no memory" in moved[1][1].reason, "the later operation is refused for the first one's reason"
    votes = world.together(lambda rank, p: p.vote())
    assert not any(vote.yes for vote in votes.values())
    world.together(lambda rank, p: p.apply(decision(1, Outcome.ABORT)))
    for rank in SPLIT_CRITIC.ranks:
        held = world[rank].live[CRITIC]
        assert not differences(held, direct_state(MODEL, SPLIT_CRITIC.old[0], rank))


def test_operations_are_prepared_one_by_one_and_nothing_counts_before_the_commit() -> None:
    world = World((ACTOR, REMAP), (CRITIC, SPLIT_CRITIC))
    world.together(lambda rank, p: p.begin(1))
    for stage, plan in ((ACTOR, REMAP), (CRITIC, SPLIT_CRITIC)):

        def prepare(rank: int, p: Participant, stage: str = stage, plan: ReshardPlan = plan) -> Moved | None:
            return p.prepare(order_of(plan, rank, stage), deadline_s=5) if rank in plan.ranks else None

        moved = world.together(prepare)
        assert sum(part.sent_bytes for part in moved.values() if part) == plan.bytes
    for rank in REMAP.ranks:
        assert not differences(world[rank].live[ACTOR], direct_state(MODEL, REMAP.old[0], rank))
    votes = world.together(lambda rank, p: p.vote())
    assert sum(vote.sent_bytes for vote in votes.values()) == REMAP.bytes + SPLIT_CRITIC.bytes
    world.together(lambda rank, p: p.apply(decision(1)))
    for stage, plan in ((ACTOR, REMAP), (CRITIC, SPLIT_CRITIC)):
        for rank in plan.ranks:
            unit_after = plan.new_unit(rank)
            assert unit_after is not None
            assert not differences(world[rank].live[stage], direct_state(MODEL, unit_after, rank))


def test_an_operation_belongs_to_an_open_epoch_and_to_one_model_stage_once() -> None:
    world = World((ACTOR, EXTEND))
    with pytest.raises(InvalidOperation, match="no epoch was begun"):
        world[0].prepare(order_of(EXTEND, 0), deadline_s=1)
    world.together(lambda rank, p: (p.begin(1), p.prepare(order_of(EXTEND, rank), deadline_s=5)))
    with pytest.raises(InvalidOperation, match="has prepared it already"):
        world[0].prepare(order_of(EXTEND, 0), deadline_s=1)
    world[0].vote()
    with pytest.raises(InvalidOperation, match="has voted in epoch 1"):
        world[0].prepare(order_of(EXTEND, 0, CRITIC), deadline_s=1)


def test_a_worker_without_memory_votes_no_and_its_peers_do_not_wait_for_the_deadline() -> None:
    world = World((ACTOR, REMAP))

    def no_room(order: Order) -> ShardState:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    world[1].allocate = no_room
    votes = world.prepare(1, REMAP)
    assert "worker 1 has no memory" in votes[1].reason
    assert not votes[0].yes
    assert "worker 1 declined" in votes[0].reason
    assert votes[0].prepare_s < 3
    refused = Coordinator(MemoryRecord()).decide(1, world.ranks, votes)
    with pytest.raises(TransitionAborted, match="worker 1 has no memory"):
        require_commit(refused)
    world.together(lambda rank, p: p.apply(refused))
    assert not differences(world[1].live[ACTOR], direct_state(MODEL, REMAP.old[0], 1))


def test_epochs_are_decided_one_at_a_time_and_used_once() -> None:
    world = World((ACTOR, REMAP))
    with pytest.raises(InvalidOperation, match="nothing to decide"):
        world[0].apply(decision(1))
    world.prepare(1, REMAP)
    with pytest.raises(InvalidOperation, match="epoch 1 is undecided"):
        world[0].begin(2)
    with pytest.raises(InvalidOperation, match="has prepared epoch 1"):
        world[0].apply(decision(2))
    world.together(lambda rank, p: p.apply(decision(1, Outcome.ABORT)))
    with pytest.raises(InvalidOperation, match="never used twice"):
        world[0].begin(1)


def test_a_shard_of_another_layout_than_the_plan_speaks_of_is_refused() -> None:
    world = World((ACTOR, REMAP))
    world[0].live[ACTOR] = direct_state(MODEL, REMAP.new[0], 0)
    world[0].begin(1)
    with pytest.raises(InvalidOperation, match="holds another shard"):
        world[0].prepare(order_of(REMAP, 0), deadline_s=1)
    world[0].apply(decision(1, Outcome.ABORT))
    assert world[0].undecided is None


def test_a_shard_that_is_stored_in_another_way_than_the_new_one_is_moved() -> None:
    stored = stored_otherwise(MODEL, "other order")
    plan = plan_reshard(MODEL, REMAP.old, REMAP.new, source=stored, placement="as_given")
    world = World((ACTOR, plan))
    for rank in world.ranks:
        world[rank].live[ACTOR] = direct_state(stored, REMAP.old[0], rank)

    def prepare(rank: int, participant: Participant) -> Vote:
        order = Order(source=ACTOR, target=ACTOR, model=MODEL, plan=plan.rank_plan(rank), stored=stored)
        return voted(participant, 1, order)

    assert all(vote.yes for vote in world.together(prepare).values())
    world.together(lambda rank, p: p.apply(decision(1)))
    for rank in world.ranks:
        assert not differences(world[rank].live[ACTOR], direct_state(MODEL, REMAP.new[0], rank))


def test_a_worker_that_voted_no_refuses_to_commit() -> None:
    world = World((ACTOR, REMAP))
    vote = voted(world[0], 1, order_of(REMAP, 0), deadline_s=0.2)  # worker 1 never comes
    assert not vote.yes
    assert "absent: [1]" in vote.reason
    with pytest.raises(InvalidOperation, match="commit needs every vote"):
        world[0].apply(decision(1))


def test_resolve_waits_without_changing_anything_until_there_is_a_decision() -> None:
    world, record = World((ACTOR, REMAP)), MemoryRecord()
    votes = world.prepare(1, REMAP)
    assert world[0].resolve(record, wait_s=0.05) is None
    assert world[0].undecided == 1
    decided = Coordinator(record).decide(1, world.ranks, votes, control="{}")
    assert decided.commits
    assert world.together(lambda rank, p: p.resolve(record, wait_s=5)) == dict.fromkeys(world.ranks, decided)
    assert not differences(world[0].live[ACTOR], direct_state(MODEL, REMAP.new[0], 0))


def test_missing_votes_and_dead_workers_count_as_no() -> None:
    store = Store()
    try:
        cast(store.client, Vote(worker=0, epoch=3, yes=True))
        votes = collect(store.client, 3, (0, 1), deadline_s=10, dead=lambda: [1])
        assert votes[0].yes
        assert votes[1].reason == "worker 1: its process has ended"
        votes = collect(store.client, 3, (0, 2), deadline_s=0.05)
        assert votes[2].reason == "worker 2: no vote within 0.05 s"
        assert not Coordinator(MemoryRecord()).decide(3, (0, 2), votes).commits
        assert not Coordinator(MemoryRecord()).decide(4, (0,), {}).commits
    finally:
        store.close()


def test_a_successor_aborts_what_was_undecided_and_learns_what_was_decided() -> None:
    record = MemoryRecord()
    votes = {0: Vote(worker=0, epoch=1, yes=True)}
    committed = Coordinator(record).decide(1, (0,), votes, control="{}")
    assert Coordinator(record).recover(1) == committed
    aborted = Coordinator(record).recover(2)
    assert aborted.outcome is Outcome.ABORT
    assert Coordinator(record).decide(2, (0,), votes) == aborted


def test_a_bounded_transition_needs_a_replica_that_it_leaves_alone() -> None:
    old = [unit(0, 1, 1, 0), unit(1, 1, 1, 1)]
    both = plan_reshard(MODEL, old, [unit(2, 2, 1, 0, 1)])
    with pytest.raises(InvalidOperation, match="none is kept"):
        check_bounded({rank: both.rank_plan(rank, "bounded") for rank in both.ranks})
    check_bounded({rank: ONE_OF_TWO.rank_plan(rank, "bounded") for rank in ONE_OF_TWO.ranks})
    check_bounded({rank: both.rank_plan(rank) for rank in both.ranks})


def test_a_bounded_move_runs_after_the_decision() -> None:
    world = World((ACTOR, ONE_OF_TWO))
    votes = world.prepare(1, ONE_OF_TWO, "bounded")
    assert all(vote.yes and vote.sent_bytes == 0 for vote in votes.values())
    old = direct_state(MODEL, ONE_OF_TWO.old[1], 0)
    assert not differences(world[0].live[ACTOR], old), "nothing has moved or been freed yet"
    lost = world.together(lambda rank, p: p.apply(decision(1)))
    assert not any(applied.lost for applied in lost.values())
    assert sum(applied.sent_bytes[ACTOR] for applied in lost.values()) == ONE_OF_TWO.bytes
    for rank in world.ranks:
        new = ONE_OF_TWO.new_unit(rank)
        assert new is not None
        assert not differences(world[rank].live[ACTOR], direct_state(MODEL, new, rank))


def test_a_bounded_move_that_breaks_off_reports_the_loss_and_spares_the_backup() -> None:
    world = World((ACTOR, ONE_OF_TWO))
    world.prepare(1, ONE_OF_TWO, "bounded")

    def no_room(order: Order) -> ShardState:
        raise MemoryError("planted")

    world[1].allocate = no_room
    lost = world.together(lambda rank, p: p.apply(decision(1)))
    (gone,) = lost[1].lost
    assert gone.key == ACTOR
    assert "no memory" in gone.reason
    assert ACTOR not in world[1].live
    assert not lost[2].lost
    assert not differences(world[2].live[ACTOR], direct_state(MODEL, ONE_OF_TWO.old[0], 2))


def spilling(unit: Unit) -> SpillOrder:
    return SpillOrder(source=ACTOR, model=MODEL, unit=unit)


def with_spill(rank: int, participant: Participant) -> Vote:
    """Begin, put the old shard into host memory, move it on, vote."""
    participant.begin(1)
    spilled = participant.spill(spilling(REMAP.old[0]), deadline_s=5)
    assert spilled.spilled_bytes > 0
    participant.prepare(order_of(REMAP, rank), deadline_s=5)
    return participant.vote()


def test_a_spilled_shard_leaves_its_room_to_the_new_one_and_is_read_from_the_host() -> None:
    world = World((ACTOR, REMAP))
    held = {rank: world[rank].live[ACTOR].num_bytes for rank in world.ranks}
    most: dict[int, int] = {}

    for rank in world.ranks:
        participant = world[rank]

        def make(order: Order, participant: Participant = participant, rank: int = rank) -> ShardState:
            new = allocate(order)
            most[rank] = participant.live[ACTOR].num_bytes + new.num_bytes
            return new

        participant.allocate = make
    votes = world.together(with_spill)
    assert all(vote.yes for vote in votes.values())
    assert sum(vote.sent_bytes for vote in votes.values()) == REMAP.bytes, "the host is no peer"
    world.together(lambda rank, p: p.apply(decision(1)))
    for rank in world.ranks:
        new = REMAP.new_unit(rank)
        assert new is not None
        state = direct_state(MODEL, new, rank)
        assert not differences(world[rank].live[ACTOR], state)
        assert most[rank] == state.num_bytes < state.num_bytes + held[rank], "never both"


def test_an_abort_brings_spilled_shards_back_to_where_they_were() -> None:
    world = World((ACTOR, REMAP))
    before = {rank: pointer(world[rank].live[ACTOR]) for rank in world.ranks}
    world.together(with_spill)
    applied = world.together(lambda rank, p: p.apply(decision(1, Outcome.ABORT)))
    for rank in world.ranks:
        assert not applied[rank].lost
        assert pointer(world[rank].live[ACTOR]) == before[rank]
        assert not differences(world[rank].live[ACTOR], direct_state(MODEL, REMAP.old[0], rank))
    assert all(vote.yes for vote in world.prepare(2, REMAP).values())


def test_a_shard_that_does_not_come_back_from_the_host_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World((ACTOR, REMAP))
    world.together(with_spill)

    def full(self: Arena) -> None:
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "occupy", full)
        applied = world[0].apply(decision(1, Outcome.ABORT))
    (lost,) = applied.lost
    assert (lost.key, lost.reason) == (ACTOR, "planted")
    assert ACTOR not in world[0].live
    assert not world[1].apply(decision(1, Outcome.ABORT)).lost


def test_a_device_that_is_full_in_the_middle_of_a_move_is_a_no_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World((ACTOR, REMAP))

    def full(self: StagingPool, num_bytes: int, writer: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(StagingPool, "take", full)
    votes = world.together(with_spill)
    assert not any(vote.yes for vote in votes.values())
    assert any("buffers of what is on its way must fit" in vote.reason for vote in votes.values())
    monkeypatch.undo()
    world.together(lambda rank, p: p.apply(decision(1, Outcome.ABORT)))
    for rank in world.ranks:
        assert not differences(world[rank].live[ACTOR], direct_state(MODEL, REMAP.old[0], rank))


@pytest.mark.parametrize("error", [MemoryError, OSError, torch.OutOfMemoryError])
def test_a_second_try_brings_back_what_did_not_fit_at_once(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World((ACTOR, REMAP))
    world.together(with_spill)
    occupy, failures = Arena.occupy, [error("planted")]

    def full_once(self: Arena) -> None:
        if self.dtype == torch.float32 and failures:  # after the weights
            raise failures.pop()
        occupy(self)

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "occupy", full_once)
        assert not world[0].apply(decision(1, Outcome.ABORT)).lost
    assert not failures
    assert not differences(world[0].live[ACTOR], direct_state(MODEL, REMAP.old[0], 0))


def test_a_unit_that_is_kept_may_not_be_spilled() -> None:
    world = World((ACTOR, EXTEND))

    def prepare(rank: int, participant: Participant) -> Vote:
        participant.begin(1)
        if rank == 0:
            participant.spill(spilling(EXTEND.old[0]), deadline_s=5)
        participant.prepare(order_of(EXTEND, rank), deadline_s=5)
        return participant.vote()

    votes = world.together(prepare)
    assert not votes[0].yes, "a commit would leave it on the host"
    assert "nothing takes its place" in votes[0].reason
    world.together(lambda rank, p: p.apply(decision(1, Outcome.ABORT)))
    assert not differences(world[0].live[ACTOR], direct_state(MODEL, EXTEND.old[0], 0))


def test_a_host_without_room_fails_the_epoch_and_the_shard_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World((ACTOR, REMAP))

    def full(state: ShardState, lanes: object, deadline: object) -> HostCopy:
        raise MemoryError("planted")

    monkeypatch.setattr(HostCopy, "take", full)
    participant = world[0]
    participant.begin(1)
    moved = participant.spill(spilling(REMAP.old[0]), deadline_s=5)
    assert "cannot put its shard of actor.training#0" in moved.reason
    assert "planted" in moved.reason
    vote = participant.vote()
    assert not vote.yes
    participant.apply(decision(1, Outcome.ABORT))
    assert not differences(participant.live[ACTOR], direct_state(MODEL, REMAP.old[0], 0))


def test_what_is_spilled_must_end_and_be_what_is_held() -> None:
    world = World((ACTOR, REMAP))
    participant = world[0]
    with pytest.raises(InvalidOperation, match=r"cannot spill actor\.training"):
        participant.spill(spilling(REMAP.old[0]), deadline_s=5)
    participant.begin(1)
    with pytest.raises(InvalidOperation, match="holds another shard"):
        participant.spill(spilling(REMAP.new[0]), deadline_s=5)
    participant.spill(spilling(REMAP.old[0]), deadline_s=5)
    vote = participant.vote()
    assert not vote.yes, "a commit would leave it on the host"
    assert "nothing takes its place" in vote.reason
    participant.apply(decision(1, Outcome.ABORT))
    assert not differences(participant.live[ACTOR], direct_state(MODEL, REMAP.old[0], 0))


def test_an_abort_that_fails_has_still_dropped_the_epoch() -> None:
    world = World((ACTOR, REMAP))
    world.prepare(1, REMAP)

    def fail(phase: Phase) -> None:
        if phase is Phase.ABORTING:
            raise OSError("planted")

    world[0].observe = fail
    with pytest.raises(OSError, match="planted"):
        world[0].apply(decision(1, Outcome.ABORT))
    world[1].apply(decision(1, Outcome.ABORT))
    assert world[0].undecided is None
    assert all(vote.yes for vote in world.prepare(2, REMAP).values())


# Real processes over many transitions: everything that a transition takes is given back.

RANKS = (0, 1, 2)
THERE = plan_reshard(MODEL, [unit(0, 2, 1, 1, 0)], [unit(1, 1, 3, 2, 0, 1)])
BACK = plan_reshard(MODEL, THERE.new, THERE.old, placement="as_given")


@pytest.fixture
def processes() -> Iterator[Workers]:
    workers = Workers(RANKS)
    yield workers
    workers.close()


def hold(worker: int, address: StoreAddress) -> None:
    participant = participant_of(worker, address)
    if worker in THERE.old[0].ranks:
        participant.live[ACTOR] = direct_state(MODEL, THERE.old[0], worker)


def cycle(worker: int, address: StoreAddress, epochs: Sequence[int]) -> bool:
    """A transition and a new generation of groups for every epoch."""
    participant = participant_of(worker, address)
    record = StoreRecord(HELD["store"])
    for epoch in epochs:
        plan = THERE if epoch % 2 else BACK
        vote = voted(participant, epoch, order_of(plan, worker), deadline_s=30)
        cast(HELD["store"], vote)
        if worker == 0:
            votes = collect(HELD["store"], epoch, RANKS, deadline_s=30)
            Coordinator(record).decide(epoch, RANKS, votes)
        decided = participant.resolve(record, wait_s=30)
        if decided is None or not decided.commits:
            return False
        generation = Generation.join(address, number=epoch, worker=worker, workers=RANKS)
        layouts = [u.layout for u in plan.new]
        generation.unit_groups(layouts, model=MODEL)
        generation.leave()
    plan = THERE if epochs[-1] % 2 else BACK
    mine = plan.new_unit(worker)
    return mine is None or not differences(participant.live[ACTOR], direct_state(MODEL, mine, worker))


def resources(worker: int) -> tuple[int, int, int]:
    """Open descriptors, threads, and resident MiB."""
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident


def run_cycles(processes: Workers, num_transitions: int, *, slack_mib: int) -> None:
    store = Store()
    try:
        processes.run(hold, store.address)
        warm = 10
        assert all(processes.run(cycle, store.address, range(1, warm + 1)).values())
        store.forget("exchange")
        store.forget("generation")
        keys, before = store.client.num_keys(), processes.run(resources)
        last = warm + num_transitions
        answers = processes.run(cycle, store.address, range(warm + 1, last + 1), timeout_s=240)
        assert all(answers.values())
        after = processes.run(resources)
        for rank in RANKS:
            assert after[rank][:2] == before[rank][:2], "descriptors and threads"
            assert after[rank][2] - before[rank][2] <= slack_mib, "resident memory"
        store.forget("exchange")
        store.forget("generation")
        store.forget("vote")
        store.forget("decision")
        assert store.client.num_keys() <= keys
    finally:
        store.close()


def test_ten_transitions_give_back_what_they_took(processes: Workers) -> None:
    run_cycles(processes, 10, slack_mib=16)


@pytest.mark.slow
def test_resources_return_to_baseline_over_100_transitions(processes: Workers) -> None:
    run_cycles(processes, 100, slack_mib=16)
