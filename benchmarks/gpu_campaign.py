"""The section of the GPU suite that runs a campaign: PPO of a random Llama of about 100 M parameters.

A transition needs two workers. Where NCCL lets ranks share a GPU (2.30), one GPU holds both, and the campaign
moves from tp 2 to two units on the way as it does on two GPUs; elsewhere it runs under a fixed plan on one
GPU and the table says so.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu_moves import shares_gpu
from benchmarks.gpu_sections import Row, Size
from nereus.config import CampaignConfig

COUNT = Path(__file__).resolve().parent.parent / "examples" / "count"
STEPS, MOVE_BEFORE = 6, 3


def campaign_rows(device: torch.device, size: Size) -> list[Row]:
    """Run it; in a tiny run, only read model, prompts and plan as a run would."""
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = _make_model(Path(folder) / "model", size)
        num_gpus = min(2, torch.cuda.device_count()) if device.type == "cuda" else 2
        if num_gpus == 1 and shares_gpu(device):
            num_gpus = 2
            os.environ["NEREUS_WORKERS_PER_GPU"] = "2"
        config = CampaignConfig.model_validate(_tree(Path(folder), device.type, num_gpus, size))
        moves = "moves from tp 2 to two units" if num_gpus > 1 else "one worker: no move is possible"
        if not size.claims:
            from nereus.tasks.prepare import prepare_campaign

            prepare_campaign(config)
            return [Row(section="campaign", what="prepared, not run", note=moves)]
        return _run(config, num_parameters, moves)


def _run(config: CampaignConfig, num_parameters: int, moves: str) -> list[Row]:
    from nereus.flows.campaign import campaign
    from nereus.record.metrics import METRICS_FILE, read_records

    campaign(config)
    records = read_records(config.run_folder / METRICS_FILE)
    step_s = statistics.median(record.step_s for record in records[1:])
    plans = {record.plan["actor.training"] for record in records}
    moved = len(plans) == min(2, config.cluster.gpus)
    what = f"PPO, {num_parameters / 1e6:.0f} M parameters, {len(records)} steps"
    return [
        Row(section="campaign", what=what, value=step_s, unit="s a step", note=moves),
        Row(section="campaign", what="plans seen", value=len(plans), ok=moved, note="; ".join(sorted(plans))),
    ]


def _make_model(folder: Path, size: Size) -> int:
    """A random Llama with the count task's tokenizer; returns its number of parameters."""
    sys.path.insert(0, str(COUNT))
    try:
        from cycle import VOCAB_SIZE
        from make_model import write_tokenizer
    finally:
        sys.path.remove(str(COUNT))
    folder.mkdir(parents=True)
    write_tokenizer(folder)
    hidden = 768 if size.claims else 32
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE, hidden_size=hidden, intermediate_size=hidden * 8 // 3,
            num_hidden_layers=size.layers, num_attention_heads=12 if size.claims else 4,
            num_key_value_heads=4 if size.claims else 2, max_position_embeddings=1024,
            tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    return sum(one.numel() for one in model.parameters())


def _tree(folder: Path, device: str, num_gpus: int, size: Size) -> dict[str, Any]:
    whole: dict[str, Any] = {"tp": num_gpus, "dp": 1}
    tree: dict[str, Any] = {
        "name": "gpu-suite",
        "output": str(folder / "runs"),
        "steps": STEPS,
        "models": {"actor": str(folder / "model"), "precision": "bf16" if size.claims else "fp32"},
        "prompts": {"source": {"kind": "python", "function": f"{COUNT / 'prompts.py'}:prompts"}},
        "reward": {"kind": "python", "function": f"{COUNT / 'reward.py'}:reward"},
        "algorithm": {"kind": "ppo"},
        "batch": {"prompts": 32, "samples": 4, "micro_batch_rows": 32},
        "sampling": {"max_new_tokens": 256},
        "plan": dict.fromkeys(("actor_training", "actor_generation", "critic_training"), whole),
        "cluster": {"gpus": num_gpus, "device": device},
        "checkpoint": {"every_steps": 0},
    }
    if num_gpus > 1:
        apart = {"tp": 1, "dp": num_gpus}
        plan = dict.fromkeys(tree["plan"], apart)
        tree["changes"] = [{"before_step": MOVE_BEFORE, "plan": plan}]
    return tree
