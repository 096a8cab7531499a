"""What every engine that generates must do, against the torch engine on one rank, which is the oracle.

A case names an engine, a model and the units of one layout after another; `answers` builds each in the same
processes, pushes weights into it, and lets it answer the same calls. The `check_` functions state the claims.
Letters as in `emu.batch`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from nereus.emu.batch import PromptBatch, Sampling
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engine_limits import EngineName
from nereus.emu.engines.protocol import GenerateEngine
from nereus.emu.engines.registry import open_generator
from nereus.emu.groups import Generation
from nereus.emu.layout import Layout
from nereus.emu.serving import Serving
from nereus.emu.source import fill
from nereus.emu.stage import FromStage, StageSpec
from nereus.emu.store import StoreAddress
from nereus.emu.tensor import Box
from tests.emu.engines.generate_cases import alone, arrays, make_prompts
from tests.emu.engines.torch_cases import Random

TOLERANCE = 1e-3  # of a log-probability: other kernels, other order of sums, fp32
MODEL = DecoderConfig(
    vocab_size=67,  # engines pad it differently
    hidden_size=64,
    num_layers=3,  # splits unevenly over two stages
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,  # of those that vLLM's CPU kernels know
    intermediate_size=48,
    max_positions=256,
)
LLAMA_TIED = replace(MODEL, tied=True)
QWEN2 = replace(MODEL, family="qwen2", qkv_bias=True, head_dim=32, num_heads=2)
QWEN3 = replace(MODEL, family="qwen3", qk_norm=True, norm_eps=1e-6)
ONE_KV_HEAD = replace(MODEL, num_kv_heads=1)  # tp 2 replicates it


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Units of one layout; their ranks descend, since a layout's order is often not ascending."""

    tp: int = 1
    pp: int = 1
    units: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.units

    def layouts(self, config: DecoderConfig) -> tuple[Layout, ...]:
        size, spec = self.tp * self.pp, decoder_spec(config)
        ranks = [tuple(reversed(range(at, at + size))) for at in range(0, self.world_size, size)]
        return tuple(Layout.make(spec, tp=self.tp, pp=self.pp, ranks=each) for each in ranks)


@dataclass(frozen=True, kw_only=True)
class Generating:
    """An engine, a model, and the layouts that its processes go through."""

    engine: EngineName
    config: DecoderConfig = MODEL
    shapes: tuple[Shape, ...] = (Shape(),)

    @property
    def num_workers(self) -> int:
        return max(shape.world_size for shape in self.shapes)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One call of `generate`, after a push of the weights of this number where it is given."""

    prompts: PromptBatch
    sampling: Sampling
    weights: int | None = None


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the process held after a layout was closed, and what building and closing it took.

    `shared` is mapped from shared memory; `segments` lie there under the process's id, mapped or not.
    """

    rss_bytes: int
    num_files: int
    shared: tuple[str, ...]
    segments: tuple[str, ...]
    build_s: float
    close_s: float


class Scaled(Random):
    """Weights of a number: 0 are those of `Random`, others differ from them everywhere."""

    def __init__(self, config: DecoderConfig, number: int) -> None:
        super().__init__(config)
        self._factor = 1.0 - 0.3 * number

    def read(self, kind: str, name: str, box: Box) -> Tensor:
        return super().read(kind, name, box) * self._factor


GREEDY = Sampling(max_new_tokens=16, temperature=0.0)
DRAWN = (
    Sampling(max_new_tokens=16, seed=5),
    Sampling(max_new_tokens=16, temperature=0.7, top_p=0.8, seed=6, step=2),
    Sampling(max_new_tokens=16, temperature=1.6, top_k=5, top_p=0.9, seed=7, stop_token_ids=(3, 11)),
)


def standard_asks() -> tuple[Ask, ...]:
    """Prompts of mixed lengths, some of them equal, under every kind of sampling, before and after a push."""
    prompts = [[1 + (7 * i + 3 * j) % 66 for j in range(1 + 5 * i % 23)] for i in range(6)]
    batch = make_prompts(prompts + prompts[3:], greedy=[False] * 8 + [True], first_id=40)
    first_b, limit_b = torch.arange(9) % 5, 3 + torch.arange(9)  # rows that go on, each from where it is
    going_on = replace(batch, first_b=first_b, limit_b=limit_b)
    return (
        Ask(prompts=batch, sampling=GREEDY, weights=0),
        *(Ask(prompts=batch, sampling=sampling) for sampling in DRAWN),
        Ask(prompts=going_on, sampling=DRAWN[2]),
        Ask(prompts=batch, sampling=GREEDY, weights=1),  # the same prompts: nothing old may be reused
        Ask(prompts=batch, sampling=DRAWN[0]),
    )


def expected(config: DecoderConfig, asks: Sequence[Ask]) -> list[dict[str, Any]]:
    """The oracle's answers."""
    engine = alone(config, Scaled(config, 0))
    return [_ask(engine, config, ask, version) for version, ask in enumerate(asks)]


def answers(
    worker: int, address: StoreAddress, number: int, case: Generating, asks: Sequence[Ask]
) -> tuple[list[list[dict[str, Any]] | None], list[Held]]:
    """This worker's answers under each shape (None where it has no part), and what it held after each."""
    out: list[list[dict[str, Any]] | None] = []
    held: list[Held] = []
    for step, shape in enumerate(case.shapes):
        generation = Generation.join(
            address,
            number=number * 1000 + step,
            worker=worker,
            workers=range(case.num_workers),
            timeout_s=120,
        )
        try:
            spec = _spec(case, shape)
            groups = generation.unit_groups(spec.units, model=spec.tensors)
            began = time.perf_counter()
            if groups is None:
                out.append(None)
                dist.barrier()
                continue
            engine = open_generator(spec, groups, device=torch.device("cpu"), state=None)
            build_s = time.perf_counter() - began
            out.append([_ask(engine, case.config, ask, version) for version, ask in enumerate(asks)])
            dist.barrier()
            began = time.perf_counter()
            engine.close()
            held.append(holdings(build_s, time.perf_counter() - began))
        finally:
            generation.leave()
    return out, held


def holdings(build_s: float, close_s: float) -> Held:
    """What this process holds now."""
    process = psutil.Process()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return Held(
        rss_bytes=process.memory_info().rss,
        num_files=process.num_fds(),
        shared=tuple(sorted({line.split()[5] for line in maps if "/dev/shm/" in line})),
        segments=tuple(sorted(name for name in os.listdir("/dev/shm") if str(os.getpid()) in name)),
        build_s=build_s,
        close_s=close_s,
    )


def _spec(case: Generating, shape: Shape) -> StageSpec:
    return StageSpec(
        name="actor.generation",
        role="generation",
        model=case.config,
        units=shape.layouts(case.config),
        origin=FromStage(stage="actor.training"),
        engine=case.engine,
        serving=Serving(longest_tokens=64, rows=5),  # fewer than the rows of a call
    )


def _ask(engine: GenerateEngine, config: DecoderConfig, ask: Ask, version: int) -> dict[str, Any]:
    if ask.weights is not None:
        fill(engine.state, Scaled(config, ask.weights), {"theta": "theta"})
        engine.refresh()
    return arrays(engine.generate(ask.prompts, ask.sampling, version))


def check_same_rollouts(found: dict[str, Any], oracle: dict[str, Any]) -> None:
    """Tokens, lengths, ends and ids are the oracle's; log-probabilities are within the tolerance."""
    for field in ("tokens", "prompt_lens", "lens", "stopped", "ids", "version"):
        np.testing.assert_array_equal(found[field], oracle[field], err_msg=field)
    np.testing.assert_allclose(found["logprobs"], oracle["logprobs"], atol=TOLERANCE, rtol=0)


def check_conforms(
    case: Generating, results: Sequence[list[list[dict[str, Any]] | None]], oracle: Sequence[dict[str, Any]]
) -> None:
    """Every rank of every unit gives the oracle's answers under every shape."""
    for step, shape in enumerate(case.shapes):
        given = [result[step] for result in results]
        assert [each is not None for each in given] == [
            worker < shape.world_size for worker in range(case.num_workers)
        ], "exactly the workers of the shape answer"
        for answered in given:
            for found, wanted in zip(answered or (), oracle if answered else (), strict=True):
                check_same_rollouts(found, wanted)
