"""Megatron's collection of process groups from those of a unit; nothing is read from its global state."""

from __future__ import annotations

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from nereus.emu.unit_groups import UnitGroups


class Alone:
    """A group of this rank alone: Megatron asks it for size and rank, and then communicates nothing."""

    def size(self) -> int:
        """One rank."""
        return 1

    def rank(self) -> int:
        """It is the first."""
        return 0


def _or_alone(group: ProcessGroup | None) -> Any:
    return Alone() if group is None else group


def collection(groups: UnitGroups) -> ProcessGroupCollection:
    """The groups of a unit as Megatron names them.

    Megatron sees one replica: sums over data parallelism and over the two ends of a tied embedding are the
    engine's own, so `dp` is alone and `embd` absent.
    """
    return ProcessGroupCollection(
        tp=_or_alone(groups.tp),
        pp=_or_alone(groups.pp),
        cp=Alone(),
        dp=Alone(),
        dp_cp=Alone(),
        ep=Alone(),
        expt_tp=Alone(),
        expt_dp=Alone(),
        embd=None,
        pos_embd=None,
    )
