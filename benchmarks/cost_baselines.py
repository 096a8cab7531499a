"""Ask aiconfigurator and llm-analysis for the same rows: JSON rows in on stdin, JSON answers out on stdout.

Runs under the interpreter of an environment of its own, which holds both packages; nothing of Nereus is
imported. Each input line is {"tool": ..., "row": {...}}; each output line is {"value": seconds or null,
"why": text}.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from typing import Any


def aiconfigurator_tpot(row: dict[str, Any]) -> float:
    """Seconds per output token of an aggregated engine at its default version, as the tool's own command
    gives it.
    """
    from aiconfigurator.cli.api import cli_estimate

    result = cli_estimate(
        row["model"],
        row["system"],
        backend_name=row["backend"],
        isl=row["isl"],
        osl=row["osl"],
        batch_size=row["batch"],
        tp_size=row["tp"],
        gemm_quant_mode="fp8",
    )
    return float(result.tpot) * 1e-3


def llm_analysis_tpot(row: dict[str, Any]) -> float:
    """Seconds per output token: its closed form over the tool's default efficiencies, 8-bit weights."""
    from llm_analysis.analysis import LLMAnalysis

    analysis = LLMAnalysis(*llm_analysis_setup(row, row["tp"], 1, 1, "w8a8e16"))
    answer = analysis.inference(
        batch_size_per_gpu=row["batch"], seq_len=row["isl"], num_tokens_to_generate=row["osl"]
    )
    # All prompts are computed once while each sequence makes its output: the tool's own latency per token.
    return float(answer["decode_latency"] + answer["prefill_latency"] / row["osl"])


def llm_analysis_iteration(row: dict[str, Any]) -> float:
    """Seconds of one training iteration: its closed form; `efficiency` is the one constant that it has."""
    from llm_analysis.analysis import ActivationRecomputation, LLMAnalysis

    setup = llm_analysis_setup(row, row["tp"], row["pp"], row["dp"], row["dtype"])
    analysis = LLMAnalysis(*setup, flops_efficiency=row["efficiency"])
    answer = analysis.training(
        batch_size_per_gpu=row["micro_batch"],
        global_batch_size=row["global_batch"],
        seq_len=row["seq"],
        activation_recomputation=ActivationRecomputation(row["recompute"]),
    )
    return float(answer["latency_per_iter"])


def llm_analysis_peak(row: dict[str, Any]) -> float:
    """Peak bytes of training: state and activations of its closed form."""
    from llm_analysis.analysis import ActivationRecomputation, LLMAnalysis

    analysis = LLMAnalysis(*llm_analysis_setup(row, row["tp"], row["pp"], row["dp"], row["dtype"]))
    answer = analysis.training(
        batch_size_per_gpu=row["micro_batch"],
        global_batch_size=row["global_batch"],
        seq_len=row["seq"],
        activation_recomputation=ActivationRecomputation(row["recompute"]),
        flash_attn=False,
    )
    return float(answer["(weight+op_state+grad+act)_memory_per_gpu"])


def llm_analysis_setup(row: dict[str, Any], tp: int, pp: int, dp: int, dtype: str) -> tuple[Any, ...]:
    """(model, gpu, dtype, parallelism) configurations of llm-analysis."""
    from llm_analysis.config import (
        GPUConfig,
        ModelConfig,
        ParallelismConfig,
        get_dtype_config_by_name,
    )

    shape, gpu = row["shape"], row["gpu"]
    # The tool knows blocks of two matrices; a gated block's three have the weights of two 1.5 times as wide.
    width = int(shape["intermediate_size"] * (1.5 if shape["gated"] else 1))
    model = ModelConfig(
        name=row["model"],
        num_layers=shape["num_layers"],
        n_head=shape["num_heads"],
        hidden_dim=shape["hidden_size"],
        vocab_size=shape["vocab_size"],
        max_seq_len=131072,
        num_key_value_heads=shape["num_kv_heads"],
        ffn_embed_dim=width,
        expansion_ratio=width / shape["hidden_size"],
    )
    device = GPUConfig(
        name=gpu["name"],
        mem_per_GPU_in_GB=100000,
        hbm_bandwidth_in_GB_per_sec=gpu["memory_bandwidth_Bps"] / 1e9,
        intra_node_bandwidth_in_GB_per_sec=gpu["scale_up_Bps"] / 1e9,
        intra_node_min_message_latency=8e-6,
        peak_fp16_TFLOPS=gpu["peak_flops"] / 1e12,
        peak_i8_TFLOPS=2 * gpu["peak_flops"] / 1e12,
        peak_i4_TFLOPS=4 * gpu["peak_flops"] / 1e12,
        inter_node_bandwidth_in_GB_per_sec=gpu["scale_out_Bps"] / 1e9,
    )
    parallel = ParallelismConfig(tp_size=tp, pp_size=pp, dp_size=dp)
    return model, device, get_dtype_config_by_name(dtype), parallel


TOOLS = {
    "aiconfigurator.tpot": aiconfigurator_tpot,
    "llm-analysis.tpot": llm_analysis_tpot,
    "llm-analysis.iteration": llm_analysis_iteration,
    "llm-analysis.peak": llm_analysis_peak,
}


def main() -> None:
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        request = json.loads(line)
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                answer = {"value": TOOLS[request["tool"]](request["row"]), "why": ""}
            except Exception as error:
                answer = {"value": None, "why": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
