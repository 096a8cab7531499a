"""What every engine that trains must do, against the torch engine on one rank: its oracle.

An engine's test module calls these checks with its name; they reach the engine as a campaign does, through
a worker, the registry and the arenas, in real processes. Tolerances are absolute, on float32 models whose
numbers are of order one.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.batch import Scores, TokenBatch, TrainBatch, TrainMetrics
from nereus.emu.decision import Decision, Outcome
from nereus.emu.decoder import DecoderConfig, DType, decoder_spec
from nereus.emu.engine_limits import EngineName
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.hf_folder import write_hf_folder
from nereus.emu.kinds import training_kinds
from nereus.emu.layout import Layout
from nereus.emu.loss import Loss
from nereus.emu.optimizer_slices import optimizer_stage
from nereus.emu.orders import Order
from nereus.emu.reshard import ReshardPlan, plan_reshard
from nereus.emu.stage import FromFolder, FromMemory, StageSpec
from nereus.emu.store import StoreAddress
from nereus.emu.tensor import Box
from nereus.emu.timings import Observed
from nereus.emu.worker import Worker
from tests.emu.engines.torch_cases import Random, TokenLoss, boxes, make_batch, split
from tests.emu.processes import Workers

NAME = "actor.training"
ADAM = AdamW(eps=1e-5, weight_decay=0.01, max_gradient_norm=0.5)
LOSS = TokenLoss(temperature=0.8, entropy=0.01)
LEARNING_RATE = 1e-2
NORM = "model.norm.weight"
SCORES, GRADIENTS, WEIGHTS = 1e-3, 1e-4, 1e-4
LIMIT_S = 240.0  # of one call: the first one in a process imports the engine, on a machine that may be busy
KINDS = ("theta", "exp_avg", "exp_avg_sq")

State = dict[str, dict[str, Tensor]]  # logical tensors by kind and name
_worker: Worker | None = None


def do(rank: int, method: str, *arguments: object) -> Any:
    """Call a method of this process's worker."""
    return getattr(_of(rank), method)(*arguments)


def _of(rank: int) -> Worker:
    global _worker
    if _worker is None:
        _worker = Worker(rank, "cpu", 1)
    return _worker


def held(rank: int, stage: str) -> dict[str, list[tuple[str, Box, Any]]]:
    """The boxes that this worker holds of a model-stage by kind, slices of a shared optimizer among them."""
    live = _of(rank).participant.live
    states = [live[name] for name in (stage, optimizer_stage(stage)) if name in live]
    return {kind: boxes(arena) for state in states for kind, arena in state.arenas.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a process holds: resident bytes, open descriptors, threads, process groups, shared memory; and the
    segments that lie in the machine's.
    """

    resident_bytes: int
    descriptors: int
    threads: int
    groups: int
    shared: tuple[str, ...]
    segments: tuple[str, ...]


def footprint(rank: int) -> Footprint:
    """Of this process, after its garbage is collected."""
    gc.collect()
    me = psutil.Process(os.getpid())
    return Footprint(
        resident_bytes=me.memory_info().rss,
        descriptors=me.num_fds(),
        threads=me.num_threads(),
        groups=len(dist.distributed_c10d._world.pg_map),
        shared=tuple(sorted(part.path for part in me.memory_maps() if part.path.startswith("/dev/shm/"))),
        segments=mine_in_shared_memory(),
    )


def mine_in_shared_memory() -> tuple[str, ...]:
    """Names in the machine's shared memory that hold this process's id; those of others are not ours."""
    return tuple(sorted(name for name in os.listdir("/dev/shm") if str(os.getpid()) in name))


class Trainers:
    """Drives the workers as the cluster does, one model-stage at a time."""

    def __init__(self, workers: Workers, address: StoreAddress) -> None:
        self._workers, self._address, self._number, self._epoch = workers, address, 0, 0
        workers.run(do, "connect", address, LIMIT_S, timeout_s=LIMIT_S)

    def build(self, spec: StageSpec) -> None:
        """A new generation over the stage's ranks, and its shards."""
        self._number += 1
        ranks = sorted(spec.ranks)
        self._workers.run(
            do, "join", self._address, self._number, ranks, LIMIT_S, workers=ranks, timeout_s=LIMIT_S
        )
        self._workers.run(do, "build", spec, workers=ranks, timeout_s=LIMIT_S)

    def train(
        self,
        spec: StageSpec,
        batches: list[TrainBatch],
        loss: Loss = LOSS,
        *,
        loss_scale: float = 1.0,
    ) -> list[TrainMetrics]:
        """One step a batch: rows go to the units, two micro-batches each. All ranks report the same."""
        out = []
        for batch in batches:
            counts = GlobalCounts.from_mask(batch.mask_bt)
            size = batch.batch.num_rows // len(spec.units)
            for unit, rows in zip(spec.units, split(batch, [size] * len(spec.units)), strict=True):
                micro = split(rows, [size // 2, size - size // 2])
                given = micro, loss, counts, LEARNING_RATE, loss_scale
                for rank in unit.ranks:
                    self._workers.call(rank, do, "train_step", NAME, *given)
            found = [self._workers.result(rank, timeout_s=LIMIT_S) for rank in spec.ranks]
            assert len({str((m.loss, m.gradient_norm, m.stats)) for m in found}) == 1  # by text: NaN is NaN
            out.append(found[0])
        return out

    def score(self, spec: StageSpec, batch: TokenBatch, rows: int = 3) -> Scores:
        """Scores by the first unit at temperature 0.8."""
        unit = spec.units[0].ranks
        found = self._workers.run(do, "score", NAME, batch, rows, 0.8, workers=unit, timeout_s=LIMIT_S)
        scores: Scores = found[unit[0]]
        return scores

    def rewards(self, spec: StageSpec, batch: TokenBatch) -> Tensor:
        """A reward model's judgements by the first unit."""
        unit = spec.units[0].ranks
        rewards_b: Tensor = self._workers.run(do, "rewards", NAME, batch, 3, workers=unit, timeout_s=LIMIT_S)[
            unit[0]
        ]
        return rewards_b

    def state(self, spec: StageSpec) -> State:
        """Every kind and logical tensor; holders of the same element agree bit for bit."""
        parts = self._workers.run(held, NAME, workers=spec.ranks).values()
        return {kind: _assemble(spec.model, [part[kind] for part in parts]) for kind in KINDS}

    def change(self, old: StageSpec, new: StageSpec, *, step_count: int) -> StageSpec:
        """A committed transition; returns the new model-stage with its ranks as placed."""
        self._epoch += 1
        kinds = training_kinds(old.model.dtype)
        plan: ReshardPlan = plan_reshard(new.tensors, old.elastic_units(kinds), new.elastic_units(kinds))
        placed = replace(
            new,
            units=tuple(unit.layout for unit in plan.new),
            origin=FromMemory(step_count=step_count),
        )
        self._workers.run(do, "begin_transition", self._epoch, workers=plan.ranks)
        for rank in plan.ranks:
            order = Order(source=NAME, target=NAME, model=plan.model, plan=plan.rank_plan(rank))
            self._workers.call(rank, do, "prepare_operation", order, LIMIT_S)
        for rank in plan.ranks:
            self._workers.result(rank, timeout_s=LIMIT_S)
        votes = self._workers.run(do, "vote", workers=plan.ranks)
        assert all(vote.yes for vote in votes.values()), votes
        decision = Decision(epoch=self._epoch, outcome=Outcome.COMMIT)
        self._workers.run(do, "apply_decision", decision, workers=plan.ranks)
        self.build(placed)
        return placed

    def observed(self, spec: StageSpec) -> list[Observed]:
        """What every worker has to tell since it was last asked."""
        return list(self._workers.run(do, "observe", workers=spec.ranks, timeout_s=LIMIT_S).values())

    def footprints(self, spec: StageSpec) -> dict[int, Footprint]:
        """Of the stage's processes."""
        found: dict[int, Footprint] = self._workers.run(footprint, workers=spec.ranks)
        return found


def _assemble(config: DecoderConfig, parts: list[list[tuple[str, Box, Any]]]) -> dict[str, Tensor]:
    whole = {spec.name: torch.full(spec.shape, torch.nan) for spec in decoder_spec(config).tensors}
    for part in parts:
        for name, box, array in part:
            view = whole[name][tuple(slice(lo, hi) for lo, hi in box)]
            seen = ~view.isnan()
            assert torch.equal(view[seen], torch.from_numpy(array)[seen]), f"holders of {name} disagree"
            view.copy_(torch.from_numpy(array))
    assert not any(bool(tensor.isnan().any()) for tensor in whole.values()), "an element has no holder"
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Replicas of tp x pp ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}dp{self.dp}"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An engine and a model; `folder` holds the model's weights."""

    engine: EngineName
    config: DecoderConfig
    folder: Path
    recompute: bool = False
    zero1: bool = False
    adam: AdamW = ADAM

    @classmethod
    def made(cls, engine: EngineName, config: DecoderConfig, folder: Path, **options: Any) -> Subject:
        """With random weights, written into `folder`."""
        if not (folder / "config.json").exists():
            write_hf_folder(Random(config), config, folder)
        return cls(engine=engine, config=config, folder=folder, **options)

    def under(self, cut: Cut) -> StageSpec:
        """The model-stage under a cut. Ranks descend in a unit: a layout's order is often not ascending."""
        size = cut.tp * cut.pp
        units = tuple(
            Layout.make(
                decoder_spec(self.config),
                tp=cut.tp,
                pp=cut.pp,
                ranks=tuple(reversed(range(unit * size, (unit + 1) * size))),
            )
            for unit in range(cut.dp)
        )
        return StageSpec(
            name=NAME,
            role="training",
            model=self.config,
            units=units,
            origin=FromFolder(folder=self.folder),
            engine=self.engine,
            optimizer=self.adam,
            recompute=self.recompute,
            zero1=self.zero1,
        )

    def oracle(self) -> StageSpec:
        """The torch engine on one rank, of the same model."""
        exact = self.config.with_dtype("fp32")
        return replace(self, engine="torch", config=exact, recompute=False, zero1=False).under(Cut())


def batches(num: int) -> list[TrainBatch]:
    """So many batches of eight rows of mixed lengths."""
    return [make_batch(8, seed=seed) for seed in range(num)]


def check_scores(trainers: Trainers, subject: Subject, cut: Cut) -> None:
    """Log-probabilities, or values and rewards, are those of the oracle, in whatever micro-batches."""
    batch = make_batch(8).batch
    spec, oracle = subject.under(cut), subject.oracle()
    trainers.build(oracle)
    expected = trainers.score(oracle, batch)
    is_value = subject.config.head == "value"
    rewards_b = trainers.rewards(oracle, batch) if is_value else None
    trainers.build(spec)
    for rows in (1, 3, 100):
        _assert_same_scores(trainers.score(spec, batch, rows), expected)
    if rewards_b is not None:
        torch.testing.assert_close(trainers.rewards(spec, batch), rewards_b, atol=SCORES, rtol=0)


def check_reference(trainers: Trainers, subject: Subject, cut: Cut) -> None:
    """A model that only scores, without an optimizer, gives what one that trains gives."""
    batch = make_batch(8).batch
    spec = subject.under(cut)
    trainers.build(spec)
    expected = trainers.score(spec, batch)
    frozen = replace(spec, role="inference", optimizer=None)
    trainers.build(frozen)
    found = trainers.score(frozen, batch)
    assert found.logprobs_bt is not None
    assert expected.logprobs_bt is not None
    assert torch.equal(found.logprobs_bt, expected.logprobs_bt)


def check_half_precision(
    trainers: Trainers, subject: Subject, cut: Cut, dtype: DType, *, loss_scale: float, within: float
) -> None:
    """Gradients of half-precision weights are the float32 ones but for its digits, summed over the layers."""
    half = replace(subject, config=subject.config.with_dtype(dtype), adam=AdamW(max_gradient_norm=None))
    found, metrics = _after(trainers, half.under(cut), 1, loss_scale=loss_scale)
    expected, wanted = _after(trainers, half.oracle(), 1)
    assert metrics[0].loss == pytest.approx(wanted[0].loss, rel=within)
    for name, tensor in expected["exp_avg"].items():
        error = float((found["exp_avg"][name] - tensor).abs().max())
        assert error < within * float(tensor.abs().max()), f"{name} is off by {error:.2e}"


def check_overflow(trainers: Trainers, subject: Subject, cut: Cut) -> None:
    """Under a scale that float16 has no room for nothing changes on any rank, and the step has not been."""
    spec = replace(subject, config=subject.config.with_dtype("fp16")).under(cut)
    trainers.build(spec)
    before = trainers.state(spec)
    (metrics,) = trainers.train(spec, batches(1), loss_scale=2.0**30)
    assert not metrics.updated
    _assert_same_bits(trainers.state(spec), before)
    (metrics,) = trainers.train(spec, batches(1), loss_scale=2.0**8)
    assert metrics.updated
    assert not torch.equal(trainers.state(spec)["exp_avg"][NORM], before["exp_avg"][NORM])


def check_gradients(trainers: Trainers, subject: Subject, cut: Cut) -> None:
    """The first moment after one unclipped step is a tenth of the gradient: that of the oracle."""
    subject = replace(subject, adam=AdamW(max_gradient_norm=None))
    found, expected = (_after(trainers, spec, 1) for spec in (subject.under(cut), subject.oracle()))
    _assert_near(found[0]["exp_avg"], expected[0]["exp_avg"], 0.1 * GRADIENTS)


def check_steps(trainers: Trainers, subject: Subject, cut: Cut) -> None:
    """Five AdamW steps end at the oracle's weights and report its metrics on the way."""
    found, expected = (_after(trainers, spec, 5) for spec in (subject.under(cut), subject.oracle()))
    _assert_near(found[0]["theta"], expected[0]["theta"], WEIGHTS)
    _assert_same_metrics(found[1], expected[1])


def check_transitions(trainers: Trainers, subject: Subject, route: Sequence[Cut]) -> None:
    """Three of five steps under the first cut, the others under those that follow: every transition moves
    every bit, and scores and steps after it are the oracle's.
    """
    oracle, all_batches = subject.oracle(), batches(5)
    straight, wanted = _after(trainers, oracle, 5)
    spec, parts = subject.under(route[0]), _parts(all_batches[3:], len(route) - 1)
    trainers.build(spec)
    metrics, scores = trainers.train(spec, all_batches[:3]), []
    for cut, part in zip(route[1:], parts, strict=True):
        before = trainers.state(spec)
        spec = trainers.change(spec, subject.under(cut), step_count=len(metrics))
        _assert_same_bits(trainers.state(spec), before)
        scores.append(trainers.score(spec, all_batches[0].batch))
        metrics += trainers.train(spec, part)
    _assert_near(trainers.state(spec)["theta"], straight["theta"], WEIGHTS)
    _assert_same_metrics(metrics, wanted)
    trainers.build(oracle)
    trainers.train(oracle, all_batches[:3])
    for part, found in zip(parts, scores, strict=True):
        _assert_same_scores(found, trainers.score(oracle, all_batches[0].batch))
        trainers.train(oracle, part)


def _parts(left: list[TrainBatch], num: int) -> list[list[TrainBatch]]:
    """The batches in so many parts, of one each but the last."""
    return [*([batch] for batch in left[: num - 1]), left[num - 1 :]]


def check_observed(trainers: Trainers, subject: Subject) -> None:
    """Workers tell the seconds of a step, those in collectives within them, and the peak of memory."""
    spec = subject.under(Cut(tp=2, dp=2))
    trainers.build(spec)
    trainers.observed(spec)
    trainers.train(spec, batches(1))
    for one in trainers.observed(spec):
        terms = one.terms[f"{NAME}/train"]
        assert terms["data_parallel"] > 0
        assert terms["tensor_parallel"] > 0
        assert terms["total"] > terms["data_parallel"] + terms["tensor_parallel"]
        assert one.peak_bytes > 0


def check_rebuilds(
    trainers: Trainers, subject: Subject, cuts: tuple[Cut, Cut], *, num: int = 20, growth_bytes: int
) -> None:
    """`num` rebuilds, alternating between two cuts, leave no descriptor, thread, group or shared memory.

    The first four warm allocators and caches up. After them a process may grow by `growth_bytes`, the noise
    of an allocator, where keeping the state of each rebuild would take several times as much. The largest
    step is left out: a worker profiles a call now and then, and its first profile takes memory and a thread
    for good.
    """
    specs = [subject.under(cut) for cut in cuts]
    seen: dict[int, list[Footprint]] = {}
    for number in range(num + 4):
        spec = specs[number % 2]
        trainers.build(spec)
        trainers.train(spec, batches(1))
        if number % 2:
            for rank, one in trainers.footprints(spec).items():
                seen.setdefault(rank, []).append(one)
    for rank, all_of in seen.items():
        first, last = all_of[1], all_of[-1]
        assert last.groups == first.groups, f"worker {rank}: process groups {first.groups} -> {last.groups}"
        assert last.threads <= first.threads + 1, f"worker {rank}: threads {first.threads} -> {last.threads}"
        assert last.descriptors <= first.descriptors + 2, (
            f"worker {rank}: descriptors {first.descriptors} -> {last.descriptors}"
        )
        assert (last.shared, last.segments) == (first.shared, first.segments), f"worker {rank}: shared memory"
        steps = [b.resident_bytes - a.resident_bytes for a, b in pairwise(all_of[1:])]
        grown = sum(steps) - max(steps)
        assert grown <= growth_bytes, f"worker {rank}: grew by {grown / 1e6:.1f} MB"


def _after(
    trainers: Trainers, spec: StageSpec, num_steps: int, *, loss_scale: float = 1.0
) -> tuple[State, list[TrainMetrics]]:
    trainers.build(spec)
    metrics = trainers.train(spec, batches(num_steps), loss_scale=loss_scale)
    return trainers.state(spec), metrics


def _assert_same_scores(found: Scores, expected: Scores) -> None:
    for one, other in ((found.logprobs_bt, expected.logprobs_bt), (found.values_bt, expected.values_bt)):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, atol=SCORES, rtol=0)


def _assert_same_bits(found: State, expected: State) -> None:
    for kind, tensors in expected.items():
        for name, tensor in tensors.items():
            assert torch.equal(found[kind][name], tensor), f"{kind} of {name} changed on the way"


def _assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, tensor in expected.items():
        error = float((found[name] - tensor).abs().max())
        assert error <= tolerance, f"{name} is off by {error:.2e}"


def _assert_same_metrics(found: list[TrainMetrics], expected: list[TrainMetrics]) -> None:
    # Losses and norms are sums over hundreds of float32 numbers, taken in another order.
    for one, other in zip(found, expected, strict=True):
        assert abs(one.loss - other.loss) <= 1e-4, (one.loss, other.loss)
        assert abs(one.gradient_norm - other.gradient_norm) <= 1e-3 * max(1.0, other.gradient_norm)
        assert one.stats.keys() == other.stats.keys()
        assert set(one.seconds) == {"forward_backward", "reduce", "optimizer"}
        for name, value in other.stats.items():
            assert abs(one.stats[name] - value) <= 1e-3 * max(1.0, abs(value)), name
