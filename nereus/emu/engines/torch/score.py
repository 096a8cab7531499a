"""Scoring by the torch engine: forward passes over all rows in micro-batches, down the pipeline.

    stage 0 --x_nh--> stage 1 --x_nh--> ... --> last stage --broadcast [k, b, t]--> every stage

Every rank of the unit returns the whole result.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from nereus.emu.batch import Scores, TokenBatch
from nereus.emu.engines.torch.forward import Stage, scores_of, through_stage
from nereus.emu.engines.torch.scored import Limit, Read, Scored
from nereus.emu.engines.torch.token_share import TokenShare
from nereus.emu.unit_groups import UnitGroups


def score(
    stage: Stage,
    groups: UnitGroups,
    batch: TokenBatch,
    limit: Limit,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    read: Read = "response",
) -> Scores:
    """Log-probabilities, and entropy if asked, or values; on the CPU of every rank. Collective over the unit.

    With `read="last"` the one column is read at each row's last token.
    """
    share = TokenShare.of(groups)
    scored = Scored(batch, stage.weights.config.head, stage.table.device, entropy=entropy, read=read)
    pipe = Pipe(groups)
    with torch.no_grad():
        for rows_c, packed in scored.micro_batches(limit, share):
            x_nh = pipe.receive(packed.num_tokens, stage)
            x_nh = through_stage(stage, packed, x_nh)
            if stage.is_last:
                scored.put(rows_c, scores_of(stage, packed, x_nh, temperature=temperature, entropy=entropy))
            else:
                pipe.send(x_nh)
        pipe.finish()
        return scored.shared(groups)


class Pipe:
    """This rank's ends of the pipeline: receive from the stage before, send to the one after."""

    def __init__(self, groups: UnitGroups) -> None:
        self._group: ProcessGroup | None = groups.pp
        self._stage = groups.position.pp
        self._pending: list[tuple[dist.Work, Tensor]] = []  # the tensor lives until it was sent

    def receive(self, num_tokens: int, stage: Stage) -> Tensor | None:
        """Hidden states [n, h] of the stage before; None on the first stage."""
        if self._group is None or self._stage == 0:
            return None
        x_nh = torch.empty(
            num_tokens, stage.weights.config.hidden_size, dtype=stage.table.dtype, device=stage.table.device
        )
        dist.recv(x_nh, group=self._group, group_src=self._stage - 1)
        return x_nh

    def send(self, x_nh: Tensor) -> None:
        """Hand hidden states to the stage after; returns while they are on their way."""
        self._wait(keep=1)  # one micro-batch in flight overlaps with the next one's computation
        work = dist.isend(x_nh, group=self._group, group_dst=self._stage + 1)
        assert work is not None, "a member of the group always gets a handle"
        self._pending.append((work, x_nh))

    def finish(self) -> None:
        """Wait until everything was received."""
        self._wait(keep=0)

    def _wait(self, keep: int) -> None:
        while len(self._pending) > keep:
            self._pending.pop(0)[0].wait()
