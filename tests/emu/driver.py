"""A worker in each of four processes, called as the cluster calls them, for tests of model-stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.batch import TrainBatch
from nereus.emu.checkpoint.commit import begin, commit
from nereus.emu.checkpoint.control import Control, OptimizerRecord
from nereus.emu.checkpoint.source import CheckpointSource
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.hf_folder import HFSource
from nereus.emu.layout import Layout
from nereus.emu.lora import trained_part
from nereus.emu.stage import Origin, StageSpec
from nereus.emu.store import StoreAddress
from nereus.emu.tensor import whole
from nereus.emu.worker import Worker
from tests.emu.engines.torch_cases import TokenLoss, split
from tests.emu.processes import Workers

ADAM = AdamW(eps=1e-5)
NAME = "actor.training"
_worker: Worker | None = None


def do(rank: int, method: str, *arguments: object) -> Any:
    """Call a method of this process's worker."""
    global _worker
    if _worker is None:
        _worker = Worker(rank, "cpu", 1)
    return getattr(_worker, method)(*arguments)


class Driver:
    """Calls the workers as the cluster does, and trains on the same rows under any layout."""

    def __init__(self, workers: Workers, address: StoreAddress) -> None:
        self.workers, self._address = workers, address
        workers.run(do, "connect", address, 60.0)
        self._generation = 0

    def build(self, spec: StageSpec) -> None:
        """A new generation over the stage's ranks, and its shards."""
        ranks = sorted(spec.ranks)
        self.join(ranks)
        self.workers.run(do, "build", spec, workers=ranks)

    def join(self, ranks: list[int]) -> None:
        """A new generation."""
        self._generation += 1
        self.workers.run(do, "join", self._address, self._generation, ranks, 60.0, workers=ranks)

    def train(self, spec: StageSpec, batches: list[TrainBatch]) -> None:
        """One step a batch; its rows are dealt to the units, two micro-batches each."""
        for batch in batches:
            counts = GlobalCounts.from_mask(batch.mask_bt)
            size = batch.batch.num_rows // len(spec.units)
            for unit, rows in zip(spec.units, split(batch, [size] * len(spec.units)), strict=True):
                micro = split(rows, [size // 2, size - size // 2])
                for rank in unit.ranks:
                    self.workers.call(rank, do, "train_step", NAME, micro, TokenLoss(), counts, 1e-2)
            for rank in spec.ranks:
                self.workers.result(rank)

    def save(self, spec: StageSpec, root: Path, step: int) -> Path:
        """A committed checkpoint of the stage; returns the model's folder in it."""
        folder = begin(root, step)
        written = self.workers.run(do, "write_checkpoint", NAME, "actor", folder, workers=spec.writers)
        parts = [part for part, _ in written.values()]
        adam_steps = written[spec.writers[0]][1]
        control = Control(
            step=step,
            policy_version=step,
            epoch=0,
            position=0,
            seed=0,
            config_digest="",
            optimizers={"actor": OptimizerRecord(adam_steps=adam_steps, learning_rate=1e-2)},
        )
        return commit(folder, {"actor": spec.trained}, parts, control) / "actor"


def stage(config: DecoderConfig, origin: Origin, *, tp: int, pp: int, dp: int) -> StageSpec:
    spec, size = decoder_spec(config), tp * pp
    units = tuple(
        Layout.make(spec, tp=tp, pp=pp, ranks=tuple(range(u * size, (u + 1) * size))) for u in range(dp)
    )
    return StageSpec(name=NAME, role="training", model=config, units=units, origin=origin, optimizer=ADAM)


def tensors(folder: Path, config: DecoderConfig) -> dict[tuple[str, str], Tensor]:
    """Every logical tensor of a checkpointed model that is trained, by kind and name."""
    source = CheckpointSource(folder)
    return {
        (kind, t.name): source.read(kind, t.name, whole(t.shape))
        for kind in source.kinds()
        for t in trained_part(decoder_spec(config)).tensors
    }


def holds(rank: int, name: str, folder: Path) -> bool:
    """Whether this process's shard of a model-stage holds the weights of a folder, bit for bit."""
    assert _worker is not None
    theta, source = _worker.participant.live[name]["theta"], HFSource(folder)
    return all(
        torch.equal(theta.piece(piece), source.read("theta", piece.logical, piece.box))
        for piece in theta.shard.pieces
    )
