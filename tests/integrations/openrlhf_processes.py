"""What processes of DeepSpeed do for tests: load a checkpoint and train on, set up as OpenRLHF sets it up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nereus.emu.batch import TrainBatch
from nereus.emu.engines.torch.optimizer import AdamW
from tests.emu.fsdp_processes import WORLD, deepspeed_world

NOT_DECAYED = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")
KINDS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An OpenRLHF job's settings, as far as they bear on what it loads."""

    model: str
    stage: int
    learning_rate: float
    settings: AdamW
    dtype: str = "fp32"
    head: str = "lm"
    scheduler_steps: int = 100
    sub_group_size: int = 10**9


def resume(rank: int, store: str, folder: str, job: Job, batch: TrainBatch | None) -> dict[str, Any]:
    """Load the newest checkpoint in `folder`, and with a batch make one step, a share of its rows a rank.

    Returns what DeepSpeed itself says of its state: names to arrays under `loaded` and `stepped`, by kind.
    """
    with deepspeed_world(rank, store) as deepspeed:
        engine, scheduler = _engine(deepspeed, job)
        path, client = engine.load_checkpoint(folder)
        out: dict[str, Any] = {
            "path": path,
            "client": {key: value for key, value in client.items() if isinstance(value, int | dict)},
            "groups": [
                {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
                for group in engine.optimizer.param_groups
            ],
            "epoch": scheduler.last_epoch,
            "steps": engine.global_steps,
            "loaded": held(engine),
        }
        if batch is not None:
            loss = WORLD * share_of_loss(engine, batch, rank)  # DeepSpeed takes the mean over ranks
            engine.backward(loss)
            engine.step()
            out["stepped"] = held(engine)
            out["next_rate"] = engine.get_lr()[0]
        engine.destroy()
        return out


def _engine(deepspeed: Any, job: Job) -> tuple[Any, Any]:
    from transformers.optimization import get_scheduler

    made = _model(job)
    named = [(name, p) for name, p in made.named_parameters() if p.requires_grad]
    kept = [p for name, p in named if any(part in name for part in NOT_DECAYED)]
    decayed = [p for name, p in named if not any(part in name for part in NOT_DECAYED)]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": job.dtype == "bf16"},
        "gradient_clipping": job.settings.max_gradient_norm or 0.0,
        "zero_optimization": {
            "stage": job.stage,
            "stage3_param_persistence_threshold": 50,  # the smallest parameters stay on every rank
            "sub_group_size": job.sub_group_size,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "optimizer": {
            "type": "AdamW",
            # Other settings than the checkpoint's: DeepSpeed takes those from the files.
            "params": {"lr": job.learning_rate, "betas": [0.5, 0.6], "torch_adam": True},
        },
    }
    factory = partial(
        get_scheduler,
        "cosine_with_min_lr",
        num_warmup_steps=0,
        num_training_steps=job.scheduler_steps,
        scheduler_specific_kwargs={"min_lr_rate": 0.1},
    )
    engine, _, _, scheduler = deepspeed.initialize(
        model=made,
        model_parameters=[
            {"params": decayed, "weight_decay": job.settings.weight_decay},
            {"params": kept, "weight_decay": 0.0},
        ],
        lr_scheduler=factory,
        config=config,
        dist_init_required=False,
    )
    return engine, scheduler


def _model(job: Job) -> nn.Module:
    """The folder's architecture with numbers that are not the checkpoint's."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(7)
    config = AutoConfig.from_pretrained(job.model)
    if job.head == "value":  # names and shapes of OpenRLHF's critic: `model.` and `score.weight`
        config.num_labels = 1
        made: nn.Module = AutoModelForSequenceClassification.from_config(config)
    else:
        made = AutoModelForCausalLM.from_config(config)
    return made.bfloat16() if job.dtype == "bf16" else made.float()


def held(engine: Any) -> dict[str, dict[str, Any]]:
    """Weights of the module, and fp32 weights and moments, whole, as DeepSpeed's own functions give them."""
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # else moments are known from a step on
    out: dict[str, dict[str, Any]] = {kind: {} for kind in ("theta", "master", *KINDS)}
    for name, parameter in engine.module.named_parameters():
        with zero.GatheredParameters([parameter]):
            out["theta"][name] = parameter.detach().float().clone().numpy()
        out["master"][name] = safe_get_full_fp32_param(parameter).detach().clone().numpy()
        for kind in KINDS:
            out[kind][name] = safe_get_full_optimizer_state(parameter, kind).detach().clone().numpy()
    return out


def share_of_loss(engine: Any, batch: TrainBatch, rank: int) -> Tensor:
    """A rank's share of `TokenLoss` without entropy, from the logits of transformers' model."""
    size = batch.batch.num_rows // WORLD
    mine = batch.select(range(rank * size, (rank + 1) * size))
    assert dist.get_world_size() == WORLD
    tokens_bs, mask_bt = mine.batch.tokens_bs, mine.mask_bt
    logits_bsv = engine(tokens_bs).logits.float()
    logprobs_bs = logits_bsv[:, :-1].log_softmax(-1).gather(-1, tokens_bs[:, 1:, None])[..., 0]
    at_bt = mine.batch.prompt_lens_b[:, None] - 1 + torch.arange(mask_bt.shape[1])
    logprobs_bt = logprobs_bs.gather(1, at_bt.clamp(max=logprobs_bs.shape[1] - 1))
    assert mine.advantages_bt is not None
    each_bt = logprobs_bt * mine.advantages_bt + 0.05 * logprobs_bt.square()
    return (each_bt * mask_bt).sum() / batch.mask_bt.sum()
