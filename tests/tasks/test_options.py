"""A plan's options in a running job: which rows run at once, and what a model-stage is told."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nereus.config.adaptation import NeverPolicy, Thresholds
from nereus.emu.cluster import PooledGpu
from nereus.emu.decoder import decoder_spec
from nereus.emu.layout import Layout
from nereus.emu.stage import FromStage, Role, StageSpec
from nereus.errors import ConfigError
from nereus.planner.adapt import Controller, first
from nereus.planner.lengths import LengthDistribution
from nereus.planner.models import model_shape
from nereus.planner.policies.configured import policy_of
from nereus.planner.profile import ClusterProfile
from nereus.planner.request import PlanRequest, StageOptions
from nereus.planner.signals import Gpu, Signals
from nereus.planner.stage_gains import StageGains
from nereus.planner.transition_time import FixedCosts
from nereus.planner.workload import Algorithm, ModelShapes, Recompute, Workload
from nereus.tasks import fixed_options
from nereus.tasks.adapt import Adapter, with_options
from nereus.tasks.dealing import rounds
from nereus.tasks.fixed_options import less_at_once

SHAPE = model_shape("llama-3.1-8b")


@given(
    num_rows=st.integers(1, 40), num_units=st.integers(1, 5), resident=st.one_of(st.none(), st.integers(1, 9))
)
def test_rounds_hold_every_row_once_and_no_unit_more_than_it_may(
    num_rows: int, num_units: int, resident: int | None
) -> None:
    parts = rounds(torch.arange(num_rows), num_units, resident)
    assert torch.cat(parts).tolist() == list(range(num_rows))
    if resident is None:
        assert len(parts) == 1
    else:
        assert all(-(-len(part) // num_units) <= resident for part in parts)


def _adapter(longest: int) -> Adapter:
    """GRPO of an 8B on eight GPUs, four rows at a time without recomputation as long as that fits."""
    algorithm = Algorithm.GRPO
    controller = Controller(
        request=PlanRequest(
            workload=Workload(
                algorithm=algorithm,
                models=ModelShapes.same(SHAPE, algorithm, reward=False),
                num_prompts=64,
                prompt_tokens=512,
                response=_lengths(longest),
            ),
            cluster=ClusterProfile.parse("1x8xH100"),
            options=StageOptions(
                train_micro_batches=(4,),
                score_micro_batches=(4,),
                recomputes=(Recompute.NONE,),
                max_residents=(None,),
            ),
        ),
        policy=policy_of(NeverPolicy()),
        thresholds=Thresholds(),
        costs=FixedCosts(transition_s=1.0, restart_s=300.0),
    )
    pool = tuple(Gpu(id=rank, node=0) for rank in range(8))
    start = Signals(step=0, now_s=0.0, response=_lengths(longest), pool=pool)
    seated, history = first(controller, start)
    return Adapter(controller=controller, seated=seated, history=history, gains=StageGains(), last=start)


def _lengths(longest: int) -> LengthDistribution:
    return LengthDistribution.from_mean_p95_max(longest / 4, longest / 2, longest)


def _training(adapter: Adapter) -> StageSpec:
    """The actor's training as workers are told of it, units left out."""
    names: dict[str, Role] = {
        "actor.training": "training",
        "actor.generation": "generation",
        "reference.inference": "inference",
    }
    plain = {
        name: StageSpec(name=name, role=role, model=SHAPE, units=(), origin=FromStage(stage="actor.training"))
        for name, role in names.items()
    }
    return with_options(plain, adapter.seated)["actor.training"]


def test_a_plan_without_room_takes_a_smaller_micro_batch_and_then_recomputation() -> None:
    short, long = _adapter(2048), _adapter(8192)
    assert (_training(short).train_rows, _training(short).recompute) == (4, False)
    assert (_training(long).train_rows, _training(long).recompute) == (1, False)
    long.without(tuple(PooledGpu(rank=rank, node=0) for rank in range(4)), step=1)  # four GPUs were lost
    assert (_training(long).train_rows, _training(long).recompute) == (1, True)


def _given(tp: int) -> dict[str, StageSpec]:
    """Layouts that a user gave: every model on the same GPUs, as one unit."""
    roles: dict[str, Role] = {
        "actor.training": "training",
        "actor.generation": "generation",
        "reference.inference": "inference",
    }
    unit = Layout.make(decoder_spec(SHAPE), tp=tp, pp=1, ranks=range(tp))
    return {
        name: StageSpec(
            name=name, role=role, model=SHAPE, units=(unit,), origin=FromStage(stage="actor.training")
        )
        for name, role in roles.items()
    }


def test_given_layouts_take_less_at_once_where_they_no_longer_fit() -> None:
    request = _adapter(8192).controller.request
    short = _adapter(1024).controller.request
    wide, narrow = _given(8), _given(4)
    assert less_at_once(short, wide) is wide
    lean = less_at_once(request, narrow)
    assert lean is not None
    assert lean["actor.training"].train_rows == 1
    assert lean["actor.training"].units == narrow["actor.training"].units
    assert less_at_once(request, _given(1)) is None


def test_layouts_that_the_planner_would_not_make_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs on a node and a unit of two: an emergency must not end such a job."""
    request = _adapter(1024).controller.request
    pool = replace(request.cluster.pools[0], gpus_per_node=3, num_nodes=1)
    odd = replace(request, cluster=replace(request.cluster, pools=(pool,)))
    stages = _given(2)
    with pytest.raises(ConfigError):
        less_at_once(odd, stages)
    monkeypatch.setattr(fixed_options, "request_of", lambda *_: odd)
    job: Any = SimpleNamespace(
        config=None, prepared=SimpleNamespace(models={}, prompts=SimpleNamespace(longest=1))
    )
    assert fixed_options.fitted(job, stages) is stages
