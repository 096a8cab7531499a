"""A program: save a small GPT of Megatron-core by tensor parallelism on the CPU, with its own logits.

python megatron_save.py RANK WORLD FOLDER STORE_FILE
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class ToCpu(TorchFunctionMode):
    """Megatron names the device cuda in places; here that means the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        return func(*args, **kwargs)


def main(rank: int, world: int, folder: Path, store: Path) -> None:
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_, **__: None
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    # Dropout is off, so the random streams of CUDA are not needed.
    get_cuda_rng_tracker().fork = lambda *_: nullcontext()
    config = TransformerConfig(
        num_layers=3,
        hidden_size=32,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=48,
        kv_channels=4,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        tensor_model_parallel_size=world,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layernorm_epsilon=1e-5,
    )
    torch.manual_seed(3)
    with ToCpu():
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=64,
            max_sequence_length=64,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            parallel_output=False,
        )
        dist_checkpointing.save(model.sharded_state_dict(), str(folder))
        tokens = torch.arange(12).view(1, 12)
        mask = torch.triu(torch.ones(1, 1, 12, 12, dtype=torch.bool), 1)
        with torch.no_grad():
            logits = model(tokens, tokens, mask)
    if rank == 0:
        torch.save(logits, folder / "logits.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
