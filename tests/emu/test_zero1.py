"""A shared optimizer changes nothing but where its numbers lie: in steps, checkpoints and transitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nereus.emu.decision import Decision, Outcome
from nereus.emu.decoder import DecoderConfig
from nereus.emu.hf_folder import write_hf_folder
from nereus.emu.orders import Order
from nereus.emu.stage import FromCheckpoint, FromFolder, FromMemory, FromStage, StageSpec
from nereus.errors import NoSource
from nereus.tasks import peer_copy, peer_places
from nereus.tasks.planned_transition import Transition
from nereus.tasks.stages import GENERATION
from nereus.tasks.transition_plan import plan_transition
from tests.emu.driver import NAME, Driver, do, stage, tensors
from tests.emu.engines.torch_cases import QWEN2, SMALL, Random, make_batch

BF16 = replace(SMALL, dtype="bf16")
BATCHES = [make_batch(8, seed=seed) for seed in range(6)]
_epochs = iter(range(1000, 10_000))


def shared(
    config: DecoderConfig, folder: Path, *, tp: int, pp: int, dp: int, zero1: bool = True
) -> StageSpec:
    return replace(stage(config, FromFolder(folder=folder), tp=tp, pp=pp, dp=dp), zero1=zero1)


def moving(old: StageSpec, new: StageSpec) -> Transition:
    """The transition of a training stage with which generation shares its weights."""
    now, then = (
        {
            NAME: spec,
            GENERATION: replace(
                spec,
                name=GENERATION,
                role="generation",
                shares=NAME,
                zero1=False,
                origin=FromStage(stage=NAME),
            ),
        }
        for spec in (old, new)
    )
    return plan_transition(now, then)


def carry_out(driver: Driver, transition: Transition, step_count: int) -> StageSpec:
    """Move the live state as the flow does, and build the engines around it."""
    epoch, workers = next(_epochs), driver.workers
    workers.run(do, "begin_transition", epoch, workers=transition.movers)
    for operation in transition.operations:
        for rank, order in operation.orders.items():
            workers.call(rank, do, "prepare_operation", order, 30.0)
        moved = [workers.result(rank) for rank in operation.orders]
        assert not any(part.reason for part in moved)
        assert sum(part.sent_bytes for part in moved) == operation.bytes
    assert all(vote.yes for vote in workers.run(do, "vote", workers=transition.movers).values())
    decision = Decision(epoch=epoch, outcome=Outcome.COMMIT, reason="", control="")
    workers.run(do, "apply_decision", decision, workers=transition.movers)
    after = replace(transition.stages[NAME], origin=FromMemory(step_count=step_count))
    driver.build(after)
    return after


@pytest.mark.parametrize(
    ("config", "tp", "pp"),
    [(SMALL, 1, 1), (QWEN2, 2, 1), (QWEN2, 1, 2), (BF16, 2, 1)],
    ids=["llama", "tied-tp2", "tied-pp2", "bf16-tp2"],
)
def test_two_units_that_share_the_optimizer_train_as_two_that_do_not(
    driver: Driver, tmp_path: Path, config: DecoderConfig, tp: int, pp: int
) -> None:
    write_hf_folder(Random(config), config, tmp_path / "model")
    found: list[dict[tuple[str, str], Tensor]] = []
    for zero1 in (False, True):
        spec = shared(config, tmp_path / "model", tp=tp, pp=pp, dp=2, zero1=zero1)
        driver.build(spec)
        driver.train(spec, BATCHES[:3])
        found.append(tensors(driver.save(spec, tmp_path / str(zero1), 3), config))
    assert found[0].keys() == found[1].keys()
    for key, tensor in found[0].items():
        assert torch.equal(found[1][key], tensor), f"{key}: the sum of two has one order, so bits are equal"


def test_four_slices_differ_by_the_order_of_sums_alone(driver: Driver, tmp_path: Path) -> None:
    write_hf_folder(Random(SMALL), SMALL, tmp_path / "model")
    found = []
    for zero1 in (False, True):
        spec = shared(SMALL, tmp_path / "model", tp=1, pp=1, dp=4, zero1=zero1)
        driver.build(spec)
        driver.train(spec, BATCHES[:3])
        found.append(tensors(driver.save(spec, tmp_path / str(zero1), 3), SMALL))
    for key, tensor in found[0].items():
        torch.testing.assert_close(found[1][key], tensor, atol=2e-5, rtol=2e-4)


def test_a_checkpoint_of_slices_resumes_under_any_layout(driver: Driver, tmp_path: Path) -> None:
    write_hf_folder(Random(QWEN2), QWEN2, tmp_path / "model")
    spec = shared(QWEN2, tmp_path / "model", tp=2, pp=1, dp=2)
    driver.build(spec)
    driver.train(spec, BATCHES[:2])
    half = driver.save(spec, tmp_path / "half", 2)
    saved = tensors(half, QWEN2)
    for number, (tp, pp, dp, zero1) in enumerate(
        [(1, 1, 4, True), (1, 2, 2, True), (2, 2, 1, True), (4, 1, 1, False)]
    ):
        other = shared(QWEN2, tmp_path / "model", tp=tp, pp=pp, dp=dp, zero1=zero1)
        other = replace(other, origin=FromCheckpoint(folder=half, step_count=2))
        driver.build(other)
        again = tensors(driver.save(other, tmp_path / f"again{number}", 2), QWEN2)
        assert saved.keys() == again.keys()
        assert all(torch.equal(again[key], tensor) for key, tensor in saved.items())


def test_live_hops_keep_every_bit_and_the_next_step_is_that_without_them(
    driver: Driver, tmp_path: Path
) -> None:
    write_hf_folder(Random(BF16), BF16, tmp_path / "model")
    start = shared(BF16, tmp_path / "model", tp=2, pp=1, dp=2)
    driver.build(start)
    driver.train(start, BATCHES[:2])
    before = tensors(driver.save(start, tmp_path / "before", 2), BF16)
    now = start
    for number, (tp, pp, dp) in enumerate([(1, 1, 4), (1, 1, 2), (1, 1, 3), (1, 2, 2), (4, 1, 1), (2, 1, 2)]):
        then = shared(BF16, tmp_path / "model", tp=tp, pp=pp, dp=dp)
        transition = moving(now, then)
        assert transition.bytes == transition.lower_bound
        now = carry_out(driver, transition, 2)
        after = tensors(driver.save(now, tmp_path / f"after{number}", 2), BF16)
        assert before.keys() == after.keys()
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items()), (tp, pp, dp)
    driver.train(now, BATCHES[2:3])
    moved = tensors(driver.save(now, tmp_path / "moved", 3), BF16)

    driver.build(start)
    driver.train(start, BATCHES[:3])
    straight = tensors(driver.save(start, tmp_path / "straight", 3), BF16)
    assert all(torch.equal(moved[key], tensor) for key, tensor in straight.items())


def test_units_that_stay_keep_their_weights_where_they_lie(tmp_path: Path) -> None:
    two = shared(SMALL, tmp_path, tp=1, pp=1, dp=2)
    four = shared(SMALL, tmp_path, tp=1, pp=1, dp=4)
    grown = moving(two, four)
    theta = [plan for name, plan in grown.plans.items() if "optimizer" not in name]
    kept = {unit.layout for plan in theta for unit in plan.new if unit in plan.old}
    assert kept == set(two.units), "no copy of weights on the ranks that had them"
    assert {unit.ranks for unit in grown.stages[NAME].units} == {(0,), (1,), (2,), (3,)}


def test_the_death_of_a_unit_is_refused_and_storage_is_the_remedy(tmp_path: Path) -> None:
    three, two = (shared(SMALL, tmp_path, tp=1, pp=1, dp=dp) for dp in (3, 2))
    now, then = (
        {NAME: spec, GENERATION: replace(spec, name=GENERATION, role="generation", shares=NAME, zero1=False)}
        for spec in (three, two)
    )
    with pytest.raises(NoSource, match="last checkpoint"):
        plan_transition(now, then, lost=frozenset({2}))


def test_copies_on_peers_bring_back_the_slice_of_a_lost_unit(driver: Driver, tmp_path: Path) -> None:
    write_hf_folder(Random(BF16), BF16, tmp_path / "model")
    start = shared(BF16, tmp_path / "model", tp=1, pp=1, dp=2)
    driver.build(start)
    driver.train(start, BATCHES[:2])
    before = tensors(driver.save(start, tmp_path / "before", 2), BF16)
    units = peer_places.copy_units(start, [peer_places.Place(rank=rank, node=rank) for rank in range(4)])
    move_all(driver, peer_copy.moves_away(start, units), lost=frozenset())
    driver.train(start, BATCHES[2:3])  # what follows the copy is lost with the unit

    lost = frozenset({1})
    then = replace(start, units=tuple(start.units[0].with_ranks((rank,)) for rank in (0, 3)))
    back = peer_copy.moves_back(then, units, lost)
    move_all(driver, back, lost=lost)
    after = replace(
        then, units=tuple(unit.layout for unit in back[0].plan.new), origin=FromMemory(step_count=2)
    )
    driver.build(after)
    found = tensors(driver.save(after, tmp_path / "after", 2), BF16)
    assert before.keys() == found.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in before.items())


def move_all(driver: Driver, moves: Sequence[peer_copy.Move], *, lost: frozenset[int]) -> None:
    """All moves as one committed transaction."""
    epoch, workers = next(_epochs), driver.workers
    movers = sorted({rank for move in moves for rank in move.plan.ranks} - lost)
    workers.run(do, "begin_transition", epoch, workers=movers)
    for move in moves:
        for rank in move.plan.ranks:
            order = Order(
                source=move.source, target=move.target, model=move.plan.model, plan=move.plan.rank_plan(rank)
            )
            workers.call(rank, do, "prepare_operation", order, 30.0)
        assert not any(workers.result(rank).reason for rank in move.plan.ranks)
    assert all(vote.yes for vote in workers.run(do, "vote", workers=movers).values())
    workers.run(do, "apply_decision", Decision(epoch=epoch, outcome=Outcome.COMMIT), workers=movers)
