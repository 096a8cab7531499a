"""What a node that leaves in the middle of a step does to it. Pure.

    generation      ┊ inference ┊ training    a step, its stages one after the other
          ▲ told                   ▲ gone     the node is left after inference: nothing is lost
                     ▲ told ▲ gone            no stage ends in between: what inference had done is lost

Stages that had completed are not run again (`nereus.flows.recovery`), so a sudden loss costs what the stage
under way had done, not the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Surprise:
    """A node that leaves during a step, and of which the boundary before it knew nothing.

    `told` and `gone` are when it is announced and when it leaves, in shares of the step; without a notice
    they are equal.
    """

    node: int
    told: float
    gone: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """Where a step stops because of a node: after `num_done` stages, at the share `at` of its time.

    `lost` is the share of the step that had been done since and is done again.
    """

    num_done: int
    at: float
    lost: float


def interruption(
    stages: Sequence[float], surprise: Surprise, *, num_done: int, clock: float, margin: float
) -> Interruption:
    """Where a step stops whose stages take these shares of it, of which `num_done` were done at `clock`.

    The job leaves the node at the last boundary between two stages that comes after the notice and at least
    `margin` before the node goes. Where there is none it stops when the node is gone.
    """
    ends = list(accumulate(stages))
    for number in reversed(range(num_done + 1, len(stages))):
        if surprise.told <= ends[number - 1] <= surprise.gone - margin:
            return Interruption(num_done=number, at=ends[number - 1], lost=0.0)
    number = next((n for n in range(num_done, len(stages) - 1) if surprise.gone < ends[n]), len(stages) - 1)
    began = max(clock, ends[number - 1] if number else 0.0)
    return Interruption(num_done=number, at=surprise.gone, lost=max(0.0, surprise.gone - began))
