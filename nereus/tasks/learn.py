"""Stage learn: the critic and the actor take their optimizer steps over the step's rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE

from nereus.algorithms.aggregation import GlobalCounts
from nereus.algorithms.loss_scale import LossScale
from nereus.emu.batch import TrainBatch, TrainMetrics
from nereus.emu.cluster import Call
from nereus.emu.layout import Rank
from nereus.emu.loss import Loss
from nereus.tasks.batch_limit import micro_batch_limit
from nereus.tasks.counters import step_counts
from nereus.tasks.job import Job
from nereus.tasks.micro_batches import cut_batch, deal_rows


@task(name="learn", task_run_name="learn {stage}", cache_policy=NO_CACHE)
def learn(job: Job, stage: str, batch: TrainBatch, loss: Loss, learning_rate: float) -> TrainMetrics:
    """Take `batch.epochs x batch.mini_batches` optimizer steps; returns their mean metrics.

    Mini-batches are cut in the rows' order, shuffled by the campaign's seed when there is more than one.
    Optimizer steps that an earlier try of this stage had applied before a worker died are not applied again;
    the metrics are then those of the others.
    """
    parts = [
        rows
        for epoch in range(job.config.batch.epochs)
        for rows in mini_batches(job, batch.batch.num_rows, epoch)
    ]
    with job.stage(f"learn {stage}"):
        applied = 0
        if job.again:
            applied = max(step_counts(job, job.stages[stage]).values()) - job.adam_steps[stage]
        metrics = [
            _optimizer_step(job, stage, batch.select(rows), loss, learning_rate) for rows in parts[applied:]
        ]
    job.adam_steps[stage] += len(parts)
    if left_out := sum(not one.updated for one in metrics):
        job.listener.on_message(
            f"step {job.state.step}: {left_out} of {len(parts)} updates of {stage} left out: "
            "their gradient is not finite"
        )
    return mean_metrics(metrics) if metrics else _unknown(learning_rate)


def _unknown(learning_rate: float) -> TrainMetrics:
    """The metrics of steps that were applied by workers whose reports were lost."""
    nan = float("nan")
    return TrainMetrics(loss=nan, gradient_norm=nan, learning_rate=learning_rate, stats={}, seconds={})


def mini_batches(job: Job, num_rows: int, epoch: int) -> tuple[torch.Tensor, ...]:
    """Row indices of every mini-batch of one pass."""
    num = min(job.config.batch.mini_batches, num_rows)  # DAPO may leave fewer groups than it wanted
    order = torch.arange(num_rows)
    if num > 1:
        seed = (job.config.seed * 1_000_003 + job.state.step) * 1_000_003 + epoch
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed % 2**63))
    return tuple(torch.tensor_split(order, num))


def _optimizer_step(
    job: Job, stage: str, batch: TrainBatch, loss: Loss, learning_rate: float
) -> TrainMetrics:
    spec = job.stages[stage]
    counts = GlobalCounts.from_mask(batch.mask_bt, max_tokens=job.config.sampling.max_new_tokens)
    lengths = (batch.batch.prompt_lens_b + batch.batch.response_lens_b).tolist()
    limit = micro_batch_limit(job.config, spec, spec.train_rows)
    shares = deal_rows(lengths, num_units=len(spec.units), limit=limit)
    sent: dict[Rank, object] = {}
    for unit, micros in zip(spec.units, shares, strict=True):
        parts = [cut_batch(batch, micro) for micro in micros]
        sent |= dict.fromkeys(unit.ranks, parts if len(unit.ranks) == 1 else job.cluster.share(parts))

    def take(loss_scale: float) -> TrainMetrics:
        calls = {
            rank: Call("train_step", (stage, micro, loss, counts, learning_rate, loss_scale))
            for rank, micro in sent.items()
        }
        metrics: TrainMetrics = job.cluster.run(calls, what=f"learn {stage}")[spec.ranks[0]]
        return metrics

    return _scaled(job, stage, take) if spec.model.dtype == "fp16" else take(1.0)


def _scaled(job: Job, stage: str, take: Callable[[float], TrainMetrics]) -> TrainMetrics:
    """Take a step with the loss scale of a model-stage; again with half of it while the gradient overflows,
    so that no rows are lost.
    """
    scale = job.state.loss_scales.get(stage, LossScale())
    while not (metrics := take(scale.value)).updated and scale.can_shrink:
        scale = scale.overflowed()
    used = metrics.stats | {"loss_scale": scale.value}
    job.state = replace(job.state, loss_scales={**job.state.loss_scales, stage: scale.stepped()})
    return replace(metrics, stats=used)


def mean_metrics(metrics: Sequence[TrainMetrics]) -> TrainMetrics:
    """Means over the optimizer steps of one campaign step, of those that updated the weights if there are
    any; seconds are summed.
    """
    seconds: Counter[str] = Counter()
    for one in metrics:
        seconds.update(one.seconds)
    metrics = [one for one in metrics if one.updated] or metrics
    num = len(metrics)
    return TrainMetrics(
        loss=sum(m.loss for m in metrics) / num,
        gradient_norm=sum(m.gradient_norm for m in metrics) / num,
        learning_rate=metrics[-1].learning_rate,
        stats={name: sum(m.stats[name] for m in metrics) / num for name in metrics[0].stats},
        seconds=dict(seconds),
    )
