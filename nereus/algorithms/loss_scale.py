"""The dynamic loss scale of half-precision training with a narrow exponent (Micikevicius et al. 2018, 3.2).

float16 holds nothing below 6e-8, and gradients are often smaller: the loss is multiplied before the backward
pass, the gradients divided after it. A scale that is too large shows as a gradient that is not finite. It is
then halved; after many steps without that it is doubled, since gradients become smaller in the course.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 2.0**16  # torch's GradScaler and DeepSpeed begin there
LARGEST = 2.0**24
GROWTH_STEPS = 400  # verl's; torch waits 2,000, more than many runs have


@dataclass(frozen=True, slots=True)
class LossScale:
    """A power of two, so that scaling changes no digit, and the optimizer steps that it has served."""

    value: float = FIRST
    num_steps: int = 0

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow may be the scale's fault."""
        return self.value > 1

    def overflowed(self) -> LossScale:
        """The scale to try the same step with."""
        return LossScale(max(1.0, self.value / 2))

    def stepped(self) -> LossScale:
        """The scale of the next step, after one that went well."""
        if self.num_steps + 1 < GROWTH_STEPS:
            return LossScale(self.value, self.num_steps + 1)
        return LossScale(min(LARGEST, 2 * self.value))
