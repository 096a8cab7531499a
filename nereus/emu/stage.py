"""What a worker is told about a model-stage: its model, its units, where its weights come from.

Values that travel from the driver to every worker; the worker answers by building the shard it holds, if any.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engine_limits import EngineName
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.kinds import Kinds, kinds_of, optimizer_kinds, serving_kinds
from nereus.emu.layout import Layout, Rank
from nereus.emu.optimizer_slices import optimizer_units
from nereus.emu.serving import DEFAULT_SERVING, Serving
from nereus.emu.tensor import ModelSpec
from nereus.emu.unit import Unit, UnitId

Role = Literal["training", "generation", "inference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FromFolder:
    """Weights from a Hugging Face folder; moments start at zero. A missing value head is drawn from
    `seed`.
    """

    folder: Path
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FromCheckpoint:
    """Weights and moments from one model of a checkpoint."""

    folder: Path
    step_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FromStage:
    """Weights by a weight sync from another model-stage; nothing is read from storage."""

    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FromMemory:
    """The shard that a committed transition left in the worker; `step_count` is Adam's."""

    step_count: int


Origin = FromFolder | FromCheckpoint | FromStage | FromMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One model-stage: name (`actor.training`), role, model, units, and where its weights come from.

    With `zero1` the units of a trained model-stage share the optimizer's state, a slice each.
    With `shares`, the shard uses the arenas of that model-stage (equal units), so weights exist once.
    `train_rows` and `score_rows` are the largest micro-batches that the plan allows, None: as the campaign is
    configured. `resident_rows` is how many sequences a unit generates at once, None: all of its share.
    `serving` is for engines whose KV cache is allocated when they are made.
    """

    name: str
    role: Role
    model: DecoderConfig
    units: tuple[Layout, ...]
    origin: Origin
    engine: EngineName = "torch"
    optimizer: AdamW | None = None
    recompute: bool = False
    zero1: bool = False
    shares: str | None = None
    train_rows: int | None = None
    score_rows: int | None = None
    resident_rows: int | None = None
    serving: Serving = DEFAULT_SERVING

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Every rank, unit after unit in layout order."""
        return tuple(rank for unit in self.units for rank in unit.ranks)

    @property
    def tensors(self) -> ModelSpec:
        """The logical tensors and how the engine stores them."""
        # Megatron's attention reads the heads of one group side by side.
        order: Literal["blocks", "per_kv_group"] = "per_kv_group" if self.engine == "megatron" else "blocks"
        return decoder_spec(self.model, qkv_order=order)

    @property
    def kinds(self) -> Kinds:
        """The kinds of state that a unit carries; with `zero1` the optimizer's are the model-stage's."""
        return serving_kinds(self.model.dtype) if self.zero1 else kinds_of(self.role, self.model.dtype)

    @property
    def optimizer_units(self) -> tuple[Unit, ...]:
        """With `zero1` the one unit of all ranks that holds the optimizer's state, else none."""
        if not self.zero1:
            return ()
        kinds, model = optimizer_kinds(self.model.dtype), self.name.partition(".")[0]
        return optimizer_units(self.name, model, self.units, kinds, shared=True)

    @property
    def writers(self) -> tuple[Rank, ...]:
        """The ranks that together hold the whole state: the first unit, with `zero1` all of them."""
        return self.ranks if self.zero1 else self.units[0].ranks

    def elastic_units(self, kinds: Kinds, *, model: str | None = None) -> tuple[Unit, ...]:
        """The units as values of a reshard plan, with these kinds of state; `model` is `name` when absent."""
        return tuple(
            Unit(id=UnitId(self.name, index), model=model or self.name, layout=layout, kinds=kinds)
            for index, layout in enumerate(self.units)
        )

    @property
    def text(self) -> str:
        """E.g. `tp2 pp1 dp2 on 0,1,2,3`, and what the plan chose beside the layout."""
        chosen = {
            "micro-batch": self.train_rows if self.role == "training" else self.score_rows,
            "at once": self.resident_rows,
        }
        options = [f", {name} {rows}" for name, rows in chosen.items() if rows is not None]
        again = ", recompute" if self.recompute and self.role == "training" else ""
        parts = [tuple(units) for _, units in groupby(self.units, lambda unit: (unit.tp, unit.layers))]
        cut = " and ".join(
            f"tp{units[0].tp} pp{units[0].pp} dp{len(units)} on "
            + ",".join(str(rank) for unit in units for rank in unit.ranks)
            for units in parts
        )
        return f"{cut}{''.join(options)}{again}"
