"""The vLLM engine against the torch engine, in one process and in several, through changes of layout."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from nereus.emu.decoder import decoder_spec
from nereus.emu.engines.registry import open_generator
from nereus.emu.layout import Layout
from nereus.emu.serving import Serving
from nereus.emu.stage import FromStage, StageSpec
from nereus.emu.store import Store
from nereus.emu.unit_groups import UnitGroups
from tests.emu.engines.conformance import (
    LLAMA_TIED,
    MODEL,
    ONE_KV_HEAD,
    QWEN2,
    QWEN3,
    Ask,
    Generating,
    Held,
    Shape,
    answers,
    check_conforms,
    expected,
    standard_asks,
)
from tests.emu.processes import Workers

pytest.importorskip("vllm", reason="needs the vllm extra", exc_type=ImportError)
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
TIMEOUT_S = 1000.0  # importing vLLM takes ten seconds of a free core, and machines are shared
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Workers, Store]]:
    """Two workers and their store."""
    store, workers = Store(), Workers(range(2))
    yield workers, store
    workers.close()
    store.close()


def run(
    pair: tuple[Workers, Store], case: Generating, asks: Sequence[Ask] | None = None
) -> list[tuple[Any, list[Held]]]:
    """The case's answers by worker."""
    workers, store = pair
    asked = range(case.num_workers)
    arguments = (store.address, next(NUMBERS), case, standard_asks() if asks is None else asks)
    results = workers.run(answers, *arguments, workers=asked, timeout_s=TIMEOUT_S)
    return [results[worker] for worker in asked]


def conforms(pair: tuple[Workers, Store], case: Generating) -> None:
    results = run(pair, case)
    check_conforms(case, [answered for answered, _ in results], expected(case.config, standard_asks()))


@pytest.mark.parametrize("config", [MODEL, LLAMA_TIED, QWEN2, QWEN3], ids=["llama", "tied", "qwen2", "qwen3"])
def test_one_rank_generates_what_the_torch_engine_does(pair: tuple[Workers, Store], config: Any) -> None:
    conforms(pair, Generating(engine="vllm", config=config))


@pytest.mark.parametrize("config", [MODEL, ONE_KV_HEAD], ids=["heads cut", "kv head replicated"])
def test_two_tensor_parallel_ranks_generate_what_one_does(pair: tuple[Workers, Store], config: Any) -> None:
    conforms(pair, Generating(engine="vllm", config=config, shapes=(Shape(tp=2),)))


@pytest.mark.parametrize("config", [MODEL, LLAMA_TIED], ids=["untied", "tied"])
def test_two_pipeline_stages_generate_what_one_rank_does(pair: tuple[Workers, Store], config: Any) -> None:
    conforms(pair, Generating(engine="vllm", config=config, shapes=(Shape(pp=2),)))


def test_engines_conform_after_each_change_of_layout_in_living_processes(pair: tuple[Workers, Store]) -> None:
    shapes = (Shape(tp=2), Shape(units=2), Shape(), Shape(tp=2), Shape(pp=2))
    conforms(pair, Generating(engine="vllm", shapes=shapes))


def passes_of_the_collector(worker: int) -> tuple[list[int], list[bool], bool]:
    """Full passes of the garbage collector in the second and third life of an engine in this process, whether
    each froze the heap, and whether a kernel was replaced twice.
    """
    layout = Layout.make(decoder_spec(MODEL), tp=1, pp=1, ranks=(worker,))
    spec = StageSpec(
        name="actor.generation",
        role="generation",
        model=MODEL,
        units=(layout,),
        origin=FromStage(stage="actor.training"),
        engine="vllm",
        serving=Serving(longest_tokens=64, rows=5),
    )
    passes, frozen = [], []
    for _ in range(3):
        seen: list[int] = []

        def note(phase: str, info: dict[str, int], seen: list[int] = seen) -> None:
            seen += [1] if phase == "start" and info["generation"] == 2 else []

        before = gc.get_freeze_count()
        gc.callbacks.append(note)
        engine = open_generator(spec, UnitGroups.alone(layout), device=torch.device("cpu"), state=None)
        frozen.append(gc.get_freeze_count() > before)
        engine.close()
        gc.callbacks.remove(note)
        passes.append(len(seen))
    from vllm.triton_utils import dispatcher

    twice = any(isinstance(old, dispatcher.KernelOverride) for old, _ in dispatcher._registry.values())
    return passes[1:], frozen, twice


def test_a_rebuild_looks_through_the_whole_process_once(pair: tuple[Workers, Store]) -> None:
    workers, _ = pair
    passes, frozen, twice = workers.run(passes_of_the_collector, workers=[0], timeout_s=TIMEOUT_S)[0]
    # One when an engine is closed; the collector makes one by itself now and then.
    assert max(passes) <= 2, passes
    assert not any(frozen), "what else lives in the process would not be freed"
    assert not twice


@pytest.mark.slow
def test_twenty_rebuilds_leak_nothing(pair: tuple[Workers, Store]) -> None:
    shapes = (Shape(tp=2), Shape(units=2)) * 10
    # A push and one call: engines are what is counted here.
    held = [each for _, each in run(pair, Generating(engine="vllm", shapes=shapes), standard_asks()[:1])]
    for process in held:
        report = [(round(now.rss_bytes / 2**20), now.num_files, round(now.build_s, 1)) for now in process]
        print("RSS MiB, descriptors, build s:", report)
        early, late = process[3], process[-1]
        # A peer's end of a connection goes a moment sooner or later: the most of four, not one.
        most_early, most_late = (
            max(each.num_files for each in part) for part in (process[2:6], process[-4:])
        )
        assert most_late <= most_early, "descriptors"
        assert (late.shared, late.segments) == (early.shared, early.segments), "shared memory"
        # Allocators settle over the first builds; a kept engine would cost weights, cache and groups each.
        assert late.rss_bytes - early.rss_bytes < 64 * 2**20, "memory"
