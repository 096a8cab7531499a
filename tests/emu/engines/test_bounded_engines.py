"""Live engines moved in bounded mode: little more memory than a shard, and the same next step bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.arena import TORCH_DTYPE, ShardState
from nereus.emu.batch import TrainBatch
from nereus.emu.bounded import choose_moves
from nereus.emu.decoder import decoder_spec
from nereus.emu.engines.torch.engine import TorchEngine
from nereus.emu.executor import Executor
from nereus.emu.groups import Generation
from nereus.emu.kinds import training_kinds
from nereus.emu.layout import Layout, shard
from nereus.emu.rank_plan import Mode, RankPlan
from nereus.emu.reshard import ReshardPlan, plan_reshard
from nereus.emu.source import fill
from nereus.emu.store import Store, StoreAddress
from nereus.emu.tensor import Box
from nereus.emu.transport.collective import CollectiveTransport
from nereus.emu.transport.protocol import Deadline
from nereus.emu.unit import Unit, UnitId
from tests.emu.engines import torch_cases as cases
from tests.emu.engines.torch_cases import ADAM, LLAMA, TokenLoss, make_batch
from tests.emu.processes import Workers

CONFIG = replace(LLAMA, num_layers=10, dtype="bf16")
MODEL = decoder_spec(CONFIG)
BATCH = make_batch()
COUNTS = GlobalCounts.from_mask(BATCH.mask_bt)
LOSS = TokenLoss(temperature=0.8, entropy=0.01)
RANKS = (0, 1, 2, 3)
Pieces = list[tuple[str, Box, Any]]
KINDS = ("theta", "master", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = Workers(RANKS)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()


def units(tp: int, pp: int, first_index: int) -> tuple[Unit, ...]:
    return tuple(
        Unit(
            id=UnitId("actor.training", first_index + i),
            model="actor",
            layout=Layout.make(MODEL, tp=tp, pp=pp, ranks=ranks),
            kinds=training_kinds("bf16"),
        )
        for i, ranks in enumerate(((1, 0), (2, 3)))
    )


def stepped(
    worker: int,
    address: StoreAddress,
    number: int,
    layouts: tuple[Layout, ...],
    state: ShardState | None,
    step_count: int,
) -> ShardState:
    """One optimizer step of the units in a generation of their own."""
    generation = Generation.join(address, number=number, worker=worker, workers=RANKS)
    groups = generation.unit_groups(layouts, model=MODEL)
    assert groups is not None
    engine = TorchEngine(CONFIG, groups.layout, groups, optimizer=ADAM, state=state)
    if state is None:
        fill(engine.state, cases.Random(CONFIG), {"theta": "theta", "master": "theta"})
    engine.step_count = step_count
    engine.train_step([micro_batch(worker, layouts)], LOSS, COUNTS, learning_rate=1e-2)
    generation.leave()
    return engine.state


def micro_batch(worker: int, layouts: tuple[Layout, ...]) -> TrainBatch:
    left, right = cases.split(BATCH, (4, 3))
    return left if worker in layouts[0].ranks else right


def train_move_train(
    worker: int,
    address: StoreAddress,
    number: int,
    layouts: tuple[tuple[Layout, ...], tuple[Layout, ...]],
    moves: list[dict[int, RankPlan]],
) -> tuple[dict[str, Pieces], list[int]]:
    """A step, the moves, a step; what the shard is then, and the peak of every move."""
    state = stepped(worker, address, number, layouts[0], None, 0)
    transport = CollectiveTransport.connect(address, worker=worker)
    executor = Executor(transport, torch.device("cpu"))
    peaks = []
    for index, plans in enumerate(moves):
        plan = plans[worker]
        new = state
        if plan.new != plan.old:
            assert plan.new is not None
            dtypes: dict[str, torch.dtype] = {kind.name: TORCH_DTYPE[kind.dtype] for kind in plan.new.kinds}
            held = shard(MODEL, plan.new.layout, worker)
            new = ShardState.empty(held, dtypes, allocated=plan.mode == "shadow")
        report = executor.run(plan, state, new, epoch=10 * number + index, deadline=Deadline.after(30))
        peaks.append(report.peak_state_bytes + report.peak_staging_bytes)
        state = new
    state = stepped(worker, address, number + 1, layouts[1], state, 1)
    return {kind: cases.boxes(state[kind]) for kind in KINDS}, peaks


def run(
    workers: Workers, store: Store, number: int, plans: tuple[ReshardPlan, ...], mode: Mode
) -> tuple[dict[str, dict[str, Tensor]], dict[int, list[int]]]:
    """Logical tensors of every kind after the second step, and the peaks of each rank."""
    layouts = tuple(tuple(u.layout for u in both) for both in (plans[0].old, plans[-1].new))
    moves = [{rank: plan.rank_plan(rank, mode) for rank in RANKS} for plan in plans]
    found = workers.run(train_move_train, store.address, number, layouts, moves)
    whole = {kind: cases.assemble(CONFIG, [found[rank][0][kind] for rank in RANKS]) for kind in KINDS}
    return whole, {rank: found[rank][1] for rank in RANKS}


@pytest.mark.slow
def test_a_step_after_a_bounded_move_of_live_engines_is_bitwise_that_after_a_shadow_move(
    workers: Workers, store: Store
) -> None:
    plan = plan_reshard(MODEL, units(2, 1, 0), units(1, 2, 10))
    shadow = max(plan.peak_bytes(rank) for rank in RANKS)
    moves = choose_moves(plan, {rank: int(0.85 * shadow) for rank in RANKS})
    assert moves.mode == "bounded"
    assert len(moves.plans) == 2, "one replica stays for the second stage"
    wanted, _ = run(workers, store, 1, (plan,), "shadow")
    found, peaks = run(workers, store, 11, moves.plans, "bounded")
    for kind, tensors in wanted.items():
        for name, tensor in tensors.items():
            assert torch.equal(found[kind][name], tensor), (kind, name)
    for rank, reached in peaks.items():
        for stage, peak in zip(moves.plans, reached, strict=True):
            gaps = 2 * 32 * len(MODEL.tensors) * stage.old[0].bytes_per_element
            assert peak <= stage.peak_bytes(rank, "bounded") + gaps
            assert peak < 0.85 * shadow + gaps
