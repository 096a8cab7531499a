"""An adapter in PEFT's form: read as a source of logical tensors, and written from any other source.

adapter_config.json            rank, alpha, targets, and the options that are not used here
adapter_model.safetensors      base_model.model.<module>.lora_A.weight, ...lora_B.weight
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nereus.emu.arena import TORCH_DTYPE
from nereus.emu.decoder import DType
from nereus.emu.lora import Lora, is_adapter
from nereus.emu.source import LogicalSource
from nereus.emu.tensor import Box, ModelSpec, whole
from nereus.emu.tensor_reader import TensorReader
from nereus.emu.tensor_writer import Outgoing, sync_folder, write_tensors, write_text
from nereus.errors import ModelError, explain

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# What an adapter may have beside its factors, and the value that means it has not.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "bias": (None, "none"),
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None,),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
}


class PeftSource:
    """The adapter of a PEFT folder, for a model whose tensors are known.

    Raises ModelError unless it is a plain LoRA of just this rank, alpha and targets, with every tensor there.
    """

    def __init__(self, folder: Path | str, model: ModelSpec, lora: Lora) -> None:
        self.folder, self._model, self._lora = Path(folder), model, lora
        if (found := read_peft_config(self.folder)) != lora:
            raise _unfit(self.folder, f"it has {_told(found)}", f"models.lora says {_told(lora)}")
        if not (self.folder / WEIGHTS).is_file():
            raise _unfit(self.folder, f"{WEIGHTS} is absent", "adapters are read from safetensors only")
        self._reader = TensorReader([self.folder / WEIGHTS], ModelError)
        self._shapes = {spec.name: spec.shape for spec in model.tensors if is_adapter(spec.name)}
        self._check()

    def __reduce__(self) -> tuple[object, ...]:
        return PeftSource, (self.folder, self._model, self._lora)

    def kinds(self) -> tuple[str, ...]:
        """Weights only."""
        return ("theta",)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Logical name to global shape."""
        return self._shapes

    def read(self, kind: str, name: str, box: Box) -> Tensor:
        """A box of one factor in its stored dtype."""
        assert kind == "theta", "a PEFT folder holds weights"
        return self._reader.read(_PREFIX + name, box)

    def _check(self) -> None:
        stored = {name: found.shape for name, found in self._reader.tensors.items()}
        wanted = {_PREFIX + name: shape for name, shape in self._shapes.items()}
        differing = sorted(
            name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name)
        )
        if differing:
            shown = "; ".join(
                f"{name}: stored {stored.get(name)}, wanted {wanted.get(name)}" for name in differing[:4]
            )
            raise _unfit(
                self.folder,
                f"{len(differing)} tensors differ: {shown}",
                "the adapter must be of this model, with both factors of every target and nothing else",
            )


def read_peft_config(folder: Path | str) -> Lora:
    """Rank, alpha and targets of a PEFT folder. Raises ModelError where it is no plain LoRA."""
    path = Path(folder) / CONFIG
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        if raw["peft_type"] != "LORA":
            raise _unfit(path.parent, f"peft_type={raw['peft_type']!r}", "only LORA is read")
        targets = raw["target_modules"]
        lora = Lora(rank=int(raw["r"]), alpha=float(raw["lora_alpha"]), targets=sorted_targets(targets))
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as problem:
        raise _unfit(
            path.parent, repr(problem), f"{CONFIG} tells rank, alpha and target_modules"
        ) from problem
    more = {key: raw[key] for key, plain in _PLAIN.items() if key in raw and raw[key] not in plain}
    if more:
        told = ", ".join(f"{key}={value!r}" for key, value in more.items())
        raise _unfit(path.parent, told, "only plain LoRA is read: two factors for every target")
    return lora


def sorted_targets(targets: object) -> tuple[str, ...]:
    """Names of layers in one order, as PEFT's list (or set) of them has none. Raises TypeError otherwise."""
    if not isinstance(targets, list | tuple | set | frozenset):
        raise TypeError(f"target_modules={targets!r} is no list of names")
    return tuple(sorted(str(name) for name in targets))


def write_peft_folder(
    source: LogicalSource, model: ModelSpec, lora: Lora, folder: Path | str, *, base: str, dtype: DType
) -> None:
    """Write the adapters of `source` as a folder that PEFT loads onto the model `base`, a path or a name.

    The folder appears by a rename when it is complete; an older adapter there is replaced.
    Raises ModelError when `folder` holds something else.
    """
    target = Path(folder)
    if target.exists() and any(target.iterdir()) and not (target / CONFIG).is_file():
        raise _unfit(target, "it holds other files", "only an empty folder or an older adapter is replaced")
    fresh = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        write_tensors(fresh / WEIGHTS, _outgoing(source, model, dtype))
        write_text(fresh / CONFIG, json.dumps(_config(lora, base), indent=2) + "\n")
        sync_folder(fresh)
        if target.exists():
            shutil.rmtree(target)
        fresh.rename(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # present only after a failure


def _outgoing(source: LogicalSource, model: ModelSpec, dtype: DType) -> list[Outgoing]:
    stored = TORCH_DTYPE[dtype]
    return [
        Outgoing(
            name=_PREFIX + spec.name,
            shape=spec.shape,
            dtype=stored,
            load=lambda name=spec.name, shape=spec.shape: source.read("theta", name, whole(shape)).to(stored),  # type: ignore[misc]
        )
        for spec in model.tensors
        if is_adapter(spec.name)
    ]


def _config(lora: Lora, base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _told(lora: Lora) -> str:
    return f"rank {lora.rank}, alpha {lora.alpha:g}, targets {', '.join(lora.targets)}"


def _unfit(folder: Path, values: str, rule: str) -> ModelError:
    return ModelError(
        explain(
            f"cannot use the adapter folder {folder}",
            values=values,
            rule=rule,
            remedy="name a folder that PEFT's save_pretrained wrote for this model, or change models.lora",
        )
    )
