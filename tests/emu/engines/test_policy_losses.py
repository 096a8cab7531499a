"""Every loss in the real engine: its gradient does not depend on micro-batches, units or tp."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.algorithms.cispo import ClippedWeightSurrogate
from nereus.algorithms.correction import Correction, Rejection
from nereus.algorithms.gspo import SequenceSurrogate
from nereus.algorithms.ppo import ClippedSurrogate
from nereus.emu.batch import TrainBatch
from nereus.emu.loss import PolicyLoss
from nereus.emu.unit_groups import UnitGroups
from tests.emu.engines import torch_cases as cases
from tests.emu.engines.torch_cases import QWEN2, Case, Pool, make_batch

LOSSES = {
    "clip, token-mean, entropy, k3-unbiased, TIS": PolicyLoss(
        surrogate=ClippedSurrogate(clip_low=0.2, clip_high=0.28, dual_clip=3.0),
        aggregation="token-mean",
        entropy=0.01,
        kl=0.1,
        kl_kind="k3-unbiased",
        correction=Correction(high=1.05),
    ),
    "gspo, sequence weights, rejection": PolicyLoss(
        surrogate=SequenceSurrogate(clip_low=0.3, clip_high=0.4),
        aggregation="seq-mean-token-mean",
        correction=Correction(
            weight="sequence", high=1.5, rejection=Rejection(level="sequence-mean", low=0.9, high=1.1)
        ),
    ),
    "cispo, constant length, k2": PolicyLoss(
        surrogate=ClippedWeightSurrogate(clip_low=1.0, clip_high=0.2),
        aggregation="seq-mean-token-sum-norm",
        kl=0.1,
        kl_kind="k2",
        correction=Correction(low=0.9, high=1.1, beyond="drop", negative_limit=0.05),
    ),
}


def off_policy_batch() -> TrainBatch:
    """Old, behaviour and reference log-probabilities near the model's own, so that bounds bite for some."""
    batch = make_batch()
    case = Case(config=QWEN2, optimizer=None)
    own_bt = (
        cases.build(case, UnitGroups.alone(case.layout(0))).score(batch.batch, micro_batch_rows=7).logprobs_bt
    )
    assert own_bt is not None
    draw = torch.Generator().manual_seed(3)

    def near(scale: float) -> Tensor:
        return own_bt + scale * torch.randn(own_bt.shape, generator=draw)

    return replace(
        batch, old_logprobs_bt=near(0.2), behaviour_logprobs_bt=near(0.2), reference_logprobs_bt=near(0.5)
    )


BATCH = off_policy_batch()
COUNTS = GlobalCounts.from_mask(BATCH.mask_bt, max_tokens=16)


def trained(
    pool: Pool, case: Case, micro_batches: list[list[TrainBatch]], loss: PolicyLoss
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Logical gradients of one step, and its statistics with the loss."""
    results = pool.run(case, cases.train, micro_batches, loss, COUNTS, 1)
    metrics = results[0].metrics[0]
    grads = cases.assemble(case.config, [result.grads for result in results])
    return grads, metrics.stats | {"loss": metrics.loss}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradient_and_statistics_are_those_of_the_whole_batch(pool: Pool, name: str) -> None:
    loss = LOSSES[name]
    one = Case(config=QWEN2)
    whole, stats = trained(pool, one, [[BATCH]], loss)
    if loss.correction is not None:
        assert 0 < stats["correction_weight"] != pytest.approx(1.0, abs=1e-3)
    left, right = cases.split(BATCH, (4, 3))
    for case, parts in (
        (one, [cases.split(BATCH, (3, 1, 3))]),
        (replace(one, tp=2), [cases.split(BATCH, (4, 3))]),
        (replace(one, units=2), [cases.split(left, (2, 2)), cases.split(right, (2, 1))]),
    ):
        found, found_stats = trained(pool, case, parts, loss)
        for tensor, expected in whole.items():
            # Equal up to the order of float32 sums: some ten roundings of the largest element.
            scale = float(expected.abs().max())
            assert float((found[tensor] - expected).abs().max()) <= 4e-6 * scale + 1e-9, tensor
        assert found_stats == pytest.approx(stats, abs=1e-5)
