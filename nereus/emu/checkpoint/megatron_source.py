"""A Megatron-core distributed checkpoint (`torch_dist`) of a GPT model as a source of logical tensors.

Megatron fuses q, k and v by key-value group, gate and up as two halves of one tensor, pads the vocabulary,
and stores the layers either stacked along a leading dimension or one by one. Every box of a logical tensor is
therefore a few boxes of a stored one. fp32 master weights and Adam's moments lie under
`optimizer.state.<kind>.` in the same geometry.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nereus.emu.checkpoint.dcp_reader import DcpReader
from nereus.emu.decoder import EMBED, FINAL_NORM, HEAD, DecoderConfig, decoder_spec
from nereus.emu.tensor import Box, Interval, ModelSpec, box_shape
from nereus.errors import CheckpointError, explain

EMBEDDING = "embedding.word_embeddings.weight"
COMMON = "common.pt"
OPTIMIZER_KINDS = {"master": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
# Names with Transformer Engine's fused norms, and without.
LAYER_NAMES: Mapping[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "post_attention_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "self_attn.q_proj.weight": ("self_attention.linear_qkv.weight",),
    "self_attn.k_proj.weight": ("self_attention.linear_qkv.weight",),
    "self_attn.v_proj.weight": ("self_attention.linear_qkv.weight",),
    "self_attn.q_proj.bias": ("self_attention.linear_qkv.bias",),
    "self_attn.k_proj.bias": ("self_attention.linear_qkv.bias",),
    "self_attn.v_proj.bias": ("self_attention.linear_qkv.bias",),
    "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight",),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight",),
    "self_attn.o_proj.bias": ("self_attention.linear_proj.bias",),
    "mlp.gate_proj.weight": ("mlp.linear_fc1.weight",),
    "mlp.up_proj.weight": ("mlp.linear_fc1.weight",),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight",),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a logical tensor lies: the stored name, and its layer where layers are stacked."""

    stored: str
    layer: int | None


class MegatronSource:
    """Logical tensors of a decoder in a Megatron-core checkpoint.

    Raises CheckpointError, naming them, when tensors are absent or misshapen.
    """

    def __init__(self, folder: Path | str, config: DecoderConfig) -> None:
        self.folder, self.config = Path(folder), config
        self.spec: ModelSpec = decoder_spec(config)
        self._reader = DcpReader(folder)
        self._names = frozenset(self._reader.names)
        self._prefix = self._find_prefix()
        self._kinds = ("theta", *(kind for kind in OPTIMIZER_KINDS if self._has(kind)))
        self._check()

    def __reduce__(self) -> tuple[object, ...]:
        return MegatronSource, (self.folder, self.config)

    def kinds(self) -> tuple[str, ...]:
        """Kinds that are there for every tensor."""
        return self._kinds

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Logical name to global shape."""
        return {tensor.name: tensor.shape for tensor in self.spec.tensors}

    def read(self, kind: str, name: str, box: Box) -> Tensor:
        """The box of one logical tensor in its stored dtype. Raises CheckpointError when it is not stored."""
        place = self._place(kind, name) if kind in self._kinds and name in self.spec.by_name else None
        if place is None:
            raise CheckpointError(explain(f"cannot read {kind}/{name} from {self.folder}", rule="absent"))
        parts = [self._read(place, (rows, *box[1:])) for rows in self._stored_rows(name, box[0])]
        if not parts:
            return torch.empty(box_shape(box), dtype=self._reader.dtype(place.stored))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def unread(self) -> tuple[str, ...]:
        """Optimizer tensors that are stored and are no kind here, as a distributed optimizer leaves them."""
        if "exp_avg" in self._kinds:
            return ()
        return tuple(name for name in self._reader.names if name.startswith("optimizer."))

    def adam_steps(self) -> int | None:
        """Optimizer steps taken, from `common.pt`; None where it does not say."""
        common = self.folder / COMMON
        if not common.is_file():
            return None
        try:
            held = torch.load(common, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:  # it may hold the trainer's own classes, which are not executed here
            return None
        steps = [int(step) for step in _steps(held.get("optimizer"))]
        return max(steps, default=None)

    def _read(self, place: Place, box: Box) -> Tensor:
        if place.layer is None:
            return self._reader.read(place.stored, box)
        return self._reader.read(place.stored, ((place.layer, place.layer + 1), *box))[0]

    def _stored_rows(self, name: str, rows: Interval) -> Iterator[Interval]:
        """The rows of the stored tensor that are rows [lo, hi) of the logical one, in order."""
        lo, hi = rows
        part = name.rsplit(".", 2)[-2]
        if part == "up_proj":
            yield lo + self.config.intermediate_size, hi + self.config.intermediate_size
        elif part in ("q_proj", "k_proj", "v_proj"):
            yield from self._fused_rows(part, lo, hi)
        elif lo < hi:
            yield rows

    def _fused_rows(self, part: str, lo: int, hi: int) -> Iterator[Interval]:
        """Rows of linear_qkv: for every kv head its queries, its key, its value."""
        width = self.config.head_dim
        heads = self.config.num_heads // self.config.num_kv_heads
        height = heads * width if part == "q_proj" else width
        offset = {"q_proj": 0, "k_proj": heads * width, "v_proj": (heads + 1) * width}[part]
        for group in range(lo // height, -(-hi // height)):
            a, b = max(lo, group * height), min(hi, (group + 1) * height)
            start = group * (heads + 2) * width + offset - group * height
            yield a + start, b + start

    def _find_prefix(self) -> str:
        ends = [n for n in self._names if n.endswith(EMBEDDING) and not n.startswith("optimizer.")]
        if len(ends) != 1:
            raise CheckpointError(
                explain(
                    f"cannot read the Megatron checkpoint {self.folder}",
                    values=f"{len(ends)} tensors named {EMBEDDING}",
                    rule="it must hold one GPT model",
                    remedy="give the iteration's folder, such as iter_0000100",
                )
            )
        return ends[0].removesuffix(EMBEDDING)

    def _place(self, kind: str, name: str) -> Place | None:
        head = self._prefix if kind == "theta" else f"optimizer.state.{OPTIMIZER_KINDS[kind]}.{self._prefix}"
        outer = {EMBED: EMBEDDING, HEAD: "output_layer.weight", FINAL_NORM: "decoder.final_layernorm.weight"}
        if name in outer:
            stored = head + outer[name]
            return Place(stored=stored, layer=None) if stored in self._names else None
        match = _LAYER.fullmatch(name)
        for inner in LAYER_NAMES.get(match[2], ()) if match else ():
            assert match is not None
            if (stored := f"{head}decoder.layers.{inner}") in self._names:
                return Place(stored=stored, layer=int(match[1]))
            if (stored := f"{head}decoder.layers.{match[1]}.{inner}") in self._names:
                return Place(stored=stored, layer=None)
        return None

    def _has(self, kind: str) -> bool:
        return all(self._place(kind, tensor.name) is not None for tensor in self.spec.tensors)

    def _wanted(self, name: str) -> tuple[int, ...]:
        """The stored shape of one layer's tensor that holds a logical one, vocabulary padding left out."""
        shape = self.spec.by_name[name].shape
        part = name.rsplit(".", 2)[-2]
        heads = self.config.num_heads + 2 * self.config.num_kv_heads
        if part in ("q_proj", "k_proj", "v_proj"):
            return (heads * self.config.head_dim, *shape[1:])
        return (2 * shape[0], *shape[1:]) if part in ("gate_proj", "up_proj") else shape

    def _check(self) -> None:
        problems: list[str] = []
        for tensor in self.spec.tensors:
            for kind in self._kinds:
                if (place := self._place(kind, tensor.name)) is None:
                    problems.append(f"{tensor.name} is absent")
                    continue
                found = self._reader.shape(place.stored)
                wanted = self._wanted(tensor.name)
                if place.layer is not None:
                    wanted = (self.config.num_layers, *wanted)
                padded = tensor.name in (EMBED, HEAD) and found[1:] == wanted[1:] and found[0] >= wanted[0]
                if found != wanted and not padded:
                    problems.append(f"{place.stored} is {list(found)}, not {list(wanted)}")
        if problems:
            raise CheckpointError(
                explain(
                    f"cannot read the Megatron checkpoint {self.folder}",
                    values=f"{len(problems)} tensors do not fit: {'; '.join(problems[:3])}",
                    rule="it must be the GPT model that config.json describes, saved as torch_dist",
                    remedy="give the config.json of the model that was trained",
                )
            )


def _steps(state: object) -> Iterator[float]:
    """Every step count in an optimizer's state, however it is nested."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if key in ("step", "common_step") and isinstance(value, int | float | Tensor):
                yield float(value)
            else:
                yield from _steps(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _steps(value)
