"""A worker's model-stages survive a checkpoint and a change of layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.hf_folder import write_hf_folder
from nereus.emu.layout import Layout
from nereus.emu.reshard import Limits
from nereus.emu.stage import FromCheckpoint, FromFolder, FromStage, StageSpec
from nereus.emu.topology import Topology
from nereus.emu.worker_process import own_device
from nereus.tasks.weight_sync import plan_weight_sync
from tests.emu.driver import NAME, Driver, do, holds, stage, tensors
from tests.emu.engines.torch_cases import QWEN2, SMALL, Random, make_batch


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
