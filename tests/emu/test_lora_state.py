"""Adapters and their optimizer follow the rules of all state: checkpoints, transitions, copies, syncs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nereus.emu.adapter_weights import FreshAdapters, Merged
from nereus.emu.batch import PromptBatch, Rollouts, Sampling
from nereus.emu.checkpoint.source import CheckpointSource
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.hf_folder import HFSource, write_hf_folder
from nereus.emu.lora import Lora, down_of, is_adapter, trained_part
from nereus.emu.reshard import Limits
from nereus.emu.stage import FromCheckpoint, FromFolder, FromMemory, FromStage, StageSpec
from nereus.emu.tensor import whole
from nereus.emu.topology import Topology
from nereus.tasks import peer_copy, peer_places
from nereus.tasks.memory_room import held_bytes
from nereus.tasks.stages import GENERATION
from nereus.tasks.transition_plan import plan_transition
from nereus.tasks.weight_sync import plan_weight_sync
from tests.emu.driver import NAME, Driver, do, stage, tensors
from tests.emu.engines.torch_cases import QWEN2, SMALL, Random, make_batch
from tests.emu.test_zero1 import carry_out, move_all

LORA = Lora(rank=4, alpha=8)
PLAIN = replace(SMALL, dtype="bf16")
BF16 = PLAIN.with_lora(LORA)
BATCHES = [make_batch(8, seed=seed) for seed in range(4)]


def trainer(
    folder: Path, *, tp: int, pp: int, dp: int, config: DecoderConfig = BF16, zero1: bool = False
) -> StageSpec:
    """The training stage over a model folder, which is written where there is none."""
    if not folder.exists():
        write_hf_folder(Random(config.with_lora(None)), config.with_lora(None), folder)
    return replace(stage(config, FromFolder(folder=folder), tp=tp, pp=pp, dp=dp), zero1=zero1)


def server(spec: StageSpec, *, tp: int, pp: int, dp: int) -> StageSpec:
    """Generation of the same model, without adapters, on units of its own."""
    units = stage(spec.model, spec.origin, tp=tp, pp=pp, dp=dp).units
    model, origin = spec.model.with_lora(None), FromStage(stage=NAME)
    return StageSpec(name=GENERATION, role="generation", model=model, units=units, origin=origin)


def synced(driver: Driver, spec: StageSpec, generation: StageSpec) -> None:
    """Build generation, plan the weight sync, and run it."""
    driver.workers.run(do, "build", generation, workers=sorted(spec.ranks))
    plans = plan_weight_sync(spec, generation, Topology.single_node(4), Limits())
    for rank, plan in plans.items():
        driver.workers.call(rank, do, "hold_sync_plan", NAME, plan)
        driver.workers.result(rank)
    driver.workers.run(do, "sync_weights", NAME, GENERATION, 30.0, workers=sorted(plans))


@pytest.mark.parametrize("zero1", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "zero1"])
def test_live_hops_keep_every_bit_and_the_next_step_is_that_without_them(
    driver: Driver, tmp_path: Path, zero1: bool
) -> None:
    start = trainer(tmp_path / "model", tp=2, pp=1, dp=2, zero1=zero1)
    driver.build(start)
    driver.train(start, BATCHES[:2])
    before = tensors(driver.save(start, tmp_path / "before", 2), BF16)
    assert {name for _, name in before} == {n for n in decoder_spec(BF16).by_name if is_adapter(n)}
    assert {kind for kind, _ in before} == {"theta", "master", "exp_avg", "exp_avg_sq"}
    now = start
    for number, (tp, pp, dp) in enumerate([(1, 1, 4), (1, 1, 3), (1, 2, 2), (4, 1, 1), (2, 1, 2)]):
        then = trainer(tmp_path / "model", tp=tp, pp=pp, dp=dp, zero1=zero1)
        transition = plan_transition(
            *({NAME: spec, GENERATION: server(spec, tp=1, pp=1, dp=1)} for spec in (now, then))
        )
        assert transition.bytes == transition.lower_bound
        now = carry_out(driver, transition, 2)
        after = tensors(driver.save(now, tmp_path / f"after{number}", 2), BF16)
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items()), (tp, pp, dp)
    driver.train(now, BATCHES[2:3])
    moved = tensors(driver.save(now, tmp_path / "moved", 3), BF16)

    driver.build(start)
    driver.train(start, BATCHES[:3])
    straight = tensors(driver.save(start, tmp_path / "straight", 3), BF16)
    assert all(torch.equal(moved[key], tensor) for key, tensor in straight.items())


def test_a_checkpoint_of_adapters_resumes_under_any_layout(driver: Driver, tmp_path: Path) -> None:
    config = QWEN2.with_head("value").with_lora(LORA)  # a critic trains its head, too
    start = trainer(tmp_path / "model", tp=2, pp=1, dp=2, config=config)
    driver.build(start)
    driver.train(start, BATCHES[:1])
    half = driver.save(start, tmp_path / "half", 1)
    saved = tensors(half, config)
    assert "score.weight" in {name for _, name in saved}
    driver.train(start, BATCHES[1:2])
    straight = tensors(driver.save(start, tmp_path / "straight", 2), config)
    for number, (tp, pp, dp) in enumerate([(1, 2, 2), (4, 1, 1)]):
        other = trainer(tmp_path / "model", tp=tp, pp=pp, dp=dp, config=config)
        assert isinstance(start.origin, FromFolder)
        other = replace(other, origin=FromCheckpoint(folder=half, step_count=1, base=start.origin))
        driver.build(other)
        again = tensors(driver.save(other, tmp_path / f"again{number}", 1), config)
        assert all(torch.equal(again[key], tensor) for key, tensor in saved.items())
        driver.train(other, BATCHES[1:2])
        found = tensors(driver.save(other, tmp_path / f"next{number}", 2), config)
        for key, tensor in straight.items():
            torch.testing.assert_close(found[key], tensor, atol=2e-5, rtol=2e-3)


def test_copies_on_peers_bring_back_adapters_and_their_optimizer(driver: Driver, tmp_path: Path) -> None:
    start = trainer(tmp_path / "model", tp=1, pp=1, dp=2)
    driver.build(start)
    driver.train(start, BATCHES[:1])
    before = tensors(driver.save(start, tmp_path / "before", 1), BF16)
    units = peer_places.copy_units(start, [peer_places.Place(rank=rank, node=rank) for rank in range(4)])
    move_all(driver, peer_copy.moves_away(start, units), lost=frozenset())
    driver.train(start, BATCHES[1:2])  # what follows the copy is lost

    lost = frozenset({0, 1} - {unit.layout.ranks[0] for unit in units})
    then = replace(start, units=tuple(start.units[0].with_ranks((rank,)) for rank in (2, 3)))
    back = peer_copy.moves_back(then, units, lost)
    move_all(driver, back, lost=lost)
    layouts = tuple(unit.layout for unit in back[0].plan.new)
    after = replace(then, units=layouts, origin=FromMemory(step_count=1))
    driver.build(after)
    found = tensors(driver.save(after, tmp_path / "after", 1), BF16)
    assert before.keys() == found.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize(
    ("cut", "serving"),
    [
        ((2, 1, 1), (1, 1, 2)),
        ((1, 1, 1), (1, 1, 1)),
        pytest.param((1, 2, 2), (2, 1, 1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_generation_with_merged_weights_has_the_log_probabilities_of_training(
    driver: Driver, tmp_path: Path, cut: tuple[int, int, int], serving: tuple[int, int, int]
) -> None:
    config = QWEN2.with_lora(LORA)
    names = ("tp", "pp", "dp")
    spec = trainer(tmp_path / "model", config=config, **dict(zip(names, cut, strict=True)))
    driver.build(spec)
    driver.train(spec, BATCHES[:3])
    generation = server(spec, **dict(zip(names, serving, strict=True)))
    assert set(generation.ranks) <= set(spec.ranks)
    synced(driver, spec, generation)
    sampling = Sampling(max_new_tokens=12, seed=3)
    results = driver.workers.run(
        do, "generate", GENERATION, prompts(), sampling, 0, workers=generation.units[0].ranks
    )
    rollouts: Rollouts = results[generation.units[0].ranks[0]]
    trained = _scored(driver, spec, rollouts)
    mask_bt = rollouts.batch.response_mask()
    torch.testing.assert_close(rollouts.logprobs_bt[mask_bt], trained[mask_bt], atol=2e-5, rtol=1e-4)
    frozen = _scored(driver, spec, rollouts, frozen=True)
    assert float((frozen - trained)[mask_bt].abs().max()) > 0.01, "the adapters changed something"


def _scored(driver: Driver, spec: StageSpec, rollouts: Rollouts, *, frozen: bool = False) -> Tensor:
    unit = spec.units[0]
    asked = (NAME, rollouts.batch, 4, 1.0, None, frozen)
    scores = driver.workers.run(do, "score", *asked, workers=unit.ranks)
    found: Tensor = scores[unit.ranks[0]].logprobs_bt
    return found


def prompts() -> PromptBatch:
    tokens_bs = torch.arange(1, 25).view(4, 6)
    return PromptBatch(
        tokens_bs=tokens_bs,
        lens_b=torch.full((4,), 6),
        sample_ids_b=torch.arange(4),
        greedy_b=torch.zeros(4, dtype=torch.bool),
    )


def test_the_merged_checkpoint_is_what_generation_was_sent(driver: Driver, tmp_path: Path) -> None:
    spec = trainer(tmp_path / "model", tp=1, pp=1, dp=1)
    driver.build(spec)
    driver.train(spec, BATCHES[:2])
    generation = server(spec, tp=1, pp=1, dp=1)
    synced(driver, spec, generation)
    results = driver.workers.run(
        do, "generate", GENERATION, prompts(), Sampling(max_new_tokens=6), 0, workers=(0,)
    )
    adapters = CheckpointSource(driver.save(spec, tmp_path / "saved", 2))
    merged = Merged(HFSource(tmp_path / "model"), adapters, LORA)
    write_hf_folder(merged, PLAIN, tmp_path / "merged")
    again = stage(PLAIN, FromFolder(folder=tmp_path / "merged"), tp=1, pp=1, dp=1)
    driver.build(again)
    rollouts: Rollouts = results[0]
    scored = _scored(driver, again, rollouts)
    mask_bt = rollouts.batch.response_mask()
    torch.testing.assert_close(scored[mask_bt], rollouts.logprobs_bt[mask_bt], atol=2e-2, rtol=2e-2)
    weight = "model.layers.1.mlp.down_proj.weight"
    base = HFSource(tmp_path / "model").read("theta", weight, whole((32, 48)))
    assert not torch.equal(merged.read("theta", weight, whole((32, 48))), base.float())


def test_fresh_adapters_do_not_depend_on_the_cut_and_change_nothing(driver: Driver, tmp_path: Path) -> None:
    found = []
    for number, (tp, pp) in enumerate([(1, 1), (2, 2)]):
        spec = trainer(tmp_path / "model", tp=tp, pp=pp, dp=1)
        driver.build(spec)
        found.append(tensors(driver.save(spec, tmp_path / f"fresh{number}", 0), BF16))
    assert all(torch.equal(found[1][key], tensor) for key, tensor in found[0].items())
    ups = [tensor for (_, name), tensor in found[0].items() if name.endswith("lora_B.weight")]
    assert len(ups) == 4 * 7 * SMALL.num_layers
    assert not any(bool(tensor.any()) for tensor in ups)


def test_fresh_factors_lie_within_the_bounds_of_peft() -> None:
    model = decoder_spec(BF16)
    name = down_of("model.layers.0.mlp.down_proj.weight")
    drawn = FreshAdapters(model, 7).read("theta", name, whole((4, 48)))
    assert 0.8 / 48**0.5 < float(drawn.abs().max()) <= 1 / 48**0.5
    assert torch.equal(FreshAdapters(model, 7).read("theta", name, ((1, 3), (5, 9))), drawn[1:3, 5:9])
    assert not torch.equal(FreshAdapters(model, 8).read("theta", name, whole((4, 48))), drawn)


def test_the_units_that_live_have_the_optimizer_of_one_that_died(tmp_path: Path) -> None:
    three, two = (stage(BF16, FromFolder(folder=tmp_path), tp=1, pp=1, dp=dp) for dp in (3, 2))
    two = replace(two, units=tuple(two.units[0].with_ranks((rank,)) for rank in (0, 3)))
    now, then = ({NAME: spec, GENERATION: server(spec, tp=1, pp=1, dp=1)} for spec in (three, two))
    planned = plan_transition(now, then, lost=frozenset({2}))
    made = {name: plan for name, plan in planned.plans.items() if plan.bytes}
    assert [plan.model for plan in made.values()] == [decoder_spec(BF16), trained_part(decoder_spec(BF16))]
    for plan in made.values():
        assert plan.bytes == plan.model.num_elements * plan.wire_bytes_per_element
        assert {route.path[0] for route in plan.routes} <= {0, 1}


def test_a_rank_holds_frozen_weights_once_and_optimizer_state_of_adapters_alone(tmp_path: Path) -> None:
    spec = stage(BF16, FromFolder(folder=tmp_path), tp=1, pp=1, dp=1)
    all_weights = decoder_spec(BF16).num_elements
    adapters = trained_part(decoder_spec(BF16)).num_elements
    assert held_bytes({NAME: spec}) == {0: 2 * all_weights + (4 + 8 + 4) * adapters}
