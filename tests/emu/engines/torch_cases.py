"""Small models, batches and losses for tests of the torch engine, and what its worker processes run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.arena import Arena
from nereus.emu.batch import Scores, TokenBatch, TrainBatch, TrainMetrics
from nereus.emu.decoder import DecoderConfig, Experts, Rope, decoder_spec
from nereus.emu.engines.torch.engine import TorchEngine
from nereus.emu.engines.torch.forward import through_stage
from nereus.emu.engines.torch.model import final_norm, full_logits
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.engines.torch.packing import pack
from nereus.emu.engines.torch.score import Pipe
from nereus.emu.groups import Generation
from nereus.emu.hf_folder import HFSource
from nereus.emu.layout import Layout
from nereus.emu.lora import trained_part
from nereus.emu.source import LogicalSource, fill
from nereus.emu.store import StoreAddress
from nereus.emu.tensor import Box
from nereus.emu.unit_groups import UnitGroups
from tests.emu.processes import Workers

SMALL = DecoderConfig(
    vocab_size=67,  # pads at tp 2 and 4
    hidden_size=32,
    num_layers=3,  # splits unevenly over two stages
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,  # not hidden / heads
    intermediate_size=48,
    max_positions=512,
)
LLAMA = replace(
    SMALL,
    rope=Rope(theta=1e4, kind="llama3", factor=8.0, low_freq_factor=1.0, original_max_positions=32),
)
QWEN2 = replace(
    SMALL, family="qwen2", tied=True, qkv_bias=True, head_dim=8
)  # transformers ignores head_dim here
QWEN3 = replace(SMALL, family="qwen3", qk_norm=True, norm_eps=1e-6)
QWEN3_MOE = replace(
    QWEN3, family="qwen3_moe", intermediate_size=20, experts=Experts(num=8, per_token=3, normalized=False)
)
MIXTRAL = replace(SMALL, family="mixtral", intermediate_size=24, experts=Experts(num=4, per_token=2))
ADAM = AdamW(eps=1e-5, weight_decay=0.01, max_gradient_norm=0.5)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model under a layout: `units` replicas of tp x pp x ep x cp ranks. `folder` replaces the random
    weights.
    """

    config: DecoderConfig
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    units: int = 1
    layers: tuple[int, ...] | None = None
    recompute: bool = False
    optimizer: AdamW | None = ADAM
    router_balance: float = 0.0
    folder: str | None = None

    @property
    def world_size(self) -> int:
        return self.unit_size * self.units

    @property
    def unit_size(self) -> int:
        return self.tp * self.pp * self.ep * self.cp

    def layout(self, unit: int) -> Layout:
        """The unit's layout; its ranks descend, since a layout's order is often not ascending."""
        size = self.unit_size
        return Layout.make(
            decoder_spec(self.config),
            tp=self.tp,
            pp=self.pp,
            ep=self.ep,
            cp=self.cp,
            ranks=tuple(reversed(range(unit * size, (unit + 1) * size))),
            layers=self.layers,
        )


class Random:
    """Reproducible weights of any model, the same in every process."""

    def __init__(self, config: DecoderConfig) -> None:
        self.tensors: dict[str, Tensor] = {}
        for number, spec in enumerate(decoder_spec(config).tensors):
            noise = torch.randn(spec.shape, generator=torch.Generator().manual_seed(number))
            self.tensors[spec.name] = 1.0 + 0.1 * noise if "norm" in spec.name else 0.2 * noise

    def kinds(self) -> tuple[str, ...]:
        return ("theta",)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, kind: str, name: str, box: Box) -> Tensor:
        return self.tensors[name][tuple(slice(lo, hi) for lo, hi in box)]


def make_batch(num_rows: int = 7, *, vocab_size: int = 67, seed: int = 0) -> TrainBatch:
    """Rows of mixed lengths: one without a response, one whose tokens do not count."""
    draw = torch.Generator().manual_seed(seed)
    prompt_b = torch.randint(1, 7, (num_rows,), generator=draw)
    response_b = torch.randint(1, 12, (num_rows,), generator=draw)
    if num_rows > 2:
        response_b[1] = 0
    width = int((prompt_b + response_b).max())
    tokens_bs = torch.randint(0, vocab_size, (num_rows, width), generator=draw)
    tokens_bs[torch.arange(width) >= (prompt_b + response_b)[:, None]] = 0
    batch = TokenBatch(tokens_bs=tokens_bs, prompt_lens_b=prompt_b, response_lens_b=response_b)
    mask_bt = batch.response_mask().float()
    if num_rows > 2:
        mask_bt[2] = 0
    return TrainBatch(
        batch=batch,
        mask_bt=mask_bt,
        advantages_bt=torch.randn(mask_bt.shape, generator=draw),
        returns_bt=torch.randn(mask_bt.shape, generator=draw),
    )


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """Something smooth of log-probability and entropy, or a squared error of values."""

    temperature: float = 1.0
    entropy: float = 0.0

    @property
    def needs_entropy(self) -> bool:
        return self.entropy != 0

    def __call__(
        self, scores: Scores, batch: TrainBatch, counts: GlobalCounts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if scores.values_bt is not None:
            assert batch.returns_bt is not None
            each_bt = 0.5 * (scores.values_bt - batch.returns_bt).square()
        else:
            assert scores.logprobs_bt is not None
            assert batch.advantages_bt is not None
            each_bt = scores.logprobs_bt * batch.advantages_bt + 0.05 * scores.logprobs_bt.square()
            if scores.entropy_bt is not None:
                each_bt = each_bt - self.entropy * scores.entropy_bt
        share = (each_bt * batch.mask_bt).sum() / counts.num_tokens
        return share, {"tokens": batch.mask_bt.sum(), "half": 0.5 * share.detach()}


def split(batch: TrainBatch, sizes: Sequence[int]) -> list[TrainBatch]:
    """Consecutive rows, so many to each micro-batch."""
    ends = list(itertools.accumulate(sizes))
    assert ends[-1] == batch.batch.num_rows
    return [batch.select(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


@contextmanager
def engine_in(
    worker: int, address: StoreAddress, number: int, case: Case
) -> Iterator[tuple[TorchEngine, UnitGroups]]:
    """Join the generation, build and fill the engine of this worker, and leave."""
    generation = Generation.join(address, number=number, worker=worker, workers=range(case.world_size))
    spec = decoder_spec(case.config)
    groups = generation.unit_groups([case.layout(unit) for unit in range(case.units)], model=spec)
    assert groups is not None
    try:
        yield build(case, groups), groups
        dist.barrier()
    finally:
        generation.leave()


def build(case: Case, groups: UnitGroups) -> TorchEngine:
    """The case's engine on one rank, with its weights."""
    engine = TorchEngine(
        case.config,
        groups.layout,
        groups,
        optimizer=case.optimizer,
        recompute=case.recompute,
        router_balance=case.router_balance,
    )
    source: LogicalSource = HFSource(case.folder) if case.folder else Random(case.config)
    fill(engine.state, source, {kind: "theta" for kind in ("theta", "master") if kind in engine.state.arenas})
    return engine


def boxes(arena: Arena) -> list[tuple[str, Box, Any]]:
    """An arena's pieces as arrays that travel between processes."""
    return [(p.logical, p.box, arena.piece(p).float().numpy().copy()) for p in arena.shard.pieces]


def pads(arena: Arena) -> float:
    """The largest absolute value that no piece covers."""
    rest = arena.flat.clone()
    twin = Arena(arena.shard, arena.flat.dtype)
    twin.flat = rest
    for name, view in arena.views.items():
        start = view.storage_offset()
        twin.views[name] = rest[start : start + view.numel()].view(view.shape)
    for piece in arena.shard.pieces:
        twin.piece(piece).zero_()
    return float(rest.abs().max())


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one worker saw of its training steps."""

    metrics: list[TrainMetrics]
    grads: list[tuple[str, Box, Any]]
    weights: list[tuple[str, Box, Any]]
    largest_pad: float


def train(
    worker: int,
    address: StoreAddress,
    number: int,
    case: Case,
    micro_batches: Sequence[Sequence[TrainBatch]],
    loss: TokenLoss,
    counts: GlobalCounts,
    steps: int = 2,
) -> Trained:
    """Steps on this unit's micro-batches; gradients are those of the last step."""
    with engine_in(worker, address, number, case) as (engine, groups):
        unit = worker // groups.layout.world_size
        metrics = [
            engine.train_step(micro_batches[unit], loss, counts, learning_rate=1e-2) for _ in range(steps)
        ]
        assert engine.grad is not None
        kinds = ("theta", "exp_avg", "exp_avg_sq")
        return Trained(
            metrics=metrics,
            grads=boxes(engine.grad),
            weights=boxes(engine.state["theta"]),
            largest_pad=max(pads(arena) for arena in [engine.grad, *(engine.state[kind] for kind in kinds)]),
        )


def score(
    worker: int,
    address: StoreAddress,
    number: int,
    case: Case,
    batch: TokenBatch,
    micro_batch_rows: int,
    temperature: float,
) -> list[Any]:
    """Log-probabilities and entropy, or values and rewards, as this worker returns them."""
    with engine_in(worker, address, number, case) as (engine, _):
        if case.config.head == "value":
            values = engine.score(batch, micro_batch_rows=micro_batch_rows)
            assert values.values_bt is not None
            rewards = engine.rewards(batch, micro_batch_rows=micro_batch_rows)
            return [values.values_bt.numpy(), rewards.numpy()]
        scores = engine.score(batch, micro_batch_rows=micro_batch_rows, temperature=temperature, entropy=True)
        assert scores.logprobs_bt is not None
        assert scores.entropy_bt is not None
        return [scores.logprobs_bt.numpy(), scores.entropy_bt.numpy()]


def logits(worker: int, address: StoreAddress, number: int, case: Case, tokens_bs: Tensor) -> Any:
    """Logits [b, s, vocabulary] of whole rows, as the last stage's ranks see them; None elsewhere."""
    lens_b = torch.full((len(tokens_bs),), tokens_bs.shape[1])
    rows = TokenBatch(tokens_bs=tokens_bs, prompt_lens_b=lens_b, response_lens_b=torch.zeros_like(lens_b))
    packed = pack(rows, "last")
    packed = replace(packed, select_m=torch.arange(packed.num_tokens))
    with engine_in(worker, address, number, case) as (engine, groups), torch.no_grad():
        stage, pipe = engine.stage, Pipe(groups)
        x_nh = through_stage(stage, packed, pipe.receive(packed.num_tokens, stage))
        if not stage.is_last:
            pipe.send(x_nh)
            pipe.finish()
            return None
        return full_logits(final_norm(x_nh, stage.weights), stage.weights).view(*tokens_bs.shape, -1).numpy()


class Pool:
    """Worker processes and a store; each run of a case is a generation of its own."""

    def __init__(self, workers: Workers, address: StoreAddress) -> None:
        self._workers, self._address, self._number = workers, address, itertools.count()

    def run(self, case: Case, job: Callable[..., Any], *args: Any) -> list[Any]:
        """The job's results in order of worker id."""
        results = self._workers.run(
            job,
            self._address,
            next(self._number),
            case,
            *args,
            workers=range(case.world_size),
            timeout_s=60.0,
        )
        return [results[worker] for worker in range(case.world_size)]


def assemble(
    config: DecoderConfig, parts: Sequence[Sequence[tuple[str, Box, Any]]], *, trained: bool = False
) -> dict[str, Tensor]:
    """Logical tensors from all workers' boxes, all or the trained ones; holders of the same element must
    agree bit for bit.
    """
    model = decoder_spec(config)
    specs = (trained_part(model) if trained else model).tensors
    whole = {spec.name: torch.full(spec.shape, torch.nan) for spec in specs}
    for name, box, array in itertools.chain.from_iterable(parts):
        view = whole[name][tuple(slice(lo, hi) for lo, hi in box)]
        seen = ~view.isnan()
        assert torch.equal(view[seen], torch.from_numpy(array)[seen]), f"holders of {name} disagree"
        view.copy_(torch.from_numpy(array))
    assert not any(bool(tensor.isnan().any()) for tensor in whole.values()), "an element has no holder"
    return whole
