"""Kinds of state that a unit carries, their dtypes and sizes, and how one kind travels to another.

`theta` are the weights, `master` an fp32 copy of half-precision weights, `exp_avg` and `exp_avg_sq` Adam's
moments. All kinds of a shard share one geometry, so regions are computed once and multiplied by kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nereus.emu.decoder import DType
from nereus.errors import InvalidOperation, explain

KindName = Literal["theta", "master", "exp_avg", "exp_avg_sq", "grad"]
DTYPE_BYTES: Mapping[DType, int] = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """One kind of state and the dtype it is stored in."""

    name: KindName
    dtype: DType

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]


Kinds = tuple[Kind, ...]


def training_kinds(theta: DType) -> Kinds:
    """The kinds of a training unit; fp32 weights are their own master copy (12 or 14 bytes a parameter)."""
    master = () if theta == "fp32" else (Kind("master", "fp32"),)
    return (Kind("theta", theta), *master, Kind("exp_avg", "fp32"), Kind("exp_avg_sq", "fp32"))


def optimizer_kinds(theta: DType) -> Kinds:
    """The kinds of a training unit beside its weights: what ZeRO-1 shares out among the units."""
    return tuple(kind for kind in training_kinds(theta) if kind.name != "theta")


def serving_kinds(theta: DType) -> Kinds:
    """The kinds of a generation or inference unit: weights alone."""
    return (Kind("theta", theta),)


def kinds_of(stage: str, theta: DType) -> Kinds:
    """The kinds of a unit of a stage: `training` has optimizer state, `generation` and `inference` none."""
    return training_kinds(theta) if stage == "training" else serving_kinds(theta)


@dataclass(frozen=True, slots=True, order=True)
class KindMove:
    """The numbers of `source` (a kind of the old units) become `target` (a kind of the new ones).

    The wire carries the narrower of the two dtypes: a narrowing cast happens at the sender, a widening one at
    the receiver, so no byte travels that the receiver would throw away. A relay sends what it stored; when it
    stored a widened copy, narrowing it again returns the very numbers it received.
    """

    source: Kind
    target: Kind

    @property
    def wire_dtype(self) -> DType:
        """The dtype on the wire."""
        return min(self.target.dtype, self.source.dtype, key=lambda dtype: DTYPE_BYTES[dtype])

    @property
    def wire_bytes(self) -> int:
        """Bytes of one element on the wire."""
        return DTYPE_BYTES[self.wire_dtype]

    @property
    def casts(self) -> bool:
        """Whether source and target dtypes differ."""
        return self.source.dtype != self.target.dtype


KindMoves = tuple[KindMove, ...]


def same_kinds(source: Kinds, target: Kinds) -> KindMoves:
    """Every target kind from the source kind of the same name, cast where their dtypes differ.

    Raises InvalidOperation when the source lacks a kind: a unit of weights alone cannot seed an optimizer.
    """
    by_name = {kind.name: kind for kind in source}
    if missing := [kind.name for kind in target if kind.name not in by_name]:
        raise InvalidOperation(
            explain(
                "cannot move the state",
                values=f"source kinds {sorted(by_name)}, missing {missing}",
                rule="every kind of the new units comes from a kind of the old ones",
                remedy="take units that carry these kinds as sources, or load a checkpoint",
            )
        )
    return tuple(KindMove(by_name[kind.name], kind) for kind in target)
