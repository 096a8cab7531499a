"""Reshard plans between engines that store the same tensors in different ways."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from nereus.emu.rank_plan import Mode
from nereus.emu.reshard import plan_reshard
from nereus.emu.tensor import ModelSpec
from nereus.errors import InvalidOperation
from tests.emu.exchange import check, run, stores_of
from tests.emu.test_reshard import random_plan, small_model, units_of


def stored_otherwise(model: ModelSpec, how: str) -> ModelSpec:
    """The same tensors: unfused, or with every fused rule in the other order."""
    if how == "unfused":
        return replace(model, fused=())
    other = {"blocks": "per_kv_group", "per_kv_group": "blocks"}
    # Gate and up have no kv groups; an engine keeps them in blocks.
    return replace(
        model,
        fused=tuple(
            replace(rule, order=other[rule.order]) if len(rule.parts) == 3 else rule  # type: ignore[arg-type]
            for rule in model.fused
        ),
    )


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    how=st.sampled_from(["unfused", "other order"]),
    mode=st.sampled_from(get_args(Mode)),
)
def test_i4_another_storage_holds_the_same_bits(seed: int, how: str, mode: Mode) -> None:
    same = random_plan(seed)
    new = tuple(unit for unit in same.new if unit not in same.old)
    assume(new)
    assume(mode == "shadow" or len(same.old) > 1)
    plan = plan_reshard(
        same.model,
        same.old,
        new,
        None,
        same.topology,
        source=stored_otherwise(same.model, how),
        placement="as_given",
        limits=same.limits,
    )
    outcome = run(plan, stores_of(plan), mode)
    check(plan, outcome)
    assert plan.bytes == plan.lower_bound == outcome.sent_bytes


def test_a_storage_of_its_own_tells_plans_apart() -> None:
    model = small_model()
    old, new = units_of(model, 2, 1), units_of(model, 1, 2, stage="actor.generation")
    plain = plan_reshard(model, old, new)
    other = plan_reshard(model, old, new, source=stored_otherwise(model, "other order"))
    assert plain.digest != other.digest
    assert plain.bytes == other.bytes


def test_a_kept_unit_cannot_change_its_storage() -> None:
    model = small_model()
    units = units_of(model, 2, 1, 2)
    with pytest.raises(InvalidOperation, match="keeps its storage"):
        plan_reshard(model, units, units[:1], source=stored_otherwise(model, "unfused"))


def test_two_models_are_refused() -> None:
    with pytest.raises(InvalidOperation, match="same names, shapes and cuts"):
        plan_reshard(
            small_model(),
            units_of(small_model(), 1, 1),
            units_of(small_model(), 2, 1, stage="actor.generation"),
            source=small_model(vocab_size=67),
        )
