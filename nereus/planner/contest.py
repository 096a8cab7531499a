"""Policies against one another over one trace, chosen by words such as `payback`, `every_3`, `oracle`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from nereus.config.adaptation import (
    AnyGainPolicy,
    EveryNPolicy,
    NeverPolicy,
    PaybackPolicy,
    Policy,
    Thresholds,
    VerlGatePolicy,
)
from nereus.errors import ConfigError, explain
from nereus.planner.adapt import Controller
from nereus.planner.clairvoyant import nodes_cluster, oracle_controllers, true_request
from nereus.planner.conditions import Trace
from nereus.planner.held import best
from nereus.planner.lasting import lasting_request, with_cuts
from nereus.planner.policies.configured import policy_of
from nereus.planner.policies.dp_scaling import DpScaling
from nereus.planner.replay_run import Run
from nereus.planner.request import PlanRequest
from nereus.planner.simulate import replay
from nereus.planner.transition_time import FixedCosts

BY_HAND = ("fixed", "frozen")
LASTING = ("cautious", "lasting")
UNCONFIGURED = (*BY_HAND, *LASTING, "oracle")
"""Words that stand for no policy a job can be given."""
WORDS = (
    "fixed",
    "frozen",
    "cautious",
    "lasting",
    "never",
    "any_gain",
    "every_N",
    "verl_gate",
    "payback",
    "payback=GAMMA",
    "oracle",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What all policies have in common."""

    request: PlanRequest
    trace: Trace
    costs: FixedCosts
    thresholds: Thresholds = field(default_factory=Thresholds)
    seed: int = 0

    def run(self, word: str) -> Run:
        """Replay one policy. Raises ConfigError for an unknown word."""
        if word == "oracle":
            controllers = oracle_controllers(self._controller(NeverPolicy()), self.trace)
            return replay(controllers.__getitem__, self.trace, seed=self.seed, policy=word)
        if word in BY_HAND:
            return replay(self._by_hand(word).__getitem__, self.trace, seed=self.seed, policy=word)
        if word in LASTING:
            controller = replace(self._controller(NeverPolicy()), policy=DpScaling(name=word))
            request = lasting_request(self.request, self.trace, options=word == "cautious")
            return replay(replace(controller, request=request), self.trace, seed=self.seed, policy=word)
        return replay(self._controller(parse_policy(word)), self.trace, seed=self.seed, policy=word)

    def _controller(self, policy: Policy) -> Controller:
        return Controller(
            request=self.request,
            policy=policy_of(policy),
            thresholds=self.thresholds,
            costs=self.costs,
            explains=False,
        )

    def _by_hand(self, word: str) -> tuple[Controller, ...]:
        """A controller for every step: tp and pp of all model-stages as the best plan at the start has them,
        for `frozen` micro-batches and recomputation too.

        Where no number of units of these fits any longer, somebody chooses anew by hand, as well as can be,
        and the job restarts; that is the most that can be said for a job with a fixed configuration.
        """
        controller = replace(self._controller(NeverPolicy()), policy=DpScaling(name=word))
        by_hand = replace(self.costs, in_place=False)
        fixed: PlanRequest | None = None
        out: list[Controller] = []
        for step in self.trace.steps:
            nodes = step.nodes - step.breaking or step.nodes
            cluster = nodes_cluster(self.request.cluster, max(len(nodes), 1))
            asked = replace(true_request(self.request, step), cluster=cluster)
            is_new = False
            if fixed is None or self._none_fits(replace(asked, fixed=fixed.fixed, placement=fixed.placement)):
                plan = best(asked, self.request.cluster)
                if plan is not None:
                    fixed = with_cuts(self.request, plan, options=word == "frozen")
                    is_new = bool(out)
            costs = by_hand if is_new else self.costs
            out.append(replace(controller, request=fixed or self.request, costs=costs))
        return tuple(out)

    def _none_fits(self, request: PlanRequest) -> bool:
        return best(request, self.request.cluster) is None


def parse_policy(word: str) -> Policy:
    """Read a policy's word. Raises ConfigError that lists them."""
    if every := re.fullmatch(r"every_(\d+)", word):
        return EveryNPolicy(steps=int(every[1]))
    if gamma := re.fullmatch(r"payback=(0?\.\d+|1(?:\.0*)?)", word):
        return PaybackPolicy(gamma=float(gamma[1]))
    simple: dict[str, Policy] = {
        "payback": PaybackPolicy(),
        "any_gain": AnyGainPolicy(),
        "verl_gate": VerlGatePolicy(),
        "never": NeverPolicy(),
    }
    if word not in simple:
        raise ConfigError(explain(f"unknown policy {word!r}", rule=f"policies are {', '.join(WORDS)}"))
    return simple[word]
