"""Micro-batches through Megatron's own schedules: one stage after the other, or 1F1B over the pipeline.

    rows --> GPTModel --> hidden states --(last stage)--> `finish` --> share of the loss --> backward

Shapes differ from micro-batch to micro-batch, so the stages tell each other theirs (`variable_seq_lengths`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from nereus.emu.engines.padded_rows import Rows

Finish = Callable[[int, Tensor], Tensor]


class Schedule:
    """How one stage takes its micro-batches; made once an engine."""

    def __init__(self, model: GPTModel, groups: ProcessGroupCollection, *, masks: bool) -> None:
        self._model, self._groups, self._masks = model, groups, masks
        piped = groups.pp.size() > 1
        self._p2p = P2PCommunicator(groups.pp, model.config) if piped else None
        self._mask_11ss: Tensor | None = None

    def run(self, micro_batches: Sequence[Rows], finish: Finish, *, forward_only: bool) -> None:
        """All micro-batches, and unless `forward_only` their gradients too. Collective over the unit.

        `finish(number, hidden)` is called on the last stage with normed hidden states [b * s, h]; what it
        returns is differentiated.
        """
        step: dict[str, Any] = {
            "forward_step_func": self._forward_step(finish),
            "data_iterator": iter(enumerate(micro_batches)),
            "model": self._model,
            "num_microbatches": len(micro_batches),
            "seq_length": 1,  # unused: stages exchange the shapes
            "micro_batch_size": 1,
            "forward_only": forward_only,
            "pg_collection": self._groups,
        }
        if self._p2p is None:
            forward_backward_no_pipelining(**step)
        else:
            forward_backward_pipelining_without_interleaving(**step, p2p_communicator=self._p2p)

    def _forward_step(self, finish: Finish) -> Callable[[Iterator[tuple[int, Rows]], GPTModel], Any]:
        def step(batches: Iterator[tuple[int, Rows]], model: GPTModel) -> tuple[Tensor, Any]:
            number, rows = next(batches)
            out = model(rows.tokens_bs, rows.positions_bs, self._mask(rows.tokens_bs))

            def loss(hidden_bsh: Tensor) -> tuple[Tensor, Tensor, None]:
                share = finish(number, hidden_bsh.flatten(end_dim=1))
                return share, torch.zeros((), dtype=torch.int, device=share.device), None

            return out, loss

        return step

    def _mask(self, tokens_bs: Tensor) -> Tensor | None:
        """Which keys a query may not see. Megatron would keep one such mask for every width it meets."""
        if not self._masks:
            return None
        width = tokens_bs.shape[1]
        if self._mask_11ss is None or self._mask_11ss.shape[-1] < width:
            ones = torch.ones(1, 1, width, width, dtype=torch.bool, device=tokens_bs.device)
            self._mask_11ss = ones.triu_(diagonal=1)
        return self._mask_11ss[:, :, :width, :width]
