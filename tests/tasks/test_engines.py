"""What the engines of a campaign mean for its plans: cache and weights of vLLM, layouts, price of a move."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nereus.config import CampaignConfig
from nereus.emu.cluster import Call
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engines import registry
from nereus.emu.layout import Layout
from nereus.emu.serving import CPU_CACHE_BYTES
from nereus.emu.stage import FromFolder, FromStage, StageSpec
from nereus.errors import ConfigError
from nereus.planner.adapt import Controller, first
from nereus.planner.lengths import LengthDistribution
from nereus.planner.models import model_shape
from nereus.planner.policies.configured import policy_of
from nereus.planner.signals import Gpu, Signals
from nereus.tasks.adapt import costs_of, request_of, seated_stages
from nereus.tasks.job import load_engines
from nereus.tasks.planned_cluster import CACHE_SHARE
from nereus.tasks.stages import GENERATION, TRAINING, StageModel, serving_of
from nereus.tasks.survive import on_survivors

# 14 heads of 64 and 2 kv heads; small enough for a logical GPU of a CPU.
WIDE = replace(model_shape("qwen2.5-0.5b"), num_layers=4, vocab_size=2048)


def campaign(**parts: Any) -> CampaignConfig:
    """GRPO on four GPUs, generation by vLLM, unless told otherwise."""
    base: dict[str, Any] = {
        "name": "engines",
        "models": {"actor": "model"},
        "prompts": {"source": {"kind": "file", "path": "prompts.jsonl"}},
        "reward": {"kind": "python", "function": "reward.py:reward"},
        "algorithm": {"kind": "grpo"},
        "batch": {"prompts": 8, "samples": 8},
        "sampling": {"max_new_tokens": 256},
        "engines": {"generation": "vllm"},
        "cluster": {"gpus": 4, "device": "cpu"},
        "adaptation": {},
    }
    return CampaignConfig.model_validate({**base, **parts})


def models(config: DecoderConfig = WIDE) -> dict[str, StageModel]:
    return {
        TRAINING: StageModel(role="training", model=config, folder=Path("model")),
        GENERATION: StageModel(role="generation", model=config, folder=Path("model")),
    }


def test_plans_count_the_cache_that_the_engine_is_made_with() -> None:
    on_cpu = campaign()
    serving = request_of(on_cpu, models(), 64).workload.engines.serving
    assert serving == serving_of(on_cpu, WIDE)
    assert serving is not None
    assert serving.kv_cache_bytes == CPU_CACHE_BYTES
    given = campaign(engines={"generation": "vllm", "vllm": {"kv_cache_gb": 2.0}})
    assert serving_of(given, WIDE).kv_cache_bytes == 2_000_000_000
    on_gpu = campaign(cluster={"gpus": 4, "device": "cuda", "gpu_kind": "H100"})
    serving = request_of(on_gpu, models(), 64).workload.engines.serving
    assert serving == serving_of(on_gpu, WIDE)
    assert serving is not None
    memory = request_of(on_gpu, models(), 64).cluster.pools[0].gpu.memory_bytes
    assert serving.kv_cache_bytes == int(CACHE_SHARE * memory)


def test_without_adaptation_the_engine_sizes_its_cache_by_what_is_free() -> None:
    plan = {"actor_training": {"tp": 1}, "actor_generation": {"tp": 1, "dp": 4}}
    on_gpu = campaign(cluster={"gpus": 4, "device": "cuda", "gpu_kind": "H100"}, adaptation=None, plan=plan)
    assert serving_of(on_gpu, WIDE).kv_cache_bytes is None


def test_only_a_change_of_generation_is_charged_for_a_new_engine() -> None:
    costs, plain = costs_of(campaign()), costs_of(campaign(engines={}))
    assert costs.transition_s == plain.transition_s
    assert costs.generation_s > 0 == plain.generation_s
    assert costs.restart_s == plain.restart_s + costs.generation_s
    on_gpus = costs_of(campaign(cluster={"gpus": 4, "device": "cuda"}))
    assert on_gpus.generation_s > costs.generation_s, "graphs are captured there"


@pytest.mark.parametrize("training", ["torch", "megatron", "deepspeed"])
def test_an_adapting_job_starts_under_layouts_that_its_engines_run(training: str) -> None:
    config = campaign(engines={"training": training, "generation": "vllm"})
    pool = tuple(Gpu(id=number, node=0) for number in range(4))
    assert config.adaptation is not None
    controller = Controller(
        request=request_of(config, models(), 64),
        policy=policy_of(config.adaptation.policy),
        thresholds=config.adaptation.thresholds,
        costs=costs_of(config),
    )
    response = LengthDistribution.from_mean_p95_max(64, 128, 256)
    seated, _ = first(controller, Signals(step=0, now_s=0.0, response=response, pool=pool))
    stages = seated_stages(specs(config), seated)
    assert stages[GENERATION].shares is None
    assert {unit.tp for spec in stages.values() for unit in spec.units} <= {1, 2}
    if training == "deepspeed":
        assert {unit.pp for unit in stages[TRAINING].units} == {1}


def specs(config: CampaignConfig) -> dict[str, StageSpec]:
    """One unit of one rank each."""
    unit = Layout.make(decoder_spec(WIDE), tp=1, pp=1, ranks=(0,))
    return {
        TRAINING: StageSpec(
            name=TRAINING,
            role="training",
            model=WIDE,
            units=(unit,),
            origin=FromFolder(folder=Path("model")),
            engine=config.engines.training,
        ),
        GENERATION: StageSpec(
            name=GENERATION,
            role="generation",
            model=WIDE,
            units=(unit,),
            origin=FromStage(stage=TRAINING),
            engine="vllm",
        ),
    }


@pytest.mark.parametrize(
    ("training", "sizes"), [("torch", (1, 3)), ("megatron", (1, 3)), ("deepspeed", (2, 1))]
)
def test_survivors_get_a_layout_that_their_engine_runs(training: str, sizes: tuple[int, int]) -> None:
    config = campaign(engines={"training": training})
    unit = Layout.make(decoder_spec(WIDE), tp=2, pp=2, ranks=(0, 1, 2, 3))
    stages = {name: replace(spec, units=(unit,)) for name, spec in specs(config).items()}
    left = on_survivors(stages, (0, 1, 3))[TRAINING].units
    assert [(one.tp, one.pp) for one in left] == [sizes]


class Workers:
    """Ranks 0 and 1; remembers what they are asked."""

    ranks = (0, 1)

    def __init__(self) -> None:
        self.asked: list[tuple[dict[int, Call], str]] = []

    def run(self, calls: dict[int, Call], *, what: str) -> None:
        self.asked.append((calls, what))


def test_where_plans_change_every_worker_imports_the_engine_before_the_first_step() -> None:
    whole = {"actor_training": {"tp": 1}, "actor_generation": {"tp": 1, "gpus": [1]}}
    fixed = campaign(adaptation=None, plan=whole)
    changed = campaign(adaptation=None, plan=whole, changes=[{"before_step": 1, "plan": whole}])
    for config, is_asked in ((campaign(), True), (changed, True), (fixed, False)):
        workers = Workers()
        load_engines(workers, config)  # type: ignore[arg-type]
        call = Call("load_engine", ("vllm",))
        assert workers.asked == ([({0: call, 1: call}, "load vllm")] if is_asked else [])


def test_an_engine_whose_extra_is_absent_is_named_with_the_remedy() -> None:
    registry.load("torch")
    with pytest.raises(ConfigError, match=r"nereus doctor"):
        registry.load("no-such-engine")
