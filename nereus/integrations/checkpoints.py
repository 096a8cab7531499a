"""Checkpoints that verl and OpenRLHF load, from any source of logical tensors.

    verl      ROOT/latest_checkpointed_iteration.txt
              ROOT/global_step_N/actor/
                  huggingface/                        a model folder: actor_rollout_ref.model.path
                  model_world_size_W_rank_R.pt        FSDP2 shards for W ranks: trainer.resume_mode=auto
                  optim_..., extra_state_...          with moments; no schedule of the learning rate
    OpenRLHF  ROOT/global_stepN_hf/                   a model folder: --pretrain
              ROOT/_actor/latest                      the tag: --load_checkpoint with --ckpt_path ROOT
              ROOT/_actor/global_stepN/               with moments: DeepSpeed's files (`zero_files`)

Every tensor of verl's shards is a DTensor cut by rows, as FSDP2 has it. Such files are for the torch release
that writes them and later ones, since the form of a DTensor changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from nereus.emu.decoder import EMBED, HEAD, DecoderConfig, decoder_spec
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.hf_folder import write_hf_folder
from nereus.emu.source import LogicalSource
from nereus.emu.tensor import Box, whole
from nereus.emu.tensor_writer import write_text
from nereus.errors import CheckpointError, explain
from nereus.integrations.zero_files import MOMENTS, ZeroCut, write_zero

NOT_DECAYED = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")  # OpenRLHF's
DEFAULT_GROUP = "0"  # torch's name of the group of all ranks
ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "maximize": False}
ADAMW |= {"foreach": None, "capturable": False, "differentiable": False, "fused": None}
ADAMW |= {"decoupled_weight_decay": True}


def write_openrlhf(
    source: LogicalSource, config: DecoderConfig, root: Path, *, step: int, origin: Path | None = None
) -> Path:
    """Write what OpenRLHF writes with --save_hf_ckpt; returns the folder to give it by --pretrain."""
    folder = root / f"global_step{step}_hf"
    write_hf_folder(source, config, folder, origin=origin)
    return folder


def write_openrlhf_state(
    source: LogicalSource,
    config: DecoderConfig,
    root: Path,
    *,
    step: int,
    cut: ZeroCut,
    adam_steps: int,
    learning_rate: float,
    settings: AdamW,
    model: str = "actor",
    epoch: int = 0,
    prompts: int = 0,
) -> Path:
    """Write what OpenRLHF resumes from with --load_checkpoint; returns the folder to give it by --ckpt_path.

    The job goes on after `step` in its pass number `epoch` over the prompts. Where in the pass it stands is
    the state of a data loader that only OpenRLHF has, in an order of its own: the pass begins anew.
    Raises CheckpointError for step 0, which OpenRLHF takes for a job that has not begun, and as `write_zero`.
    """
    if step < 1:
        raise CheckpointError(
            explain(
                f"cannot write a checkpoint for OpenRLHF into {root}",
                values="step 0",
                rule="OpenRLHF pushes the weights that it loads to its generation engines from step 1 on",
                remedy="say by --step which one it counts as",
            )
        )
    spec = decoder_spec(config)
    names = [name for name in stored_names(config) if name in spec.by_name]
    kept = [name for name in names if any(part in name for part in NOT_DECAYED)]
    decayed = [name for name in names if name not in set(kept)]
    counters = {
        "episode": epoch,
        "global_step": step,
        "total_consumed_prompts": prompts,
        "data_loader_state_dict": {},
    }
    tag = f"global_step{step}"
    write_zero(
        source,
        config,
        root / f"_{model}" / tag,
        cut=cut,
        groups=((decayed, settings.weight_decay), (kept, 0.0)),
        adam_steps=adam_steps,
        learning_rate=learning_rate,
        settings=settings,
        client_state=counters if model == "actor" else {},
    )
    write_text(root / f"_{model}" / "latest", tag)
    return root


def write_verl(
    source: LogicalSource,
    config: DecoderConfig,
    root: Path,
    *,
    step: int,
    world_size: int,
    model: str = "actor",
    adam_steps: int | None = None,
    learning_rate: float = 1e-6,
    origin: Path | None = None,
    device: str = "cuda",
) -> Path:
    """Write a checkpoint that verl resumes from under FSDP2 on `world_size` GPUs; returns the model's folder.

    Moments go in where the source has them and `adam_steps` is given. `device` is the kind of verl's mesh.
    Weights are those in float32 where there are such. Raises CheckpointError for a mixture of experts.
    """
    folder = root / f"global_step_{step}" / model
    if config.experts is not None:
        raise CheckpointError(
            explain(
                f"cannot write FSDP shards into {folder}",
                values="a mixture of experts",
                rule="transformers fuses the experts of a layer, and their moments with them",
                remedy="write a model folder (--for transformers)",
            )
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_hf_folder(source, config, folder / "huggingface", origin=origin)
    kinds = source.kinds()
    weights = "master" if "master" in kinds else "theta"
    has_moments = adam_steps is not None and set(MOMENTS) <= set(kinds)
    names = stored_names(config)
    for rank in range(world_size):
        ending = f"world_size_{world_size}_rank_{rank}.pt"
        shards = _Shards(source, config, _mesh(device, world_size, rank), rank)
        torch.save({name: shards.of(weights, name) for name in names}, folder / f"model_{ending}")
        if has_moments:
            assert adam_steps is not None
            state = shards.optimizer(names, adam_steps, learning_rate)
            torch.save(state, folder / f"optim_{ending}")
            torch.save({"lr_scheduler": None}, folder / f"extra_state_{ending}")
    settings = {"FSDP_version": 2, "world_size": world_size}
    write_text(folder / "fsdp_config.json", json.dumps(settings, indent=4))
    write_text(root / "latest_checkpointed_iteration.txt", str(step))
    return folder


def _mesh(device: str, world_size: int, rank: int) -> DeviceMesh:
    """verl's mesh as a rank has it, without processes."""
    ranks = torch.arange(world_size)
    mesh = DeviceMesh(device, ranks, mesh_dim_names=("fsdp",), _init_backend=False, _rank=rank)
    # Whoever loads it finds the group of this name.
    mesh._dim_group_names = [DEFAULT_GROUP]  # type: ignore[list-item]
    return mesh


def stored_names(config: DecoderConfig) -> tuple[str, ...]:
    """The names in the state of transformers' model, in the order of its parameters; a tied head is one."""
    settings = config.to_hf()
    shape = AutoConfig.for_model(**settings)
    made: Any = AutoModelForTokenClassification if config.head == "value" else AutoModelForCausalLM
    if config.head == "value":
        shape.num_labels = 1
    with torch.device("meta"):
        return tuple(made.from_config(shape).state_dict())


class _Shards:
    """One rank's part of every tensor."""

    def __init__(self, source: LogicalSource, config: DecoderConfig, mesh: DeviceMesh, rank: int) -> None:
        self._source, self._spec, self._mesh, self._rank = source, decoder_spec(config), mesh, rank

    def of(self, kind: str, name: str) -> DTensor:
        """The rows of a tensor that this rank holds: equal parts, the last ones shorter."""
        if name not in self._spec.by_name:
            name = EMBED if name == HEAD else name
        if name not in self._spec.by_name:  # a head's bias, which ours has not
            return self._made(torch.zeros(1 if self._rank == 0 else 0), (1,))
        shape = self._spec.by_name[name].shape
        size = -(-shape[0] // self._mesh.size())
        rows = (min(self._rank * size, shape[0]), min((self._rank + 1) * size, shape[0]))
        box: Box = (rows, *whole(shape)[1:])
        return self._made(self._source.read(kind, name, box).float().clone(), shape)

    def _made(self, local: Tensor, shape: tuple[int, ...]) -> DTensor:
        stride = torch.empty(shape, device="meta").stride()
        meta = TensorMeta(torch.Size(shape), stride, local.dtype)
        spec = DTensorSpec(self._mesh, (Shard(0),), tensor_meta=meta)
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def optimizer(self, names: tuple[str, ...], adam_steps: int, learning_rate: float) -> Mapping[str, Any]:
        """The state of torch's AdamW over the model's parameters, of which a tied head is none of its own."""
        parameters = [name for name in names if not (name == HEAD and HEAD not in self._spec.by_name)]
        state = {
            number: {
                "step": torch.tensor(float(adam_steps)),
                **{kind: self.of(kind, name) for kind in MOMENTS},
            }
            for number, name in enumerate(parameters)
        }
        group = {"lr": learning_rate, **ADAMW, "params": list(range(len(parameters)))}
        return {"state": state, "param_groups": [group]}
