"""What a worker is told about a model-stage: its model, its units, where its weights come from.

Values that travel from the driver to every worker; the worker answers by building the shard it holds, if any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engine_limits import EngineName
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.kinds import Kinds, kinds_of, optimizer_kinds, serving_kinds
from nereus.emu.layout import Layout, Rank
from nereus.emu.lora import frozen_part, trained_part
from nereus.emu.optimizer_slices import optimizer_units
from nereus.emu.partition import cut_of
from nereus.emu.serving import DEFAULT_SERVING, Serving
from nereus.emu.tensor import ModelSpec
from nereus.emu.unit import Unit, UnitId

Role = Literal["training", "generation", "inference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FromFolder:
    """Weights from a Hugging Face folder; moments start at zero. A missing value head is drawn from `seed`,
    and so are adapters, unless they come from the PEFT folder `adapter`.
    """

    folder: Path
    seed: int = 0
    adapter: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FromCheckpoint:
    """Weights and moments from one model of a checkpoint. It holds what is trained: frozen weights come from
    where they first were, `base`.
    """

    folder: Path
    step_count: int
    base: FromFolder | None = None


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
    router_balance: float = 0.0
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
    def trained(self) -> ModelSpec:
        """The tensors that are trained, and so the ones that the optimizer has state of."""
        return trained_part(self.tensors)

    @property
    def served(self) -> ModelSpec:
        """The tensors that other model-stages get: adapters are added to the weights and are none."""
        return self.tensors if self.model.lora is None else frozen_part(self.tensors)

    @property
    def apart(self) -> bool:
        """Whether the optimizer's state is a state of its own, cut or made up otherwise than the weights."""
        return self.zero1 or (self.role == "training" and self.model.lora is not None)

    @property
    def models(self) -> dict[str, ModelSpec]:
        """The tensors of its units, and of those of its optimizer, by the name of the model."""
        return {self.model_name: self.tensors, self._optimizer_model: self.trained}

    @property
    def model_name(self) -> str:
        """The model's name. Model-stages of one name hold the same tensors."""
        model = self.name.partition(".")[0]
        return model if self.model.lora is None else f"{model} with adapters"

    @property
    def _optimizer_model(self) -> str:
        return self.model_name if self.model.lora is None else f"adapters of {self.name.partition('.')[0]}"

    @property
    def kinds(self) -> Kinds:
        """The kinds of state that a unit carries, without the optimizer's where that is `apart`."""
        return serving_kinds(self.model.dtype) if self.apart else kinds_of(self.role, self.model.dtype)

    @property
    def optimizer_units(self) -> tuple[Unit, ...]:
        """Where the optimizer's state is `apart`, the units that hold it: with `zero1` one of all ranks."""
        return self.optimizer_units_on(self.units, self.name, shared=self.zero1) if self.apart else ()

    def optimizer_units_on(
        self, units: Sequence[Layout], name: str, *, shared: bool = False, kinds: Kinds | None = None
    ) -> tuple[Unit, ...]:
        """The optimizer's state, or other `kinds` of what is trained, of units with these layouts."""
        kinds = optimizer_kinds(self.model.dtype) if kinds is None else kinds
        return optimizer_units(name, self._optimizer_model, units, kinds, shared=shared)

    @property
    def writers(self) -> tuple[Rank, ...]:
        """The ranks that together hold the whole state: the first unit, with `zero1` all of them."""
        return self.ranks if self.zero1 else self.units[0].ranks

    def elastic_units(self, kinds: Kinds, *, model: str | None = None) -> tuple[Unit, ...]:
        """The units as values of a reshard plan, with these kinds of state, by default of `model_name`."""
        return tuple(
            Unit(id=UnitId(self.name, index), model=model or self.model_name, layout=layout, kinds=kinds)
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
        parts = [tuple(units) for _, units in groupby(self.units, cut_of)]
        cut = " and ".join(
            f"{units[0].text} dp{len(units)} on "
            + ",".join(str(rank) for unit in units for rank in unit.ranks)
            for units in parts
        )
        return f"{cut}{''.join(options)}{again}"
