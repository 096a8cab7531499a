"""What processes of FSDP2 and DeepSpeed do for tests of their checkpoints: save and load as trainers do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh

WORLD = 2
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
LEARNING_RATE = 1e-2


@contextmanager
def world(rank: int, store: str) -> Iterator[None]:
    """Two processes of gloo."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


@contextmanager
def deepspeed_world(rank: int, store: str) -> Iterator[Any]:
    """As `world`, with DeepSpeed, which has forgotten the worlds that this process had before."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    import deepspeed

    from nereus.emu.engines.deepspeed import process

    process._write(process._fresh())
    with world(rank, store):
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        yield deepspeed


def transformers_model(folder: str, head: str) -> nn.Module:
    """The model of a folder in float32; for `value` a token classifier of its shape with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    if head == "value":
        config = AutoConfig.from_pretrained(folder, num_labels=1)
        made: nn.Module = AutoModelForTokenClassification.from_config(config)
    else:
        made = AutoModelForCausalLM.from_pretrained(folder)
    return made.float()


def fsdp2(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model cut as verl cuts it under strategy=fsdp2, and its optimizer."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Steps on tokens that differ by rank."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        tokens_bs = torch.randint(0, 32, (2, 6), generator=draw)
        optimizer.zero_grad()
        model(tokens_bs).logits.square().mean().backward()
        if hasattr(model, "score"):  # ours has no bias
            model.score.bias.grad.zero_()
        optimizer.step()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Weights and moments by kind and name, gathered by torch; on rank 0."""
    weights, state = get_state_dict(model, optimizer, options=FULL)
    if dist.get_rank():
        return {}
    moments = {
        kind: {name: one[kind] for name, one in state["state"].items()} for kind in ("exp_avg", "exp_avg_sq")
    }
    return {"theta": dict(weights), **moments}


def save_as_verl(rank: int, store: str, folder: str, model: str, head: str) -> dict[str, Any]:
    """Train two steps and write a rank's files as verl's manager does; the whole state, from rank 0."""
    with world(rank, store):
        made, optimizer = fsdp2(transformers_model(model, head))
        train(made, optimizer, 2)
        ending = f"world_size_{WORLD}_rank_{rank}.pt"
        torch.save(made.state_dict(), Path(folder) / f"model_{ending}")
        torch.save(optimizer.state_dict(), Path(folder) / f"optim_{ending}")
        return numbers(whole_state(made, optimizer))


def load_as_verl(rank: int, store: str, folder: str, model: str, head: str) -> dict[str, Any]:
    """Load a rank's files as verl's manager does, into a model with other weights, and train on."""
    with world(rank, store):
        torch.manual_seed(7)
        made = transformers_model(model, head)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.normal_()
        made, optimizer = fsdp2(made)
        ending = f"world_size_{WORLD}_rank_{rank}.pt"
        made.load_state_dict(torch.load(Path(folder) / f"model_{ending}", weights_only=False), strict=True)
        optimizer.load_state_dict(torch.load(Path(folder) / f"optim_{ending}", weights_only=False))
        torch.load(Path(folder) / f"extra_state_{ending}", weights_only=False)
        loaded = numbers(whole_state(made, optimizer))
        train(made, optimizer, 1)
        return loaded


def numbers(state: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Tensors as arrays, which travel between processes."""
    return {kind: {name: t.float().numpy() for name, t in named.items()} for kind, named in state.items()}


def save_as_openrlhf(rank: int, store: str, folder: str, model: str, stage: int) -> None:
    """Train two steps under DeepSpeed and save as OpenRLHF does.

    The moments are twice the weights in fp32 and their squares, so that whoever knows these knows them.
    """
    with deepspeed_world(rank, store) as deepspeed:
        made = transformers_model(model, "lm").bfloat16()
        decayed = [p for p in made.parameters() if p.dim() > 1]
        others = [p for p in made.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "steps_per_print": None,
        }
        engine, *_ = deepspeed.initialize(
            model=made,
            optimizer=torch.optim.AdamW(groups, lr=LEARNING_RATE),
            config=settings,
            dist_init_required=False,
        )
        draw = torch.Generator().manual_seed(rank)
        for _ in range(2):
            tokens_bs = torch.randint(0, 32, (2, 6), generator=draw)
            engine.backward(engine(tokens_bs).logits.float().square().mean())
            engine.step()
        inner = engine.optimizer
        flats = inner.fp32_partitioned_groups_flat if stage == 3 else inner.single_partition_of_fp32_groups
        for flat in flats:
            state = inner.optimizer.state[flat]
            state["exp_avg"].copy_(2 * flat.detach())
            state["exp_avg_sq"].copy_(flat.detach().square())
        engine.save_checkpoint(folder, tag="global_step2", client_state={"consumed_samples": 8})
        engine.destroy()
