"""Moves over real gloo processes, compared bit for bit with shards built directly."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.adamw import adamw

from nereus.emu.arena import ShardState
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.executor import Executor, MoveReport
from nereus.emu.kinds import Kind, KindMove, Kinds, serving_kinds, training_kinds
from nereus.emu.layout import Layout
from nereus.emu.rank_plan import Mode, RankPlan
from nereus.emu.reshard import Limits, ReshardPlan, plan_reshard
from nereus.emu.store import Store, StoreAddress
from nereus.emu.tensor import Even, Fused, ModelSpec, TensorSpec
from nereus.emu.transport.collective import CollectiveTransport
from nereus.emu.transport.memory import Hub, MemoryTransport
from nereus.emu.transport.protocol import Deadline
from nereus.emu.unit import Unit, UnitId
from nereus.errors import InvalidOperation
from tests.emu.processes import Workers
from tests.emu.states import differences, direct_state, empty_state, random_kinds, random_model, random_units

RANKS = tuple(range(6))
HELD: dict[str, Any] = {}
_EPOCHS = iter(range(1, 1_000_000))


@pytest.fixture(scope="module", params=["reads", "gloo", "mixed"])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    """Ranks that read one another's memory, that do not, and some of both."""
    pool = Workers(RANKS)
    pool.run(choose_reads, request.param)
    yield pool
    pool.close()


def choose_reads(worker: int, way: str) -> None:
    HELD["reads"] = way == "reads" or (way == "mixed" and worker not in (1, 4))


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()


def executor_of(worker: int, address: StoreAddress) -> Executor:
    if "executor" not in HELD:
        transport = CollectiveTransport.connect(address, worker=worker, reads=HELD.get("reads", True))
        HELD["executor"] = Executor(transport, torch.device("cpu"))
    executor: Executor = HELD["executor"]
    return executor


def begin(worker: int, model: ModelSpec, units: tuple[Unit, ...]) -> None:
    """Hold the directly built shard of the unit this worker is in."""
    mine = [unit for unit in units if worker in unit.ranks]
    HELD["state"] = direct_state(model, mine[0], worker) if mine else None


def hop(
    worker: int, address: StoreAddress, model: ModelSpec, plan: RankPlan, epoch: int
) -> tuple[list[str], MoveReport | None]:
    """Move to the plan's new units and compare with the direct build."""
    old: ShardState | None = HELD["state"]
    shadow = plan.mode == "shadow"
    new: ShardState | None = None
    if plan.new is not None:
        kept = plan.new == plan.old
        new = old if kept else empty_state(model, plan.new, worker, allocated=shadow)
    executor = executor_of(worker, address)
    executor.pool.forget()
    report = executor.run(plan, old, new, epoch=epoch, deadline=Deadline.after(20))
    HELD["state"] = new
    if plan.new is None or new is None:
        return [], report
    return differences(new, direct_state(model, plan.new, worker)), report


def close(worker: int, epoch: int) -> None:
    HELD["executor"].transport.close(epoch)


def move(workers: Workers, store: Store, plan: ReshardPlan, mode: Mode = "shadow") -> dict[int, MoveReport]:
    """Run a plan on its workers; every new shard must equal the direct build bit for bit."""
    epoch = next(_EPOCHS)
    plans = {rank: plan.rank_plan(rank, mode) for rank in plan.ranks}
    for rank in plan.ranks:
        workers.call(rank, hop, store.address, plan.model, plans[rank], epoch)
    answers = {rank: workers.result(rank) for rank in plan.ranks}
    workers.run(close, epoch, workers=plan.ranks)  # not before all are done: some may still be connecting
    wrong = {rank: names for rank, (names, _) in answers.items() if names}
    assert not wrong, f"{plan.explain()}: {wrong}"
    reports = {rank: report for rank, (_, report) in answers.items()}
    for rank, report in reports.items():
        assert report.peak_staging_bytes <= plans[rank].staging_bytes
        held = report.peak_state_bytes + report.peak_staging_bytes
        assert held <= plan.peak_bytes(rank, mode) + gap_bytes(plan, rank), "the declared peak is kept"
    assert sum(report.received_bytes for report in reports.values()) == plan.bytes
    return reports


def gap_bytes(plan: ReshardPlan, rank: int) -> int:
    """Cache-line gaps between tensors, which the planner does not count."""
    units = [unit for unit in (plan.old_unit(rank), plan.new_unit(rank)) if unit is not None]
    return sum(32 * len(plan.model.tensors) * unit.bytes_per_element for unit in units)


def unit(
    model: ModelSpec,
    index: int,
    tp: int,
    pp: int,
    ranks: tuple[int, ...],
    kinds: Kinds,
    stage: str = "training",
) -> Unit:
    return Unit(
        id=UnitId(f"actor.{stage}", index),
        model="actor",
        layout=Layout.make(model, tp=tp, pp=pp, ranks=ranks),
        kinds=kinds,
    )


def walk(workers: Workers, store: Store, seed: int, num_hops: int) -> None:
    """A random path over layouts, replicas and rank sets."""
    rng = random.Random(seed)
    model, kinds = random_model(rng), random_kinds(rng)
    units = random_units(rng, model, kinds, RANKS, first_index=0)
    workers.run(begin, model, units)
    for number in range(1, num_hops + 1):
        if rng.random() < 0.3 and len(units) > 1:
            new = tuple(rng.sample(units, rng.randint(1, len(units) - 1)))  # Destroy; the rest is kept
        else:
            new = random_units(rng, model, kinds, RANKS, first_index=100 * number)
        limits = rng.choice(
            [
                None,
                Limits(bucket_bytes=4096, direct_bytes=256, operation_cap=8),
                Limits(bucket_bytes=1 << 16, direct_bytes=1, relay_bytes=1024),
                Limits(bucket_bytes=1 << 14, direct_bytes=512, relay_bytes=1024, collectives="always"),
            ]
        )
        placement = rng.choice(["max_overlap", "as_given"])
        plan = plan_reshard(model, units, new, placement=placement, limits=limits)
        assert plan.bytes == plan.lower_bound
        move(workers, store, plan)
        idle = [rank for rank in RANKS if rank not in plan.ranks]
        workers.run(begin, model, (), workers=idle)
        units = plan.new


@pytest.mark.parametrize("seed", range(5))
def test_random_hops_are_bitwise_equal_to_direct_builds(workers: Workers, store: Store, seed: int) -> None:
    walk(workers, store, seed, 4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_200_random_hops_are_bitwise_equal_to_direct_builds(
    workers: Workers, store: Store, seed: int
) -> None:
    walk(workers, store, seed, 5)


CONFIG = DecoderConfig(
    vocab_size=64,  # the padded rows line up for tp 1, 2 and 4, so a merge can move nothing
    hidden_size=16,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    intermediate_size=24,
)
MODEL = decoder_spec(CONFIG, vocab_multiple=8)
DEEP = decoder_spec(replace(CONFIG, num_layers=16), vocab_multiple=8)
BF16 = training_kinds("bf16")


def pointers(worker: int) -> dict[str, int]:
    """Addresses of the live arenas."""
    return {kind: arena.flat.data_ptr() for kind, arena in HELD["state"].arenas.items()}


def test_split_then_merge_is_the_identity_and_the_merge_moves_nothing(workers: Workers, store: Store) -> None:
    whole = (unit(MODEL, 0, 4, 1, (0, 1, 2, 3), BF16),)
    workers.run(begin, MODEL, whole)
    split = plan_reshard(
        MODEL, whole, (unit(MODEL, 1, 2, 1, (0, 1), BF16), unit(MODEL, 2, 2, 1, (2, 3), BF16))
    )
    reports = move(workers, store, split)
    assert split.bytes == split.lower_bound > 0
    merge = plan_reshard(MODEL, split.new, (unit(MODEL, 3, 4, 1, (0, 1, 2, 3), BF16),))
    reports = move(workers, store, merge)
    assert merge.bytes == sum(report.sent_bytes for report in reports.values()) == 0
    assert all(report.copied_bytes > 0 for report in reports.values())


def test_extend_then_destroy_leaves_the_old_replica_in_its_storage(workers: Workers, store: Store) -> None:
    old = (unit(MODEL, 0, 2, 1, (1, 0), BF16),)
    workers.run(begin, MODEL, old)
    before = workers.run(pointers, workers=(0, 1))
    extend = plan_reshard(MODEL, old, (*old, unit(MODEL, 1, 2, 1, (4, 5), BF16)))
    reports = move(workers, store, extend)
    assert reports[0].copied_bytes == reports[1].copied_bytes == 0
    destroy = plan_reshard(MODEL, extend.new, old)
    reports = move(workers, store, destroy)
    assert destroy.bytes == 0
    assert workers.run(pointers, workers=(0, 1)) == before


def num_shared(plan: ReshardPlan) -> int:
    """Broadcasts that ranks take part in."""
    return sum(
        len(turn.shared)
        for rank in plan.ranks
        for chunk in plan.rank_plan(rank).chunks
        for turn in chunk.rounds
    )


@pytest.mark.parametrize("mode", ["shadow", "bounded"])
def test_an_extend_by_several_replicas_runs_as_broadcasts(workers: Workers, store: Store, mode: Mode) -> None:
    limits = Limits(bucket_bytes=1 << 14, direct_bytes=512, collectives="always")
    old = (unit(MODEL, 0, 2, 1, (1, 0), BF16),)
    new = (*old, unit(MODEL, 1, 2, 1, (2, 3), BF16), unit(MODEL, 2, 2, 1, (5, 4), BF16))
    workers.run(begin, MODEL, old)
    plan = plan_reshard(MODEL, old, new, limits=limits)
    assert num_shared(plan) > 0
    assert all(not turn.sends for rank in plan.ranks for turn in plan.rank_plan(rank).rounds)
    move(workers, store, plan, mode)


def test_a_split_into_single_ranks_runs_as_an_all_gather(workers: Workers, store: Store) -> None:
    """Every rank gives its part to all others: one broadcast of each in every group call."""
    limits = Limits(collectives="always")
    old = (unit(MODEL, 0, 4, 1, (2, 0, 1, 3), BF16),)
    new = tuple(unit(MODEL, 1 + rank, 1, 1, (rank,), BF16) for rank in range(4))
    workers.run(begin, MODEL, old)
    plan = plan_reshard(MODEL, old, new, limits=limits)
    roots = {shared.message.peer for turn in plan.rank_plan(0).rounds for shared in turn.shared}
    assert roots == {0, 1, 2, 3}
    reports = move(workers, store, plan)
    assert plan.bytes == plan.lower_bound == sum(report.sent_bytes for report in reports.values())


def test_fused_gate_and_up_of_twelve_rows_round_trips_over_4_2_3_1(workers: Workers, store: Store) -> None:
    """Gate and up of 6 rows each; by `torch.chunk`'s rule 4 ranks hold 2, 2, 2 and none."""
    cut = Even(dim=0, rule="chunk")
    model = ModelSpec(
        tensors=(
            TensorSpec(name="gate", shape=(6, 5), cut=cut, place=0),
            TensorSpec(name="up", shape=(6, 5), cut=cut, place=0),
            TensorSpec(name="down", shape=(5, 6), cut=Even(dim=1, rule="chunk"), place=0),
        ),
        fused=(Fused(name="gate_up", parts=("gate", "up")),),
        num_layers=1,
        num_heads=12,
        num_kv_heads=12,
    )
    units = (unit(model, 0, 4, 1, (3, 1, 0, 2), BF16),)
    workers.run(begin, model, units)
    for index, ranks in enumerate([(5, 1), (0, 5, 2), (4,), (0, 1, 2, 3)], start=1):
        plan = plan_reshard(model, units, (unit(model, index, len(ranks), 1, ranks, BF16),))
        move(workers, store, plan)
        units = plan.new


def test_a_bounded_move_keeps_its_declared_peak_below_the_shadow_one(workers: Workers, store: Store) -> None:
    old = (unit(DEEP, 0, 2, 1, (0, 1), BF16), unit(DEEP, 1, 2, 1, (2, 3), BF16))
    workers.run(begin, DEEP, old)
    plan = plan_reshard(DEEP, old, (old[0], unit(DEEP, 2, 1, 2, (2, 3), BF16)))
    reports = move(workers, store, plan, "bounded")
    for rank in (2, 3):
        assert plan.peak_bytes(rank, "bounded") < 0.75 * plan.peak_bytes(rank, "shadow")
        assert reports[rank].peak_state_bytes <= plan.peak_bytes(rank, "bounded")


LARGE = decoder_spec(
    replace(CONFIG, hidden_size=192, num_layers=12, head_dim=24, intermediate_size=512), vocab_multiple=8
)


def resident_growth(
    worker: int, address: StoreAddress, plans: dict[int, RankPlan], epoch: int
) -> tuple[int, list[str]]:
    """Bytes by which resident memory grew at the peak of a move, as the kernel counts it."""
    plan = plans[worker]
    shadow = plan.mode == "shadow"
    old: ShardState | None = HELD.pop("state")
    executor = executor_of(worker, address)
    executor.pool.forget()
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    new = old
    if plan.new is not None and plan.new != plan.old:
        new = empty_state(LARGE, plan.new, worker, allocated=shadow)
    executor.run(plan, old, new, epoch=epoch, deadline=Deadline.after(60))
    grown = status_bytes("VmHWM") - before
    HELD["state"] = new
    if plan.new is None or new is None:
        return grown, []
    return grown, differences(new, direct_state(LARGE, plan.new, worker))


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak counter")
def test_resident_memory_follows_the_declared_peaks(store: Store) -> None:
    """One tensor's slack: neighbours share pages, and a page leaves with the last of them."""
    old = (unit(LARGE, 0, 2, 1, (0, 1), BF16), unit(LARGE, 1, 2, 1, (2, 3), BF16))
    plan = plan_reshard(LARGE, old, (old[0], unit(LARGE, 2, 1, 2, (2, 3), BF16)))
    shard_bytes = direct_state(LARGE, old[1], 2).num_bytes
    grown: dict[Mode, int] = {}
    for mode in ("shadow", "bounded"):
        workers = Workers((0, 1, 2, 3))
        try:
            workers.run(begin, LARGE, old)
            plans = {rank: plan.rank_plan(rank, mode) for rank in plan.ranks}
            answers = workers.run(resident_growth, store.address, plans, next(_EPOCHS), timeout_s=120)
        finally:
            workers.close()
        assert not any(names for _, names in answers.values())
        grown[mode] = max(answers[rank][0] for rank in (2, 3))
        declared = max(plan.peak_bytes(rank, mode) for rank in (2, 3)) - shard_bytes
        assert grown[mode] <= declared + 0.15 * shard_bytes, mode
    assert grown["bounded"] < 0.7 * grown["shadow"]


def test_bounded_mode_is_refused_for_the_only_replica() -> None:
    old = (unit(MODEL, 0, 2, 1, (0, 1), BF16),)
    plan = plan_reshard(MODEL, old, (unit(MODEL, 1, 1, 2, (0, 1), BF16),))
    with pytest.raises(InvalidOperation, match="bounded"):
        plan.rank_plan(0, "bounded")


def test_shards_that_the_plan_does_not_speak_of_are_refused(workers: Workers, store: Store) -> None:
    old = (unit(MODEL, 0, 2, 1, (0, 1), BF16),)
    plan = plan_reshard(MODEL, old, (unit(MODEL, 1, 1, 2, (0, 1), BF16),)).rank_plan(0)
    executor = Executor(MemoryTransport(Hub(), 0), torch.device("cpu"))
    with pytest.raises(InvalidOperation, match="old shard absent"):
        executor.run(plan, None, empty_state(MODEL, old[0], 0), epoch=1, deadline=Deadline.after(1))
    pair = (*old, unit(MODEL, 1, 2, 1, (2, 3), BF16))
    bounded = plan_reshard(MODEL, pair, (old[0], unit(MODEL, 2, 1, 2, (2, 3), BF16))).rank_plan(2, "bounded")
    state = direct_state(MODEL, pair[1], 2)
    with pytest.raises(InvalidOperation, match="allocated already"):
        executor.run(bounded, state, state, epoch=2, deadline=Deadline.after(1))


def adam_step(worker: int, model: ModelSpec, units: tuple[Unit, ...], steps: int) -> None:
    """Foreach AdamW over the flat arenas, with logical gradients that do not depend on the layout.

    Fused AdamW is not bitwise equal across shardings on a CPU; foreach is.
    """
    state: ShardState = HELD["state"]
    if state is None:
        return
    mine = next(u for u in units if worker in u.ranks)
    gradients = direct_state(model, mine, worker, salt="gradient/")
    for step in range(steps):
        adamw(
            [state["master"].flat],
            [gradients["master"].flat * 1e-3],
            [state["exp_avg"].flat],
            [state["exp_avg_sq"].flat],
            [],
            [torch.tensor(float(step))],
            foreach=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.95,
            lr=1e-3,
            weight_decay=0.1,
            eps=1e-8,
            maximize=False,
        )
        state["theta"].flat.copy_(state["master"].flat)


def snapshot(worker: int) -> dict[str, torch.Tensor] | None:
    state: ShardState | None = HELD["state"]
    return None if state is None else {kind: arena.flat.clone() for kind, arena in state.arenas.items()}


def test_an_optimizer_step_after_a_transition_equals_one_before_bitwise(
    workers: Workers, store: Store
) -> None:
    old = (unit(MODEL, 0, 4, 1, (0, 1, 2, 3), BF16),)
    new = (unit(MODEL, 1, 2, 2, (5, 4, 1, 0), BF16),)
    plan = plan_reshard(MODEL, old, new)
    workers.run(begin, MODEL, old)
    move(workers, store, plan)
    workers.run(adam_step, MODEL, plan.new, 2)
    stepped_after = workers.run(snapshot)
    workers.run(begin, MODEL, old)
    workers.run(adam_step, MODEL, old, 2)
    workers.run(hop_only, store.address, {rank: plan.rank_plan(rank) for rank in plan.ranks}, next(_EPOCHS))
    stepped_before = workers.run(snapshot)
    for rank in plan.new[0].layout.ranks:
        for kind, flat in stepped_before[rank].items():
            assert torch.equal(flat, stepped_after[rank][kind]), (rank, kind)


def hop_only(worker: int, address: StoreAddress, plans: dict[int, RankPlan], epoch: int) -> None:
    """Move without comparing: the values are not those of the definition any more."""
    if (plan := plans.get(worker)) is None:
        return
    new = None if plan.new is None else empty_state(MODEL, plan.new, worker)
    executor_of(worker, address).run(plan, HELD["state"], new, epoch=epoch, deadline=Deadline.after(20))
    HELD["state"] = new


def push(worker: int, address: StoreAddress, plans: dict[int, RankPlan], epoch: int) -> tuple[int, list[str]]:
    """A weight sync of theta in fp32 into a generation shard of bfloat16, twice over one channel."""
    plan = plans[worker]
    source: ShardState | None = HELD["state"]
    target = None if plan.new is None else empty_state(MODEL, plan.new, worker)
    executor = executor_of(worker, address)
    for _ in range(2):
        sent = executor.run(plan, source, target, epoch=epoch, deadline=Deadline.after(20)).sent_bytes
    if plan.new is None or target is None:
        return sent, []
    return sent, differences(target, direct_state(MODEL, plan.new, worker))


def test_a_weight_sync_casts_on_the_fly_also_within_one_process(workers: Workers, store: Store) -> None:
    fp32, bf16 = training_kinds("fp32"), serving_kinds("bf16")
    old = (unit(MODEL, 0, 2, 2, (0, 1, 2, 3), fp32),)
    new = tuple(unit(MODEL, i, 1, 1, (rank,), bf16, stage="generation") for i, rank in enumerate((0, 2, 5)))
    theta = (KindMove(Kind("theta", "fp32"), Kind("theta", "bf16")),)
    plan = plan_reshard(MODEL, old, new, theta)
    workers.run(begin, MODEL, old)
    plans = {rank: plan.rank_plan(rank) for rank in plan.ranks}
    answers = workers.run(push, store.address, plans, next(_EPOCHS), workers=plan.ranks)
    assert not [names for _, names in answers.values() if names]
    assert sum(sent for sent, _ in answers.values()) == plan.bytes == plan.lower_bound
