"""What is done with the numbers of adapters: fresh ones are drawn, and trained ones are added to the weights.

training shard: W, A, B --> W + alpha / r * B A in a new arena, rank by rank --> weight sync
frozen model, checkpoint of A and B --> the same sum, tensor by tensor --> Hugging Face folder
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from nereus.emu.arena import Arena, ShardState
from nereus.emu.layout import Shard
from nereus.emu.lora import Lora, down_of, is_adapter, is_trained, up_of
from nereus.emu.source import LogicalSource
from nereus.emu.tensor import Box, ModelSpec


class FreshAdapters:
    """Adapters that change nothing yet: A uniform in +-1 / sqrt(inputs), as PEFT draws it, and B zero.

    Drawn by seed and name, so that they do not depend on how the model is cut.
    """

    def __init__(self, model: ModelSpec, seed: int) -> None:
        self._specs, self._seed = model.by_name, seed

    def kinds(self) -> tuple[str, ...]:
        """Weights only."""
        return ("theta",)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Logical name to global shape."""
        return {name: spec.shape for name, spec in self._specs.items() if is_adapter(name)}

    def read(self, kind: str, name: str, box: Box) -> Tensor:
        """A box of one factor, float32."""
        assert kind == "theta", "adapters are drawn as weights"
        shape = self._specs[name].shape
        if name.endswith("lora_B.weight"):
            return torch.zeros([hi - lo for lo, hi in box])
        key = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        draw = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
        drawn: Tensor = (2 * torch.rand(shape, generator=draw) - 1) / shape[1] ** 0.5
        return drawn[tuple(slice(lo, hi) for lo, hi in box)]


class Adapted:
    """The tensors of a model and, beside them, adapters from another source."""

    def __init__(self, base: LogicalSource, adapters: LogicalSource) -> None:
        self._base, self._adapters = base, adapters

    def kinds(self) -> tuple[str, ...]:
        """Weights only."""
        return ("theta",)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Logical name to global shape."""
        return {**self._base.shapes(), **self._adapters.shapes()}

    def read(self, kind: str, name: str, box: Box) -> Tensor:
        """A box from the source that has the tensor."""
        return (self._adapters if is_adapter(name) else self._base).read(kind, name, box)


class Merged:
    """A model with adapters as one without: every target W reads as W + alpha / r * B A, float32."""

    def __init__(self, base: LogicalSource, adapters: LogicalSource, lora: Lora) -> None:
        self._base, self._adapters, self._lora = base, adapters, lora
        self._names = frozenset(adapters.shapes())

    def kinds(self) -> tuple[str, ...]:
        """Weights only."""
        return ("theta",)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Logical name to global shape."""
        return self._base.shapes()

    def read(self, kind: str, name: str, box: Box) -> Tensor:
        """A box of one merged tensor."""
        if name in self._names:
            return self._adapters.read(kind, name, box)  # a value head is trained beside the adapters
        weight = self._base.read(kind, name, box)
        if down_of(name) not in self._names:
            return weight
        rows, columns = box
        inner = (0, self._lora.rank)
        up = self._adapters.read(kind, up_of(name), (rows, inner))
        down = self._adapters.read(kind, down_of(name), (inner, columns))
        return _sum(weight, up, down, self._lora.scale)


def parts_of(state: ShardState) -> tuple[ShardState, ShardState]:
    """Theta of what is frozen, and theta of what is trained with all other kinds, over the same memory."""
    held = state.shard.tensors
    frozen, trained = (
        Shard(
            position=state.shard.position,
            tensors=tuple(tensor for tensor in held if is_trained(tensor.name) == wanted),
        )
        for wanted in (False, True)
    )
    theta = ShardState(shard=frozen, arenas={"theta": state["theta"].part(frozen)})
    return theta, state.part(trained)


def merged_state(state: ShardState, lora: Lora) -> ShardState:
    """A shard's weights with its adapters added, in an arena of its own and in the dtype of the weights.

    Each rank does it for itself: it holds the factors of its part of each target.
    """
    theta = state["theta"]
    factors = {piece.logical: piece for piece in theta.shard.pieces if is_adapter(piece.logical)}
    held = tuple(tensor for tensor in theta.shard.tensors if not is_adapter(tensor.name))
    out = Arena(Shard(position=theta.shard.position, tensors=held), theta.dtype, theta.device)
    out.flat.copy_(theta.part(out.shard).flat)
    for piece in out.shard.pieces:
        if down_of(piece.logical) in factors:
            up, down = (theta.piece(factors[name(piece.logical)]) for name in (up_of, down_of))
            view = out.piece(piece)
            view.copy_(_sum(view, up, down, lora.scale))
    return ShardState(shard=out.shard, arenas={"theta": out})


def _sum(weight: Tensor, up: Tensor, down: Tensor, scale: float) -> Tensor:
    """W + scale * B A, in float32."""
    return torch.addmm(weight.float(), up.float(), down.float(), alpha=scale)
