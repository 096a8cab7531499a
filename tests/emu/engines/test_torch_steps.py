"""A training step keeps its promises whatever the cut: micro-batches, units, masks, precision, moments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.algorithms.ppo import ClippedSurrogate
from nereus.emu.batch import Scores, TrainBatch
from nereus.emu.decoder import DType
from nereus.emu.engines.torch.engine import TorchEngine
from nereus.emu.loss import PolicyLoss, ValueLoss
from nereus.emu.unit_groups import UnitGroups
from tests.emu.engines import torch_cases as cases
from tests.emu.engines.torch_cases import LLAMA, MIXTRAL, QWEN2, QWEN3, Case, Pool, TokenLoss, make_batch

BATCH = make_batch()
COUNTS = GlobalCounts.from_mask(BATCH.mask_bt)
LOSS = TokenLoss(temperature=0.8, entropy=0.01)


def gradients(pool: Pool, case: Case, micro_batches: list[list[TrainBatch]]) -> dict[str, Tensor]:
    """Logical gradients of one step; all holders, of all units, agree bit for bit."""
    results = pool.run(case, cases.train, micro_batches, LOSS, COUNTS, 1)
    assert len({result.metrics[0].loss for result in results}) == 1
    assert len({result.metrics[0].gradient_norm for result in results}) == 1
    cases.assemble(case.config, [result.weights for result in results])
    return cases.assemble(case.config, [result.grads for result in results])


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal up to the order of float32 sums: some ten roundings of the largest element."""
    for name in expected:
        scale = float(expected[name].abs().max())
        assert float((found[name] - expected[name]).abs().max()) <= 2e-6 * scale + 1e-9, name


@pytest.mark.parametrize("pp", [1, 2])
def test_any_split_into_micro_batches_gives_the_same_gradient(pool: Pool, pp: int) -> None:
    case = Case(config=QWEN2, pp=pp)
    whole = gradients(pool, case, [[BATCH]])
    for sizes in ((3, 2, 2), (1,) * 7, (6, 1)):
        assert_equal(gradients(pool, case, [cases.split(BATCH, sizes)]), whole)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_two_units_give_the_gradient_of_one(pool: Pool, tp: int, pp: int) -> None:
    case = Case(config=QWEN2, tp=tp, pp=pp)
    one = gradients(pool, case, [cases.split(BATCH, (4, 3))])
    left, right = cases.split(BATCH, (4, 3))
    parts = [cases.split(left, (2, 2)), cases.split(right, (2, 1))]
    assert_equal(gradients(pool, replace(case, units=2), parts), one)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_a_micro_batch_without_a_counted_token_contributes_nothing(pool: Pool, tp: int, pp: int) -> None:
    case = Case(config=LLAMA, tp=tp, pp=pp)
    masked = replace(make_batch(seed=5), mask_bt=torch.zeros_like(make_batch(seed=5).mask_bt))
    empty = BATCH.select([1])
    assert int(empty.batch.response_lens_b) == 0
    expected = gradients(pool, case, [[BATCH]])
    found = gradients(pool, case, [[masked, BATCH, empty]])
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_a_unit_of_padding_alone_changes_nothing(pool: Pool) -> None:
    case = Case(config=QWEN3, units=2)
    padding = BATCH.select([0, 0])
    padding = replace(padding, mask_bt=torch.zeros_like(padding.mask_bt))
    alone = gradients(pool, replace(case, units=1), [[BATCH]])
    beside = gradients(pool, case, [[BATCH], [padding]])
    for name in alone:
        assert torch.equal(beside[name], alone[name]), name


def test_scores_do_not_depend_on_micro_batches(pool: Pool) -> None:
    case = Case(config=QWEN3, pp=2, optimizer=None)
    expected = pool.run(case, cases.score, BATCH.batch, 7, 1.0)[0]
    for rows in (1, 2, 100):
        for result in pool.run(case, cases.score, BATCH.batch, rows, 1.0):
            for found, wanted in zip(result, expected, strict=True):
                assert float(abs(found - wanted).max()) < 1e-5  # sums of other shapes, in float32


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_half_precision_follows_float32(pool: Pool, tp: int, pp: int) -> None:
    exact = gradients(pool, Case(config=LLAMA), [[BATCH]])
    half = gradients(pool, Case(config=LLAMA.with_dtype("bf16"), tp=tp, pp=pp), [[BATCH]])
    for name in exact:
        scale = float(exact[name].abs().max())
        # bfloat16 keeps 8 bits; the error grows over the layers but not to a tenth of the largest element
        assert float((half[name] - exact[name]).abs().max()) < 0.1 * scale, name


def alone(case: Case) -> UnitGroups:
    return UnitGroups.alone(case.layout(0))


def test_half_precision_weights_are_the_rounded_master() -> None:
    case = Case(config=LLAMA.with_dtype("bf16"))
    engine = cases.build(case, alone(case))
    before = engine.state["master"].flat.clone()
    engine.train_step([BATCH], LOSS, COUNTS, learning_rate=1e-4)
    assert engine.state["theta"].flat.dtype == torch.bfloat16
    assert not torch.equal(engine.state["master"].flat, before)
    assert torch.equal(engine.state["theta"].flat, engine.state["master"].flat.bfloat16())


def poisoned(batch: TrainBatch) -> TrainBatch:
    """One advantage is not a number, as after a division by zero in a reward."""
    assert batch.advantages_bt is not None
    advantages_bt = batch.advantages_bt.clone()
    row, column = batch.mask_bt.nonzero()[0].tolist()
    advantages_bt[row, column] = torch.nan
    return replace(batch, advantages_bt=advantages_bt)


@pytest.mark.parametrize(("tp", "pp", "units"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_i18_a_gradient_that_is_not_finite_changes_nothing(pool: Pool, tp: int, pp: int, units: int) -> None:
    case = Case(config=QWEN2, tp=tp, pp=pp, units=units)
    results = pool.run(case, cases.train, [[poisoned(BATCH)], *[[BATCH]] * (units - 1)], LOSS, COUNTS, 1)
    assert not any(result.metrics[0].updated for result in results)
    source = cases.Random(case.config)
    for name, tensor in cases.assemble(case.config, [result.weights for result in results]).items():
        assert torch.equal(tensor, source.read("theta", name, tuple((0, n) for n in tensor.shape))), name


def test_a_step_without_an_update_counts_and_leaves_the_moments(pool: Pool) -> None:
    case = Case(config=QWEN2)
    engine = cases.build(case, alone(case))
    engine.train_step([BATCH], LOSS, COUNTS, learning_rate=1e-2)
    before = {kind: arena.flat.clone() for kind, arena in engine.state.arenas.items()}
    assert not engine.train_step([poisoned(BATCH)], LOSS, COUNTS, learning_rate=1e-2).updated
    assert engine.step_count == 2, "the rows were learnt from as far as that is possible"
    for kind, arena in engine.state.arenas.items():
        assert torch.equal(arena.flat, before[kind]), kind
    assert engine.train_step([BATCH], LOSS, COUNTS, learning_rate=1e-2).updated


@pytest.mark.parametrize("router_balance", [0.0, 0.1])
def test_a_loss_scale_changes_no_bit_where_nothing_is_lost(router_balance: float) -> None:
    config = QWEN2 if router_balance == 0 else MIXTRAL
    case = Case(config=config, router_balance=router_balance)
    plain, scaled = cases.build(case, alone(case)), cases.build(case, alone(case))
    found = [
        engine.train_step([BATCH], LOSS, COUNTS, learning_rate=1e-2, loss_scale=scale)
        for engine, scale in ((plain, 1.0), (scaled, 2.0**12))
    ]
    assert found[0].loss == found[1].loss
    assert found[0].gradient_norm == found[1].gradient_norm
    assert found[0].stats == found[1].stats
    for kind, arena in plain.state.arenas.items():
        assert torch.equal(arena.flat, scaled.state[kind].flat), kind


def test_an_overflow_under_a_scale_has_not_been_and_a_smaller_one_serves() -> None:
    case = Case(config=LLAMA.with_dtype("fp16"))
    engine = cases.build(case, alone(case))
    before = {kind: arena.flat.clone() for kind, arena in engine.state.arenas.items()}
    assert not engine.train_step([BATCH], LOSS, COUNTS, learning_rate=1e-2, loss_scale=2.0**24).updated
    assert engine.step_count == 0
    for kind, arena in engine.state.arenas.items():
        assert torch.equal(arena.flat, before[kind]), kind
    assert engine.train_step([BATCH], LOSS, COUNTS, learning_rate=1e-2, loss_scale=2.0**10).updated
    assert engine.step_count == 1


def test_small_gradients_survive_half_precision_by_the_scale_alone() -> None:
    def gradient_of(dtype: DType, loss_scale: float) -> Tensor:
        case = Case(config=LLAMA.with_dtype(dtype))
        engine = cases.build(case, alone(case))
        assert BATCH.advantages_bt is not None
        faint = replace(BATCH, advantages_bt=1e-6 * BATCH.advantages_bt)
        engine.train_step([faint], Faint(), COUNTS, learning_rate=0.0, loss_scale=loss_scale)
        assert engine.grad is not None
        return engine.grad.flat.clone()

    exact = gradient_of("fp32", 1.0)
    lost = gradient_of("fp16", 1.0)
    kept = gradient_of("fp16", 2.0**16)
    size = float(exact.norm())
    assert float((lost - exact).norm()) > 0.3 * size
    assert float((kept - exact).norm()) < 0.02 * size


class Faint(TokenLoss):
    """Nothing but advantages times log-probabilities."""

    def __call__(
        self, scores: Scores, batch: TrainBatch, counts: GlobalCounts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert scores.logprobs_bt is not None
        assert batch.advantages_bt is not None
        share = (scores.logprobs_bt * batch.advantages_bt * batch.mask_bt).sum() / counts.num_tokens
        return share, {}


def test_moments_and_step_count_continue_in_another_engine() -> None:
    case = Case(config=QWEN2)
    first, second = cases.build(case, alone(case)), cases.build(case, alone(case))
    first.train_step([BATCH], LOSS, COUNTS, learning_rate=1e-2)
    for kind, arena in first.state.arenas.items():
        second.state[kind].flat.copy_(arena.flat)
    second.step_count = first.step_count
    for engine in (first, second):
        engine.train_step([BATCH], LOSS, COUNTS, learning_rate=1e-2)
    for kind, arena in first.state.arenas.items():
        assert torch.equal(second.state[kind].flat, arena.flat), kind
    assert second.step_count == 2


def test_training_sees_the_log_probabilities_that_scoring_gave() -> None:
    case = Case(config=QWEN3)
    engine = cases.build(case, alone(case))
    old_logprobs_bt = engine.score(BATCH.batch, micro_batch_rows=3, temperature=0.8).logprobs_bt
    batch = replace(BATCH, old_logprobs_bt=old_logprobs_bt)
    surrogate = ClippedSurrogate(clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    loss = PolicyLoss(surrogate=surrogate, aggregation="token-mean", temperature=0.8)
    stats = engine.train_step([batch], loss, COUNTS, learning_rate=1e-2).stats
    assert stats["approx_kl"] == pytest.approx(0.0, abs=1e-6)  # the update starts on policy
    assert stats["clip_fraction"] == 0.0
    again = engine.train_step([batch], loss, COUNTS, learning_rate=1e-2).stats
    assert abs(again["approx_kl"]) > 1e-3


def test_a_critic_moves_towards_its_returns() -> None:
    case = Case(config=LLAMA.with_head("value"))
    engine = cases.build(case, alone(case))
    values_bt = engine.score(BATCH.batch, micro_batch_rows=3).values_bt
    assert values_bt is not None
    batch = replace(BATCH, old_values_bt=values_bt)
    loss = ValueLoss(clip=None, aggregation="token-mean")
    losses = [engine.train_step([batch], loss, COUNTS, learning_rate=1e-2).loss for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def test_an_engine_takes_over_a_prepared_state() -> None:
    case = Case(config=QWEN2)
    first = cases.build(case, alone(case))
    first.train_step([BATCH], LOSS, COUNTS, learning_rate=1e-2)
    layout = case.layout(0)
    second = TorchEngine(
        case.config, layout, alone(case), optimizer=case.optimizer, device="cpu", state=first.state
    )
    second.step_count = first.step_count
    second.train_step([BATCH], LOSS, COUNTS, learning_rate=1e-2)
    twin = cases.build(case, alone(case))
    for _ in range(2):
        twin.train_step([BATCH], LOSS, COUNTS, learning_rate=1e-2)
    assert second.state is first.state
    assert torch.equal(second.state["theta"].flat, twin.state["theta"].flat)


def test_no_rows_score_to_no_rows() -> None:
    case = Case(config=LLAMA, optimizer=None)
    scores = cases.build(case, alone(case)).score(BATCH.batch.select([]), micro_batch_rows=4)
    assert scores.logprobs_bt is not None
    assert scores.logprobs_bt.shape == (0, 1)


def test_metrics_name_the_phases_of_a_step() -> None:
    case = Case(config=LLAMA)
    metrics = cases.build(case, alone(case)).train_step([BATCH], LOSS, COUNTS, learning_rate=3e-4)
    assert set(metrics.seconds) == {"forward_backward", "reduce", "optimizer"}
    assert metrics.learning_rate == 3e-4
    assert metrics.stats["half"] == pytest.approx(0.5 * metrics.loss)


def test_a_write_into_the_arena_is_at_once_the_model() -> None:
    case = Case(config=LLAMA, optimizer=None)
    engine = cases.build(case, alone(case))
    before = engine.score(BATCH.batch, micro_batch_rows=4).logprobs_bt
    engine.state["theta"].flat.mul_(0.9)
    after = engine.score(BATCH.batch, micro_batch_rows=4).logprobs_bt
    assert before is not None
    assert after is not None
    assert not torch.allclose(before, after)
