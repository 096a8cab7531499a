"""Small planning requests that several tests share."""

from __future__ import annotations

from dataclasses import replace

from nereus.planner.fixed import parse_fixes
from nereus.planner.layouts import Space
from nereus.planner.lengths import LengthDistribution
from nereus.planner.models import model_shape
from nereus.planner.profile import ClusterProfile
from nereus.planner.request import Placement, PlanRequest
from nereus.planner.workload import Algorithm, ModelShapes, Schedule, Workload


def request(
    cluster: str = "2x8xH100",
    model: str = "llama-3.1-8b",
    *,
    algorithm: Algorithm = Algorithm.PPO,
    batch: int = 128,
    longest: float = 2048,
    fixed: str = "",
    space: Space = Space.POW2,
    schedule: Schedule = Schedule.SYNC,
    placement: Placement | None = None,
    critic: str | None = None,
) -> PlanRequest:
    """PPO of an 8B on 16 H100 unless told otherwise."""
    models = ModelShapes.same(model_shape(model), algorithm)
    if critic is not None:
        models = replace(models, critic=model_shape(critic).with_head("value"))
    return PlanRequest(
        workload=Workload(
            algorithm=algorithm,
            models=models,
            num_prompts=batch,
            prompt_tokens=512,
            response=LengthDistribution.from_mean_p95_max(longest / 4, longest / 2, longest),
            schedule=schedule,
        ),
        cluster=ClusterProfile.parse(cluster),
        space=space,
        placement=placement,
        fixed=parse_fixes(fixed),
    )
