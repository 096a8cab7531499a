"""Tokens a second of the generation engines, and a weight push against a reload from disk, on this machine.

    .venv-vllm/bin/python benchmarks/generation.py [MODEL] [--rows 64] [--tokens 64] [--out FILE]

One engine after the other in this process, one thread each: vLLM, the torch engine, and transformers' own
`generate`. All answer the same prompts with the same number of tokens (nothing stops a response), sampled at
temperature 1. Every engine answers once unmeasured and then `--repeats` times; wall and CPU seconds are those
of the median. A push copies weights that lie in the trainer's arena into the engine's, then takes them into
use; vLLM's own reload reads the folder's safetensors. MODEL is a folder, or a name of the planner's list,
whose shape is then filled with random weights; without it a small Llama is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from nereus.emu.batch import PromptBatch, Sampling
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engine_limits import EngineName
from nereus.emu.engines.protocol import GenerateEngine
from nereus.emu.engines.registry import open_generator
from nereus.emu.hf_folder import HFSource, write_hf_folder
from nereus.emu.layout import Layout
from nereus.emu.serving import Serving
from nereus.emu.source import fill
from nereus.emu.stage import FromStage, StageSpec
from nereus.emu.unit_groups import UnitGroups
from nereus.planner.models import model_shape
from tests.emu.engines.torch_cases import Random

SMALL = DecoderConfig(
    vocab_size=512,
    hidden_size=256,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    intermediate_size=688,
    max_positions=1024,
)
PROMPT_TOKENS = 32
Timed = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engines", nargs="+", default=["torch", "transformers", "vllm"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(options.model or "")
        if options.model is None or not folder.is_dir():
            shape = SMALL if options.model is None else model_shape(options.model).with_dtype("fp32")
            folder = Path(made) / "model"
            write_hf_folder(Random(shape), shape, folder)
        config = HFSource(folder).config.with_dtype("fp32")
        prompts = prompt_rows(config, options.rows)
        sampling = Sampling(max_new_tokens=options.tokens)
        found: dict[str, object] = {
            "model": f"{config.num_parameters:,} parameters, fp32",
            "rows": options.rows,
            "prompt tokens": PROMPT_TOKENS,
            "new tokens": options.tokens,
        }
        for engine in options.engines:
            if engine == "transformers":
                found[engine] = transformers_rate(folder, prompts, sampling, options.repeats)
            else:
                found[engine] = engine_rate(engine, config, folder, prompts, sampling, options.repeats)
            print(engine, json.dumps(found[engine]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def prompt_rows(config: DecoderConfig, num_rows: int) -> PromptBatch:
    """Different prompts of one length."""
    draw = torch.Generator().manual_seed(0)
    return PromptBatch(
        tokens_bs=torch.randint(3, config.vocab_size, (num_rows, PROMPT_TOKENS), generator=draw),
        lens_b=torch.full((num_rows,), PROMPT_TOKENS),
        sample_ids_b=torch.arange(num_rows),
        greedy_b=torch.zeros(num_rows, dtype=torch.bool),
    )


def engine_rate(
    engine: EngineName,
    config: DecoderConfig,
    folder: Path,
    prompts: PromptBatch,
    sampling: Sampling,
    repeats: int,
) -> Timed:
    """Tokens a second, and the seconds of building, of a push and, with vLLM, of its own reload."""
    layout = Layout.make(decoder_spec(config), tp=1, pp=1, ranks=(0,))
    spec = StageSpec(
        name="actor.generation",
        role="generation",
        model=config,
        units=(layout,),
        origin=FromStage(stage="actor.training"),
        engine=engine,
        serving=Serving(longest_tokens=PROMPT_TOKENS + sampling.max_new_tokens, rows=prompts.num_rows),
    )
    import_s = timed(lambda: __import__("vllm"), 1)["wall_s"] if engine == "vllm" else 0.0
    opened: list[GenerateEngine] = []
    groups, device = UnitGroups.alone(layout), torch.device("cpu")
    build = timed(lambda: opened.append(open_generator(spec, groups, device=device, state=None)), 1)
    generator = opened[0]
    fill(generator.state, HFSource(folder), {"theta": "theta"})
    trained = generator.state["theta"].flat.clone()

    def push() -> None:
        generator.state["theta"].flat.copy_(trained)
        generator.refresh()

    pushed = timed(push, repeats)
    out = rates(timed(lambda: generator.generate(prompts, sampling, 0), repeats), prompts, sampling)
    out |= {"import_s": import_s, "build_s": build["wall_s"], "build_cpu_s": build["cpu_s"]}
    out |= {"push_s": pushed["wall_s"], "push_cpu_s": pushed["cpu_s"]}
    if engine == "vllm":
        out |= reload_from_disk(generator, folder, repeats)
    closed = timed(generator.close, 1)
    return out | {"close_s": closed["wall_s"], "close_cpu_s": closed["cpu_s"]}


def reload_from_disk(generator: GenerateEngine, folder: Path, repeats: int) -> Timed:
    """vLLM's own `reload_weights` from safetensors."""
    from nereus.emu.engines.vllm.generate import VllmGenerator

    assert isinstance(generator, VllmGenerator)
    # The engine was made without weights to read; its loader reads a folder from now on.
    llm = generator.llm
    llm.llm_engine.vllm_config.load_config.load_format = "safetensors"

    def reload() -> None:
        with generator.entered():
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            llm.reset_prefix_cache()

    took = timed(reload, repeats)
    return {"reload_from_disk_s": took["wall_s"], "reload_from_disk_cpu_s": took["cpu_s"]}


def transformers_rate(folder: Path, prompts: PromptBatch, sampling: Sampling, repeats: int) -> Timed:
    """The same rows by `model.generate` with a static batch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    mask_bs = torch.ones_like(prompts.tokens_bs)

    def generate() -> None:
        with torch.inference_mode():
            model.generate(
                prompts.tokens_bs,
                attention_mask=mask_bs,
                do_sample=True,
                top_k=0,
                max_new_tokens=sampling.max_new_tokens,
                min_new_tokens=sampling.max_new_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )

    return rates(timed(generate, repeats), prompts, sampling)


def rates(took: Timed, prompts: PromptBatch, sampling: Sampling) -> Timed:
    """New tokens a second of wall time and of CPU time."""
    tokens = prompts.num_rows * sampling.max_new_tokens
    return {
        "tokens_per_s": tokens / took["wall_s"],
        "tokens_per_cpu_s": tokens / took["cpu_s"],
        "wall_s": took["wall_s"],
        "cpu_s": took["cpu_s"],
    }


def timed(call: Callable[[], object], repeats: int) -> Timed:
    """Median wall and CPU seconds; with more than one repeat the first call is not counted."""
    walls, cpus = [], []
    for number in range(repeats + (repeats > 1)):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        if number or repeats == 1:
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
    return {"wall_s": statistics.median(walls), "cpu_s": statistics.median(cpus)}


if __name__ == "__main__":
    main()
