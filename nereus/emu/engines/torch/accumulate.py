"""Forward and backward of all micro-batches of a step, and the sums that the loss reports.

Gradients add up in the arena behind the leaves; losses are shares of the global one, so nothing is divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.batch import TrainBatch
from nereus.emu.engines.torch.forward import Stage, scores_of, through_stage
from nereus.emu.engines.torch.packing import Packed, pack
from nereus.emu.engines.torch.token_share import TokenShare
from nereus.emu.loss import Loss, scale_of
from nereus.emu.unit_groups import UnitGroups


def accumulate(
    stage: Stage,
    groups: UnitGroups,
    micro_batches: Sequence[TrainBatch],
    loss: Loss,
    counts: GlobalCounts,
) -> dict[str, Tensor]:
    """Add the gradients of all micro-batches; returns this unit's sums by name, `loss` among them.

    Collective over the unit. The sums are those of this rank's rows, known to the last stage only; elsewhere
    the mapping is empty.
    """
    device = stage.table.device
    tokens = TokenShare.of(groups)
    trimmed = [tokens.train(batch) for batch in micro_batches]
    packed = [pack(batch.batch, share=tokens).to(device) for batch in trimmed]
    if stage.balance:
        packed = balanced(packed, stage.balance * scale_of(loss), groups)
    sums: dict[str, Tensor] = {}

    def loss_of(number: int, x_mh: Tensor) -> Tensor:
        scores = scores_of(
            stage, packed[number], x_mh, temperature=loss.temperature, entropy=loss.needs_entropy
        )
        share, parts = loss(tokens.whole(scores), on_device(device, trimmed[number]), counts)
        add_sums(sums, {"loss": share} | parts)
        return share

    if groups.pp is not None:
        # torch's pipelining loads torch's compiler, half of a worker's start; one stage needs neither.
        from nereus.emu.engines.torch.pipeline import run_pipeline

        run_pipeline(stage, groups, packed, loss_of)
        return sums
    for number, one in enumerate(packed):
        torch.autograd.backward(loss_of(number, through_stage(stage, one, None)))
    return sums


def balanced(packed: Sequence[Packed], coefficient: float, groups: UnitGroups) -> list[Packed]:
    """The micro-batches with the weight of the loss that evens the load of experts: over a rank's tokens, and
    over all ranks that have tokens of their own. Ranks along tp share a token's router, whose gradient is
    summed over them.
    """
    layout = groups.layout
    tokens = sum(one.num_tokens for one in packed)
    each = coefficient / (tokens * layout.ep * layout.cp * layout.tp * groups.dp_size)
    return [replace(one, balance=each * one.num_tokens) for one in packed]


def add_sums(sums: dict[str, Tensor], parts: Mapping[str, Tensor]) -> None:
    """Add what one micro-batch's loss reports to the unit's sums, in float64."""
    for name, value in parts.items():
        sums[name] = sums.get(name, 0.0) + value.detach().double()


def total_sums(sums: dict[str, Tensor], groups: UnitGroups, device: torch.device) -> dict[str, float]:
    """The sums over all units, on every rank: over ep and dp on the last stage, then to the stages before it.

    Ranks along cp know the sums of whole rows.
    """
    for group in (groups.ep, groups.dp):
        if group is not None and sums:
            total = torch.stack(list(sums.values()))
            dist.all_reduce(total, group=group)
            sums = dict(zip(sums, total, strict=True))
    known = {name: float(value) for name, value in sums.items()}
    if groups.pp is None:
        return known
    carried = [known]
    dist.broadcast_object_list(carried, group=groups.pp, group_src=groups.layout.pp - 1, device=device)
    return carried[0]


def on_device(device: torch.device, batch: TrainBatch) -> TrainBatch:
    """The batch with the tensors that losses read on the device; its tokens stay where they are."""
    moved: dict[str, Any] = {
        f.name: value.to(device) for f in fields(batch) if isinstance(value := getattr(batch, f.name), Tensor)
    }
    return replace(batch, **moved)
