"""A Hugging Face model folder: read as a source of logical tensors, and written from any other source."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from nereus.emu.arena import TORCH_DTYPE
from nereus.emu.decoder import HEAD, VALUE_HEAD, DecoderConfig, DType, Head, decoder_spec
from nereus.emu.hf_names import Stored, stored_as
from nereus.emu.source import LogicalSource
from nereus.emu.tensor import Box, ModelSpec, TensorSpec, whole
from nereus.emu.tensor_reader import FLOATS, TensorReader
from nereus.emu.tensor_writer import Outgoing, sync_folder, write_tensors, write_text
from nereus.errors import ModelError, explain

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_NAMES_SHOWN = 6
VALUE_HEAD_STD = 0.02


class HFSource:
    """The tensors of a Hugging Face folder, single-file or sharded, read box by box.

    Opening reads headers only and raises ModelError, naming every missing, misshapen and unexpected tensor,
    unless the folder holds exactly what `config.json` promises. The bias of q, k, v is found by presence; a
    tied `lm_head.weight` is not needed and is ignored where present, as transformers does.

    With `head="value"` the folder's `score.weight` is the value head. Where it is absent (a critic that
    starts from a language model) `value_head_seed` must be given: the head is then drawn from a normal
    distribution of standard deviation 0.02, Hugging Face's initializer range, keyed by that seed alone.
    Without a seed its absence is an error, for a reward model without its head would give noise.
    """

    def __init__(self, folder: Path | str, *, head: Head = "lm", value_head_seed: int | None = None) -> None:
        self.folder = Path(folder)
        self._seed = value_head_seed
        config = DecoderConfig.from_folder(self.folder)
        self._reader = TensorReader(_files(self.folder), ModelError)
        names = self._reader.tensors
        bias = any(name.endswith("self_attn.q_proj.bias") for name in names)
        self.config: DecoderConfig = replace(config, head=head, qkv_bias=bias)
        self.spec: ModelSpec = decoder_spec(self.config)
        self._draws_head = VALUE_HEAD in self.spec.by_name and VALUE_HEAD not in names
        self._check()

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self.folder, self.config.head, self._seed)

    def kinds(self) -> tuple[str, ...]:
        """Weights only."""
        return ("theta",)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Logical name to global shape."""
        return {tensor.name: tensor.shape for tensor in self.spec.tensors}

    def read(self, kind: str, name: str, box: Box) -> Tensor:
        """The box of one tensor in its stored dtype. Raises ModelError for a kind or name not here."""
        if kind != "theta" or name not in self.spec.by_name:
            raise ModelError(
                explain(f"cannot read {kind}/{name} from {self.folder}", rule="it holds no such tensor")
            )
        if self._draws_head and name == VALUE_HEAD:
            return self._value_head[tuple(slice(lo, hi) for lo, hi in box)]
        spec = self.spec.by_name[name]
        stored = stored_as(self.config, spec)
        if not spec.experts:
            return self._reader.read(stored[0][0], box)
        lo, hi = box[0]
        parts = [self._reader.read(part, box[1:]) for part, _, _ in stored[lo:hi]]
        # No expert: an empty box, in the dtype of those that there are.
        return torch.stack(parts) if parts else self._reader.read(stored[0][0], box[1:])[None][:0]

    @cached_property
    def _value_head(self) -> Tensor:
        assert self._seed is not None
        generator = torch.Generator().manual_seed(self._seed)
        return torch.randn(1, self.config.hidden_size, generator=generator) * VALUE_HEAD_STD

    def _check(self) -> None:
        stored = self._reader.tensors
        expected = {
            name: shape for spec in self.spec.tensors for name, shape, _ in stored_as(self.config, spec)
        }
        drawn = {VALUE_HEAD} if self._draws_head and self._seed is not None else set()
        missing = [name for name in expected if name not in stored and name not in drawn]
        misshapen = [
            f"{name} is {list(stored[name].shape)}, not {list(shape)}"
            for name, shape in expected.items()
            if name in stored and stored[name].shape != shape
        ]
        unexpected = [name for name in stored if name not in expected and not self._ignored(name)]
        foreign = [
            f"{name} is {stored[name].dtype}"
            for name in expected
            if name in stored and stored[name].dtype not in FLOATS
        ]
        parts = (
            ("missing", missing),
            ("misshapen", misshapen),
            ("unexpected", unexpected),
            ("not floating point", foreign),
        )
        if problems := [f"{label}: {_some(names)}" for label, names in parts if names]:
            remedy = "use the checkpoint that belongs to this config.json, in bf16, fp16 or fp32"
            if missing == [VALUE_HEAD]:
                remedy = "give value_head_seed to start a critic's head afresh, or a folder with score.weight"
            raise ModelError(
                explain(
                    f"cannot load the model folder {self.folder}",
                    values="; ".join(problems),
                    rule="the tensors must be those that config.json describes",
                    remedy=remedy,
                )
            )

    def _ignored(self, name: str) -> bool:
        """Tensors that older writers leave in and that carry nothing this model needs."""
        if name.endswith("rotary_emb.inv_freq"):
            return True
        if name == HEAD:
            return True  # not expected here: tied to the embedding, or the trunk serves a value head
        if name == "score.bias" and self.config.head == "value":
            stored = self._reader.tensors[name]
            return not self._reader.read(name, whole(stored.shape)).any()
        return False


def write_hf_folder(
    source: LogicalSource,
    config: DecoderConfig,
    folder: Path | str,
    *,
    max_shard_bytes: int = 4 << 30,
    dtype: DType | None = None,
    kind: str = "theta",
    origin: Path | str | None = None,
) -> None:
    """Write `source`'s weights as a Hugging Face folder that transformers loads.

    One tensor is in memory at a time. `dtype` defaults to the config's. Tokenizer and generation files are
    copied from `origin`. The folder appears by a rename when it is complete; an older model folder there is
    replaced. Raises ModelError when `folder` holds something that is no model.
    """
    target = Path(folder)
    if target.exists() and any(target.iterdir()) and not (target / "config.json").is_file():
        raise ModelError(
            explain(
                f"cannot write a model to {target}",
                values="the folder holds other files",
                rule="only an empty folder or an older model is replaced",
                remedy="name another folder",
            )
        )
    config = config.with_dtype(dtype or config.dtype)
    fresh = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        _write_weights(source, config, kind, fresh, max_shard_bytes)
        write_text(fresh / "config.json", json.dumps(config.to_hf(), indent=2) + "\n")
        for name in TOKENIZER_FILES if origin is not None else ():
            if (path := Path(str(origin)) / name).is_file():
                shutil.copyfile(path, fresh / name)
        sync_folder(fresh)
        _replace(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # present only after a failure


def _write_weights(
    source: LogicalSource, config: DecoderConfig, kind: str, folder: Path, max_shard_bytes: int
) -> None:
    dtype = TORCH_DTYPE[config.dtype]
    tensors = [
        _outgoing(source, kind, spec, stored, dtype)
        for spec in decoder_spec(config).tensors
        for stored in stored_as(config, spec)
    ]
    shards = _into_shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_tensors(folder / SINGLE, shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file, shard)
        weight_map |= {tensor.name: file for tensor in shard}
    total = sum(tensor.num_bytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _outgoing(
    source: LogicalSource, kind: str, spec: TensorSpec, stored: Stored, dtype: torch.dtype
) -> Outgoing:
    name, shape, box = stored

    def load() -> Tensor:
        return source.read(kind, spec.name, box).to(dtype).view(shape)

    return Outgoing(name=name, shape=shape, dtype=dtype, load=load)


def _into_shards(tensors: Sequence[Outgoing], max_shard_bytes: int) -> list[list[Outgoing]]:
    """Consecutive tensors up to the limit; a tensor above it has a file of its own."""
    shards: list[list[Outgoing]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def _replace(fresh: Path, target: Path) -> None:
    old = target.with_name(f"{target.name}.old-{os.getpid()}")
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, from its index where it has one."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError, TypeError) as problem:
            raise ModelError(
                explain(f"cannot read {index}", values=repr(problem), rule="it must map tensors to files")
            ) from problem
        return [folder / name for name in sorted(set(weight_map.values()))]
    if single.is_file():
        return [single]
    raise ModelError(
        explain(
            f"cannot load the model folder {folder}",
            values=f"neither {SINGLE} nor {INDEX} is there",
            rule="weights are read from safetensors only",
            remedy="save the model with save_pretrained(safe_serialization=True)",
        )
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def _reopen(folder: Path, head: Head, seed: int | None) -> HFSource:
    return HFSource(folder, head=head, value_head_seed=seed)
