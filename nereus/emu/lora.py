"""Low-rank adapters (LoRA, Hu et al. 2021) as logical tensors of their own beside the frozen ones. Pure.

A target W [o, i] gets A [r, i] and B [o, r], and counts as W + alpha / r * B A (their eq. 3). Both factors
are cut so that a rank that holds a part of W holds what that part needs of them:

    W cut by rows (q, k, v, gate, up)    A replicated         B cut by rows, as W is
    W cut by columns (o, down)           A cut by columns     B replicated

so each rank computes, and merges, its own part without a message; a replicated factor's gradient is a sum
over the tensor-parallel group. Adapters come after all other tensors, so that in every arena they are one
run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from nereus.emu.tensor import Cut, Even, Fused, KvHeads, ModelSpec, Replicated, TensorSpec

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VALUE_HEAD = "score.weight"
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Adapters of `rank` on every linear layer named in `targets`; their product counts `alpha / rank`."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return self.alpha / self.rank


def down_of(weight: str) -> str:
    """The name of A for the weight of that name."""
    return weight.removesuffix(".weight") + _DOWN


def up_of(weight: str) -> str:
    """The name of B for the weight of that name."""
    return weight.removesuffix(".weight") + _UP


def is_adapter(name: str) -> bool:
    """Whether a tensor, logical or stored, holds a factor of an adapter."""
    return name.endswith((_DOWN, _UP))


def is_trained(name: str) -> bool:
    """Whether a tensor, logical or stored, of a model with adapters is one of these, or its value head."""
    return is_adapter(name) or name == VALUE_HEAD


def is_target(spec: TensorSpec, lora: Lora) -> bool:
    """Whether a tensor is the weight of an adapted linear layer. Experts of a mixture are not adapted."""
    parts = spec.name.split(".")
    return parts[-1] == "weight" and len(parts) > 1 and parts[-2] in lora.targets and "experts" not in parts


def adapter_tensors(
    tensors: Sequence[TensorSpec], fused: Sequence[Fused], lora: Lora
) -> tuple[tuple[TensorSpec, ...], tuple[Fused, ...]]:
    """The factors for the targets among `tensors`, and how they are stored.

    Where targets are stored as one, so are their A's, one below the other: one product serves them all.
    """
    specs = [factor for spec in tensors if is_target(spec, lora) for factor in _factors(spec, lora.rank)]
    names = {spec.name for spec in specs}
    rules = [
        Fused(name=down_of(rule.name), parts=parts)
        for rule in fused
        if rule.name.endswith(".weight")
        and len(parts := tuple(down_of(part) for part in rule.parts if down_of(part) in names)) > 1
    ]
    return tuple(specs), tuple(rules)


def _factors(spec: TensorSpec, rank: int) -> Iterator[TensorSpec]:
    (num_out, num_in), dim = spec.shape, _cut_dim(spec.cut)
    down: Cut = spec.cut if dim == 1 else Replicated()
    up: Cut = spec.cut if dim == 0 else Replicated()
    yield TensorSpec(name=down_of(spec.name), shape=(rank, num_in), cut=down, place=spec.place)
    yield TensorSpec(name=up_of(spec.name), shape=(num_out, rank), cut=up, place=spec.place)


def _cut_dim(cut: Cut) -> int | None:
    """The dim of a weight that tensor parallelism cuts."""
    assert isinstance(cut, Even | KvHeads | Replicated), f"no rule for an adapter of a weight cut by {cut}"
    return None if isinstance(cut, Replicated) else cut.dim


def has_adapters(model: ModelSpec) -> bool:
    """Whether some tensor is a factor of an adapter."""
    return bool(model.tensors) and is_adapter(model.tensors[-1].name)


@lru_cache(maxsize=256)
def trained_part(model: ModelSpec) -> ModelSpec:
    """What is trained: of a model with adapters these and its value head, else the whole model."""
    return _part(model, frozen=False) if has_adapters(model) else model


@lru_cache(maxsize=256)
def frozen_part(model: ModelSpec) -> ModelSpec:
    """What stays as it is: nothing of a model without adapters."""
    return _part(model, frozen=True) if has_adapters(model) else _with(model, (), ())


def _part(model: ModelSpec, *, frozen: bool) -> ModelSpec:
    tensors = tuple(spec for spec in model.tensors if is_trained(spec.name) != frozen)
    names = {spec.name for spec in tensors}
    return _with(model, tensors, tuple(rule for rule in model.fused if names.issuperset(rule.parts)))


def _with(model: ModelSpec, tensors: tuple[TensorSpec, ...], fused: tuple[Fused, ...]) -> ModelSpec:
    return replace(model, tensors=tensors, fused=fused)
