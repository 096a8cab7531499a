"""Forward and backward of all micro-batches through a pipeline, by torch.distributed.pipelining.

    tokens --> stage 0 --x--> stage 1 --x--> ... --> last stage --> loss     1F1B, or GPipe when there are
               stage 0 <-dx-- stage 1 <-dx-- ... <-- last stage <--'         fewer micro-batches than stages

torch's stages exchange tensors of one shape, our micro-batches have many. Every rank knows all of them, so
only their number travels through the schedule, as an index; and what crosses a border is padded up to the
largest micro-batch, while each stage computes on the rows that count. Stage and schedule are made anew for
each step: with shapes given up front that costs two messages of four bytes, and holds no buffers between
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from nereus.emu.engines.torch.forward import Stage, through_stage
from nereus.emu.engines.torch.packing import Packed
from nereus.emu.unit_groups import UnitGroups

LossOf = Callable[[int, Tensor], Tensor]


class _Section(nn.Module):
    """What one stage does with micro-batch number `index`, in the shape that torch's schedule calls."""

    def __init__(self, stage: Stage, packed: Sequence[Packed], loss_of: LossOf) -> None:
        super().__init__()
        self._stage, self._packed, self._loss_of = stage, packed, loss_of
        self._border_rows = max(one.num_tokens for one in packed)

    def forward(self, x_nh: Tensor, index: Tensor) -> Tensor:
        """Padded hidden states of the border, or the micro-batch's loss as one number, [1]."""
        number = int(index)
        packed = self._packed[number]
        received = None if self._stage.is_first else x_nh[: packed.num_tokens]
        x_nh = through_stage(self._stage, packed, received)
        if self._stage.is_last:
            return self._loss_of(number, x_nh).reshape(1)
        return F.pad(x_nh, (0, 0, 0, self._border_rows - packed.num_tokens))


def run_pipeline(stage: Stage, groups: UnitGroups, packed: Sequence[Packed], loss_of: LossOf) -> None:
    """Accumulate the gradients of all micro-batches into the leaves.

    `loss_of(number, x_mh)` turns the last stage's hidden states into that micro-batch's share of the loss; it
    is called on the last stage only. Collective over the pipeline.
    """
    device, num = stage.table.device, len(packed)
    here, pp = groups.position.pp, groups.layout.pp
    border = torch.empty(
        max(one.num_tokens for one in packed),
        stage.weights.config.hidden_size,
        dtype=stage.table.dtype,
        device="meta",
    ).requires_grad_()
    number = torch.empty(1, dtype=torch.int64, device="meta")
    loss = torch.empty(1, dtype=torch.float32, device="meta").requires_grad_()
    part = PipelineStage(
        _Section(stage, packed, loss_of),
        stage_index=here,
        num_stages=pp,
        device=device,
        input_args=number if here == 0 else border,
        output_args=loss if here == pp - 1 else border,
        group=groups.pp,
    )
    kind = Schedule1F1B if num >= pp else ScheduleGPipe
    # Losses are shares of the global one, so gradients are not divided by the number of micro-batches.
    schedule = kind(part, num, loss_fn=lambda output, _: output.sum(), scale_grads=False)
    numbers = torch.arange(num)
    inputs = (numbers,) if here == 0 else ()
    schedule.step(*inputs, index=numbers, target=numbers, return_outputs=False)
