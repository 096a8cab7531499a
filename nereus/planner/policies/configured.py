"""The admission policy that a configuration names."""

from __future__ import annotations

from typing import assert_never

from nereus.config.adaptation import (
    AnyGainPolicy,
    EveryNPolicy,
    NeverPolicy,
    PaybackPolicy,
    Policy,
    VerlGatePolicy,
)
from nereus.planner.admission import AdmissionPolicy
from nereus.planner.policies.any_gain import AnyGain
from nereus.planner.policies.every_n import EveryN
from nereus.planner.policies.never import Never
from nereus.planner.policies.payback import Payback
from nereus.planner.policies.verl_gate import VerlGate


def policy_of(config: Policy) -> AdmissionPolicy:
    """The policy with the configuration's settings."""
    match config:
        case PaybackPolicy(gamma=gamma, smoothing=smoothing, min_crossings=min_crossings):
            return Payback(gamma=gamma, smoothing=smoothing, min_crossings=min_crossings)
        case EveryNPolicy(steps=steps):
            return EveryN(steps=steps)
        case AnyGainPolicy():
            return AnyGain()
        case VerlGatePolicy(window=window):
            return VerlGate(window=window)
        case NeverPolicy():
            return Never()
        case _:
            assert_never(config)
