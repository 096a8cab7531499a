"""Which folder of a run holds a model's newest state, and in which format.

    ours        RUN/checkpoints/step-000010/
    Megatron    ROOT/latest_checkpointed_iteration.txt, ROOT/iter_0000010/
    verl        ROOT/latest_checkpointed_iteration.txt, ROOT/global_step_10/actor/{model_..., dist_ckpt/}
    OpenRLHF    ROOT/_actor/latest, ROOT/_actor/global_step10/ (ZeRO)
                ROOT/latest, ROOT/global_step_10/dcp_checkpoint/_actor/ (FSDP2)

Any folder on the way may be given.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from nereus.emu.checkpoint.dcp_reader import METADATA, DcpReader
from nereus.emu.checkpoint.folder import MARKER, committed
from nereus.emu.checkpoint.fsdp_source import SHARD
from nereus.emu.checkpoint.megatron_source import EMBEDDING
from nereus.emu.checkpoint.zero_source import is_zero
from nereus.emu.decoder import DecoderConfig
from nereus.errors import CheckpointError, explain

Format = Literal["nereus", "huggingface", "dcp", "megatron", "fsdp", "zero"]
ITERATION = "latest_checkpointed_iteration.txt"
LATEST = "latest"
CONFIG = "config.json"
_DEPTH = 4  # folders from a run's root to a model's files, at most


def resolve(root: Path, model: str) -> tuple[Path, Format]:
    """The folder that holds the tensors, and its format. Raises CheckpointError where there is none known."""
    path = root
    for _ in range(_DEPTH):
        if found := _format(path):
            return found
        below = next((child for child in _below(path, model) if child.is_dir()), None)
        if below is None:
            break
        path = below
    held = sorted(child.name for child in path.iterdir())[:6] if path.is_dir() else []
    raise CheckpointError(
        explain(
            f"cannot tell what {root} is",
            values=f"{'it' if path == root else path} holds {', '.join(held)}"
            if held
            else "it is absent or empty",
            rule=f"known are a checkpoint of ours ({MARKER}), a torch or Megatron distributed checkpoint "
            f"({METADATA}), FSDP shards of verl (model_world_size_W_rank_R.pt), a ZeRO checkpoint "
            f"of DeepSpeed (*_model_states.pt) and a Hugging Face folder ({CONFIG})",
            remedy="give the folder that holds one of these files",
        )
    )


def own_config(folder: Path) -> DecoderConfig | None:
    """The model that verl describes beside its shards; biases of q, k, v are the family's. None without."""
    beside = folder / "huggingface"
    return DecoderConfig.from_folder(beside) if (beside / CONFIG).is_file() else None


def _format(path: Path) -> tuple[Path, Format] | None:
    if (path / MARKER).is_file():
        return path, "nereus"
    if found := committed(path):
        return found[-1], "nereus"
    if not path.is_dir():
        return None
    if any(SHARD.fullmatch(child.name) for child in path.iterdir()):
        return path, "fsdp"
    if is_zero(path):
        return path, "zero"
    if (path / METADATA).is_file():
        names = DcpReader(path).names
        return path, "megatron" if any(name.endswith(EMBEDDING) for name in names) else "dcp"
    return (path, "huggingface") if (path / CONFIG).is_file() else None


def _below(path: Path, model: str) -> Iterator[Path]:
    """Where the state may lie, one folder further down; the likeliest first."""
    latest = path / ITERATION
    if latest.is_file() and (text := latest.read_text().strip()).isdigit():
        yield path / f"iter_{int(text):07d}"
        yield path / f"global_step_{int(text)}"
    tag = path / LATEST
    if tag.is_file() and (name := tag.read_text().strip()) and "/" not in name:
        yield path / name
    yield path / f"_{model}"
    yield path / model
    yield path / "dcp_checkpoint"
    yield path / "dist_ckpt"
    yield path / "huggingface"
