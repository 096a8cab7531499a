"""A ZeRO checkpoint as DeepSpeed loads it, from any source of logical tensors: files for a number of ranks.

    FOLDER/mp_rank_00_model_states.pt                  stages 1 and 2: the weights whole, schedule, counters
    FOLDER/zero_pp_rank_R_mp_rank_00_model_states.pt   stage 3: the same without weights, for every rank
    FOLDER/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   a rank's part of fp32 weights and moments

Stages 1 and 2 lay the tensors of a group end to end, pad the whole to a multiple of twice the ranks, and cut
it into equal parts. Stage 3 cuts every tensor into equal parts, the last one padded, and a rank's parts into
sub-groups. The form is that of DeepSpeed 0.19, which reads files of any release since 0.3.17.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nereus.emu.arena import TORCH_DTYPE
from nereus.emu.decoder import EMBED, HEAD, DecoderConfig, decoder_spec
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.source import LogicalSource
from nereus.emu.tensor import whole
from nereus.errors import CheckpointError, explain

MOMENTS = ("exp_avg", "exp_avg_sq")
VERSION = "0.19.8"  # of DeepSpeed, whose form this is
ALIGNED_TO = 2  # elements a rank, of a group's flat tensor
SUB_GROUP_SIZE = 10**9  # elements of a rank: DeepSpeed's default at stage 3
PREFIX = {"bf16": "bf16_", "fp16": "", "fp32": ""}

Shapes = Mapping[str, tuple[int, ...]]  # by name, in the order of the parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroCut:
    """How the job that loads it cuts the state: data-parallel ranks, and DeepSpeed's `zero_stage`."""

    ranks: int
    stage: Literal[1, 2, 3] = 2
    sub_group_size: int = SUB_GROUP_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Elements [lo, hi) of a flattened tensor, which lie at `at` of a flat one."""

    name: str
    lo: int
    hi: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """A flat tensor of one rank: `size` elements, of which `padding` at the end are no weights."""

    size: int
    padding: int
    slots: tuple[Slot, ...]
    group: int
    """The parameter group that it belongs to."""


def flats(groups: Sequence[Shapes], cut: ZeroCut, rank: int) -> tuple[Flat, ...]:
    """What a rank holds of the groups of parameters."""
    if cut.stage < 3:
        return tuple(_part(number, shapes, cut.ranks, rank) for number, shapes in enumerate(groups))
    return tuple(
        _equal_parts(number, part, cut.ranks, rank)
        for number, shapes in enumerate(groups)
        for part in sub_groups(shapes, cut)
    )


def sub_groups(shapes: Shapes, cut: ZeroCut) -> tuple[Shapes, ...]:
    """Stage 3's cut of a group: one ends with the parameter that fills it."""
    out: list[dict[str, tuple[int, ...]]] = [{}]
    room = cut.sub_group_size
    for name, shape in shapes.items():
        if room <= 0:
            out.append({})
            room = cut.sub_group_size
        out[-1][name] = shape
        room -= -(-prod(shape) // cut.ranks)
    return tuple(out)


def _part(group: int, shapes: Shapes, ranks: int, rank: int) -> Flat:
    num = sum(prod(shape) for shape in shapes.values())
    size = -(-num // (ALIGNED_TO * ranks)) * ALIGNED_TO
    begin, end, at, slots = rank * size, (rank + 1) * size, 0, []
    for name, shape in shapes.items():
        lo, hi = max(begin, at), min(end, at + prod(shape))
        if lo < hi:
            slots.append(Slot(name=name, lo=lo - at, hi=hi - at, at=lo - begin))
        at += prod(shape)
    padding = min(size, max(0, end - num))
    return Flat(size=size, padding=padding, slots=tuple(slots), group=group)


def _equal_parts(group: int, shapes: Shapes, ranks: int, rank: int) -> Flat:
    at, slots = 0, []
    for name, shape in shapes.items():
        size = -(-prod(shape) // ranks)
        lo, hi = min(rank * size, prod(shape)), min((rank + 1) * size, prod(shape))
        if lo < hi:
            slots.append(Slot(name=name, lo=lo, hi=hi, at=at))
        at += size
    return Flat(size=at, padding=0, slots=tuple(slots), group=group)


def write_zero(
    source: LogicalSource,
    config: DecoderConfig,
    folder: Path,
    *,
    cut: ZeroCut,
    groups: Sequence[tuple[Sequence[str], float]],
    adam_steps: int,
    learning_rate: float,
    settings: AdamW,
    client_state: Mapping[str, Any],
) -> None:
    """Write the files of every rank. A rank's part is in memory at a time, and at stages 1 and 2 the weights.

    `groups` are the parameters of the optimizer's groups, in its order, with the weight decay of each.
    DeepSpeed takes the optimizer's settings from the files; the learning rate is that of the first step, as
    the job's own schedule goes on after it. `client_state` is what `load_checkpoint` returns.

    Raises CheckpointError without moments, for a mixture of experts, and at stage 3 in fp16, whose loss scale
    is not known here, or without DeepSpeed.
    """
    refused = {
        "no moments": not set(MOMENTS) <= set(source.kinds()),
        "a mixture of experts": config.experts is not None,
        "fp16 at stage 3": config.dtype == "fp16" and cut.stage == 3,
    }
    if any(refused.values()):
        raise CheckpointError(
            explain(
                f"cannot write the ZeRO checkpoint {folder}",
                values=next(what for what, is_so in refused.items() if is_so),
                rule="weights and both moments of a dense model are written; in fp16 at stages 1 and 2",
                remedy="write a model folder instead (--weights-only)",
            )
        )
    files = _Files(source, config, cut, groups)
    folder.mkdir(parents=True, exist_ok=True)
    common = {
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": files.param_shapes(),
        "frozen_param_shapes": None,
        "shared_params": {HEAD: EMBED} if config.tied and config.head == "lm" else {},
        "frozen_param_fragments": None,
        "lr_scheduler": {"last_epoch": adam_steps, "_step_count": adam_steps + 1, "lr_lambdas": []},
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": adam_steps,
        "dp_world_size": cut.ranks,
        "mp_world_size": 1,
        "ds_version": VERSION,
        **client_state,
    }
    name = "mp_rank_00_model_states.pt"
    if cut.stage < 3:
        torch.save({"module": files.weights(), **common}, folder / name)
    for rank in range(cut.ranks):
        if cut.stage == 3:
            torch.save({"module": files.no_weights(), **common}, folder / f"zero_pp_rank_{rank}_{name}")
        state = files.optimizer(rank, adam_steps, learning_rate, settings)
        torch.save(
            {"optimizer_state_dict": state, "ds_version": VERSION},
            folder / f"{PREFIX[config.dtype]}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )


class _Files:
    """The contents of the files."""

    def __init__(
        self,
        source: LogicalSource,
        config: DecoderConfig,
        cut: ZeroCut,
        groups: Sequence[tuple[Sequence[str], float]],
    ) -> None:
        self._source, self._config, self._cut = source, config, cut
        self._shapes = {tensor.name: tensor.shape for tensor in decoder_spec(config).tensors}
        self._groups: list[Shapes] = [{name: self._shapes[name] for name in names} for names, _ in groups]
        self._decays = [decay for _, decay in groups]
        self._master = "master" if "master" in source.kinds() else "theta"

    def param_shapes(self) -> list[dict[str, torch.Size]]:
        """The order of the parameters, by flat tensor."""
        parts = self._groups
        if self._cut.stage == 3:
            parts = [part for shapes in self._groups for part in sub_groups(shapes, self._cut)]
        return [{name: torch.Size(shape) for name, shape in shapes.items()} for shapes in parts]

    def weights(self) -> dict[str, Tensor]:
        """Every weight whole in the model's dtype; a tied head is the embedding."""
        dtype = TORCH_DTYPE[self._config.dtype]
        out = {
            name: self._source.read("theta", name, whole(shape)).to(dtype).clone()
            for name, shape in self._shapes.items()
        }
        return out | ({HEAD: out[EMBED]} if self._has_tied_head else {})

    def no_weights(self) -> dict[str, Tensor]:
        """What a partitioned module holds: names without numbers."""
        names = [*self._shapes, *([HEAD] if self._has_tied_head else [])]
        return {name: torch.empty(0, dtype=TORCH_DTYPE[self._config.dtype]) for name in names}

    @property
    def _has_tied_head(self) -> bool:
        return self._config.tied and self._config.head == "lm"

    def optimizer(self, rank: int, adam_steps: int, learning_rate: float, settings: AdamW) -> dict[str, Any]:
        """A rank's optimizer: fp32 weights and moments."""
        parts = flats(self._groups, self._cut, rank)
        inner = {
            "state": {
                number: {"step": adam_steps, **{kind: self._flat(kind, flat) for kind in MOMENTS}}
                for number, flat in enumerate(parts)
            },
            "param_groups": [
                {
                    "lr": learning_rate,
                    "bias_correction": True,
                    "betas": settings.betas,
                    "eps": settings.eps,
                    "weight_decay": decay,
                    "step": adam_steps,
                    "params": [number for number, flat in enumerate(parts) if flat.group == group],
                }
                for group, decay in enumerate(self._decays)
            ],
        }
        masters = [self._flat(self._master, flat) for flat in parts]
        if self._cut.stage == 3:
            return {
                "zero_stage": 3,
                "loss_scaler": _loss_scaler(),
                "dynamic_loss_scale": False,
                "overflow": False,
                "partition_count": self._cut.ranks,
                "optimizer_state_dict": inner,
                "fp32_flat_groups": masters,
            }
        lean = [flat[: len(flat) - part.padding].clone() for flat, part in zip(masters, parts, strict=True)]
        return {
            "zero_stage": self._cut.stage,
            "partition_count": [self._cut.ranks] * len(parts),
            "base_optimizer_state": inner,
            "single_partition_of_fp32_groups": lean,
            "group_paddings": [part.padding for part in parts],
            "ds_version": VERSION,
        }

    def _flat(self, kind: str, flat: Flat) -> Tensor:
        out = torch.zeros(flat.size)
        for slot in flat.slots:
            out[slot.at : slot.at + slot.hi - slot.lo] = self._elements(kind, slot)
        return out

    def _elements(self, kind: str, slot: Slot) -> Tensor:
        """Elements of one tensor, of which the rows that hold them are read."""
        shape = self._shapes[slot.name]
        row = prod(shape[1:])
        first, last = slot.lo // row, -(-slot.hi // row)
        rows = self._source.read(kind, slot.name, ((first, last), *whole(shape[1:])))
        return rows.reshape(-1)[slot.lo - first * row : slot.hi - first * row].float()


def _loss_scaler() -> object:
    """DeepSpeed's own object, which stage 3 loads from the files. Raises CheckpointError without it."""
    try:
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
    except ImportError as problem:
        raise CheckpointError(
            explain(
                "cannot write a checkpoint of ZeRO stage 3",
                values=str(problem),
                rule="its files hold an object of DeepSpeed's, which has to be installed here",
                remedy="pip install 'nereus-rl[deepspeed]', or write and run with stage 2",
            )
        ) from problem
    return LossScaler(scale=1.0)
