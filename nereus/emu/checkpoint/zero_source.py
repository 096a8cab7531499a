"""A checkpoint of DeepSpeed's ZeRO as a source: `global_stepN`, as OpenRLHF writes it.

    mp_rank_00_model_states.pt                    stages 0 to 2: the weights whole; the order of parameters
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   a part of fp32 weights and moments, flat
    zero_pp_rank_R_mp_rank_00_model_states.pt     stage 3: the order of parameters alone

Stages 1 and 2 lay the parameters of a group end to end and cut the whole into equal parts; stage 3 cuts every
parameter into equal parts, the last one padded (deepspeed.utils.zero_to_fp32 has the definition).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nereus.emu.arena import TORCH_DTYPE
from nereus.emu.checkpoint.stored_boxes import check_names
from nereus.emu.checkpoint.torch_file import load
from nereus.emu.decoder import HEAD, DecoderConfig, decoder_spec
from nereus.emu.tensor import Box
from nereus.errors import CheckpointError, explain

WEIGHTS = "mp_rank_00_model_states.pt"
INERT = ("deepspeed",)
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_PART = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt")
FLAT = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
KINDS = ("master", "exp_avg", "exp_avg_sq")


def is_zero(folder: Path) -> bool:
    """Whether a folder holds such a checkpoint."""
    return (folder / WEIGHTS).is_file() or (folder / f"zero_pp_rank_0_{WEIGHTS}").is_file()


class ZeroSource:
    """Logical tensors of a model in DeepSpeed's files; weights of stage 3 are cast to the model's dtype.

    Opening reads no numbers: tensors are mapped from the files. Raises CheckpointError, naming them, when
    files or tensors are absent or misshapen, and for a model that AutoTP has cut.
    """

    def __init__(self, folder: Path | str, config: DecoderConfig) -> None:
        self.folder, self.config = Path(folder), config
        self.spec = decoder_spec(config)
        if (self.folder / WEIGHTS.replace("00", "01")).is_file():
            raise self._error("several mp_rank files", "weights cut by tensor parallelism are not read")
        parts = self._numbered(_PART)
        first = load(parts[0] if parts else self.folder / WEIGHTS, inert=INERT)
        self._groups: list[dict[str, tuple[int, ...]]] = [
            {name: tuple(shape) for name, shape in group.items()} for group in first["param_shapes"] or ()
        ]
        self._weights: Mapping[str, Tensor] | None = None if parts else first["module"]
        self._global_steps = int(first.get("global_steps", 0))
        self._stage = 3 if parts else 2
        files = [load(path, inert=INERT)["optimizer_state_dict"] for path in self._numbered(_OPTIMIZER)]
        if (parts or files) and len(files) != first.get("dp_world_size", len(files) or 1):
            raise self._error(f"{len(files)} optimizer files", "every rank writes one")
        trained = {name: shape for group in self._groups for name, shape in group.items()}
        self._has_optimizer = bool(files) or first.get("optimizer") is not None
        has_all = all(tensor.name in trained for tensor in self.spec.tensors)  # else some were frozen
        self._ranks = [self._flat(file) for file in files] if has_all else []
        self._last: tuple[tuple[str, str], Tensor] | None = None
        shapes = trained
        if self._weights is not None:
            shapes = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}
        check_names(self.folder, self.spec, shapes, () if HEAD in self.spec.by_name else (HEAD,))

    def __reduce__(self) -> tuple[object, ...]:
        return ZeroSource, (self.folder, self.config)

    def kinds(self) -> tuple[str, ...]:
        """Kinds that are there for every tensor."""
        return ("theta", *KINDS) if self._ranks else ("theta",)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Logical name to global shape."""
        return {tensor.name: tensor.shape for tensor in self.spec.tensors}

    def read(self, kind: str, name: str, box: Box) -> Tensor:
        """The box of one logical tensor. Raises CheckpointError when it is not stored."""
        if name not in self.spec.by_name or kind not in self.kinds():
            raise CheckpointError(explain(f"cannot read {kind}/{name} from {self.folder}", rule="absent"))
        inside = tuple(slice(lo, hi) for lo, hi in box)
        if kind == "theta" and self._weights is not None:
            return self._weights[name][inside].clone()
        if kind == "theta":
            return self._whole("master", name)[inside].to(TORCH_DTYPE[self.config.dtype])
        return self._whole(kind, name)[inside].clone()

    @property
    def unread(self) -> tuple[str, ...]:
        """What is stored of an optimizer and is no kind here: stage 0 keeps it as its own class does."""
        return (WEIGHTS,) if self._has_optimizer and not self._ranks else ()

    def adam_steps(self) -> int | None:
        """Optimizer steps taken; None without moments."""
        return self._global_steps if self._ranks else None

    def _numbered(self, pattern: re.Pattern[str]) -> list[Path]:
        """The files of all ranks in order. Raises CheckpointError where one is absent."""
        found = {int(m[1]): path for path in self.folder.iterdir() if (m := pattern.fullmatch(path.name))}
        if sorted(found) != list(range(len(found))):
            raise self._error(f"files of ranks {sorted(found)}", "every rank writes one")
        return [found[rank] for rank in sorted(found)]

    def _flat(self, file: Mapping[str, Any]) -> dict[str, list[Tensor]]:
        """A rank's flat tensors by kind and group; those of stage 3 as one group."""
        masters: Sequence[Tensor] = file.get(FLAT[self._stage]) or ()
        inner = file["optimizer_state_dict"] if self._stage == 3 else file["base_optimizer_state"]
        if not masters or not isinstance(inner, Mapping):
            raise self._error("an optimizer without fp32 weights", "a part holds them beside its moments")
        states = [inner["state"][group] for group in range(len(masters))]
        moments = {kind: [state[kind].flatten() for state in states] for kind in KINDS[1:]}
        return {"master": list(masters), **moments}

    def _whole(self, kind: str, name: str) -> Tensor:
        """One tensor, put together from what the ranks hold; the last one is kept, since its boxes are read
        one after another.
        """
        if self._last is None or self._last[0] != (kind, name):
            assemble = self._from_equal_parts if self._stage == 3 else self._from_flat_groups
            self._last = (kind, name), assemble(kind, name)
        return self._last[1]

    def _from_flat_groups(self, kind: str, name: str) -> Tensor:
        number = next(at for at, group in enumerate(self._groups) if name in group)
        group = self._groups[number]
        at, size = _offset(name, {other: prod(shape) for other, shape in group.items()})
        parts = _slice([rank[kind][number] for rank in self._ranks], at, at + size)
        return torch.cat(parts).view(group[name])

    def _from_equal_parts(self, kind: str, name: str) -> Tensor:
        shapes = {other: shape for group in self._groups for other, shape in group.items()}
        sizes = {other: -(-prod(shape) // len(self._ranks)) for other, shape in shapes.items()}
        at, size = _offset(name, sizes)
        parts = [part for rank in self._ranks for part in _slice(rank[kind], at, at + size)]
        return torch.cat(parts)[: prod(shapes[name])].view(shapes[name])

    def _error(self, values: str, rule: str) -> CheckpointError:
        return CheckpointError(
            explain(
                f"cannot read the ZeRO checkpoint {self.folder}",
                values=values,
                rule=rule,
                remedy="fetch the files of all nodes, or export a Hugging Face folder (--save_hf_ckpt)",
            )
        )


def _offset(name: str, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Where a tensor begins among those laid end to end, and its size."""
    return list(accumulate(sizes.values(), initial=0))[list(sizes).index(name)], sizes[name]


def _slice(flats: Sequence[Tensor], lo: int, hi: int) -> list[Tensor]:
    """Elements [lo, hi) of flat tensors that lie end to end."""
    out, begin = [], 0
    for flat in flats:
        a, b = max(lo, begin), min(hi, begin + len(flat))
        if a < b:
            out.append(flat[a - begin : b - begin])
        begin += len(flat)
    return out
