"""How samples are weighted that another policy than the trained one has drawn."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from nereus.config.frozen import Frozen


class RejectionConfig(Frozen):
    """Drop tokens or whole responses on which the drawing and the trained policy differ too much."""

    measure: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the difference. k1 is bounded on both sides, by ratios; k2 and k3 from above, in nats."""
    level: Literal["token", "sequence-sum", "sequence-mean", "sequence-max"] = "sequence-mean"
    """Of what: each token, or a response's sum, mean or maximum."""
    low: float | None = Field(default=None, gt=0)
    """Lower bound, with k1 only; null has none."""
    high: float = Field(default=2.0, gt=0)
    """Upper bound."""

    @model_validator(mode="after")
    def _bounds_fit(self) -> RejectionConfig:
        if self.low is not None and self.measure != "k1":
            raise ValueError(
                f"low = {self.low} with measure {self.measure}, which is never negative; leave low out"
            )
        if self.low is not None and self.low > self.high:
            raise ValueError(f"low = {self.low} exceeds high = {self.high}, so everything would be dropped")
        if self.level == "sequence-max" and self.measure == "k1":
            raise ValueError("level sequence-max needs a measure without sign; use measure k2 or k3")
        return self


class CorrectionConfig(Frozen):
    """Weights for samples that another policy has drawn: w = exp(trained - drawing log-probability)."""

    weight: Literal["token", "sequence", "none"] = "token"
    """Weigh each token by its own ratio, or by its response's product of them, or not at all."""
    high: float | None = Field(default=2.0, gt=0)
    """Largest weight; null has no bound (decoupled PPO)."""
    low: float | None = Field(default=None, gt=0)
    """Smallest weight; null has no bound."""
    beyond: Literal["cap", "drop"] = "cap"
    """A weight out of bounds is set to the bound (TIS) or to zero (IcePop)."""
    rejection: RejectionConfig | None = None
    """Drop what differs too much, besides; null drops nothing."""
    negative_limit: float | None = Field(default=None, gt=0)
    """Drop tokens of negative advantage in responses that the policy has left by more than so many nats a
    token (DeepSeek-V3.2); null drops none."""

    @model_validator(mode="after")
    def _does_something(self) -> CorrectionConfig:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low = {self.low} exceeds high = {self.high}; a weight cannot satisfy both")
        if self.beyond == "drop" and self.low is None and self.high is None:
            raise ValueError("beyond: drop needs a bound; give low, high or both")
        if self.weight == "none" and self.rejection is None and self.negative_limit is None:
            raise ValueError(
                "weight: none without rejection and negative_limit corrects nothing; leave correction out"
            )
        return self
