"""A worker's model-stages survive a checkpoint and a change of layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.batch import TrainBatch
from nereus.emu.checkpoint.commit import begin, commit
from nereus.emu.checkpoint.control import Control, OptimizerRecord
from nereus.emu.checkpoint.source import CheckpointSource
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.hf_folder import HFSource, write_hf_folder
from nereus.emu.layout import Layout
from nereus.emu.reshard import Limits
from nereus.emu.stage import FromCheckpoint, FromFolder, FromStage, Origin, StageSpec
from nereus.emu.store import Store, StoreAddress
from nereus.emu.tensor import whole
from nereus.emu.topology import Topology
from nereus.emu.worker import Worker
from nereus.emu.worker_process import own_device
from nereus.tasks.weight_sync import plan_weight_sync
from tests.emu.engines.torch_cases import QWEN2, SMALL, Random, TokenLoss, make_batch, split
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
        return commit(folder, {"actor": decoder_spec(spec.model)}, parts, control) / "actor"


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    store, workers = Store(), Workers(range(4))
    yield Driver(workers, store.address)
    workers.close()
    store.close()


def stage(config: DecoderConfig, origin: Origin, *, tp: int, pp: int, dp: int) -> StageSpec:
    spec, size = decoder_spec(config), tp * pp
    units = tuple(
        Layout.make(spec, tp=tp, pp=pp, ranks=tuple(range(u * size, (u + 1) * size))) for u in range(dp)
    )
    return StageSpec(name=NAME, role="training", model=config, units=units, origin=origin, optimizer=ADAM)


def tensors(folder: Path, config: DecoderConfig) -> dict[tuple[str, str], Tensor]:
    """Every logical tensor of a checkpointed model, by kind and name."""
    source = CheckpointSource(folder)
    return {
        (kind, t.name): source.read(kind, t.name, whole(t.shape))
        for kind in source.kinds()
        for t in decoder_spec(config).tensors
    }


@pytest.mark.parametrize("config", [SMALL, QWEN2], ids=["llama", "tied-with-bias"])
@pytest.mark.parametrize(
    ("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (4, 1, 1)]
)
def test_six_steps_equal_three_saved_and_three_under_another_layout(
    driver: Driver, tmp_path: Path, config: DecoderConfig, tp: int, pp: int, dp: int
) -> None:
    write_hf_folder(Random(config), config, tmp_path / "model")
    start = FromFolder(folder=tmp_path / "model")
    batches = [make_batch(8, seed=seed) for seed in range(6)]

    whole_run = stage(config, start, tp=1, pp=1, dp=1)
    driver.build(whole_run)
    driver.train(whole_run, batches[:3])
    half = driver.save(whole_run, tmp_path / "checkpoints", 3)
    driver.train(whole_run, batches[3:])
    straight = tensors(driver.save(whole_run, tmp_path / "checkpoints", 6), config)

    resumed = stage(config, FromCheckpoint(folder=half, step_count=3), tp=tp, pp=pp, dp=dp)
    driver.build(resumed)
    driver.train(resumed, batches[3:])
    changed = tensors(driver.save(resumed, tmp_path / "changed", 6), config)

    assert straight.keys() == changed.keys()
    for key, tensor in straight.items():
        if (tp, pp, dp) == (1, 1, 1):
            assert torch.equal(changed[key], tensor), f"{key}: the same layout must give the same bits"
        else:
            # Other layouts sum in another order; Adam at eps 1e-5 turns that into at most this.
            torch.testing.assert_close(changed[key], tensor, atol=2e-5, rtol=2e-4)


def holds(rank: int, name: str, folder: Path) -> bool:
    """Whether this process's shard of a model-stage holds the weights of a folder, bit for bit."""
    assert _worker is not None
    theta, source = _worker.participant.live[name]["theta"], HFSource(folder)
    return all(
        torch.equal(theta.piece(piece), source.read("theta", piece.logical, piece.box))
        for piece in theta.shard.pieces
    )


def test_a_sync_brings_trainings_weights_to_generation_on_other_workers(
    driver: Driver, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    write_hf_folder(Random(SMALL), SMALL, folder)
    training = stage(SMALL, FromFolder(folder=folder), tp=2, pp=1, dp=1)
    layout = Layout.make(decoder_spec(SMALL), tp=1, pp=1, ranks=(3,))
    generation = StageSpec(
        name="actor.generation", role="generation", model=SMALL, units=(layout,), origin=FromStage(stage=NAME)
    )
    ranks = [0, 1, 3]
    driver.join(ranks)
    for spec in (training, generation):
        driver.workers.run(do, "build", spec, workers=ranks)
    assert not driver.workers.run(holds, generation.name, folder, workers=(3,))[3]
    plans = plan_weight_sync(training, generation, Topology.single_node(4), Limits())
    for rank, plan in plans.items():
        driver.workers.run(do, "hold_sync_plan", NAME, plan, workers=(rank,))
    sent = driver.workers.run(do, "sync_weights", NAME, generation.name, 60.0, workers=ranks)
    assert driver.workers.run(holds, generation.name, folder, workers=(3,))[3]
    assert sent[0] > 0
    assert sent[3] == 0


def test_a_gpu_has_a_number_which_nccl_asks_for() -> None:
    """`init_process_group` refuses a device without one."""
    assert own_device("cuda") == torch.device("cuda", 0)
    assert own_device("cpu") == torch.device("cpu")
