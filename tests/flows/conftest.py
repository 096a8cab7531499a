"""One Prefect server and one private Ray for all flow tests, and a tiny model for the count task."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray

from nereus.config import CampaignConfig
from nereus.emu.decoder import DecoderConfig
from nereus.emu.hf_folder import write_hf_folder
from tests.emu.engines.torch_cases import Random
from tests.postgres import own_postgres
from tests.prefect_server import own_server, talking_to

COUNT = Path(__file__).resolve().parent.parent.parent / "examples" / "count"
TINY = DecoderConfig(
    vocab_size=32,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_positions=128,
    tied=True,
    bos_token_id=1,
    eos_token_ids=(2,),
)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Prefect server of this test session's own, on the database that `databases` names."""
    with ExitStack() as stack:
        is_postgres = getattr(request, "param", None) == "postgres"
        database = stack.enter_context(own_postgres(durable=False)) if is_postgres else None
        url = stack.enter_context(own_server(tmp_path_factory.mktemp("prefect"), database))
        stack.enter_context(talking_to(url))
        yield


@pytest.fixture(scope="session")
def ray_pool() -> Iterator[None]:
    """A private Ray with eight logical GPUs; campaigns use it and leave it running."""
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with the count task's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_hf_folder(Random(TINY), TINY, folder)
    write_count_tokenizer(folder)
    return folder


def write_count_tokenizer(folder: Path) -> None:
    """The count task's tokenizer, as the example writes it."""
    sys.path.insert(0, str(COUNT))
    try:
        from make_model import write_tokenizer
    finally:
        sys.path.remove(str(COUNT))
    write_tokenizer(folder)


@pytest.fixture(scope="session")
def reward_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny reward model: the same trunk with a value head."""
    folder = tmp_path_factory.mktemp("reward") / "model"
    write_hf_folder(Random(TINY.with_head("value")), TINY.with_head("value"), folder)
    return folder


@pytest.fixture
def make_config(model_folder: Path, tmp_path: Path) -> Callable[..., CampaignConfig]:
    """A small campaign on the count task; keyword arguments replace parts of it."""

    def make(**parts: Any) -> CampaignConfig:
        base: dict[str, Any] = {
            "name": "test",
            "output": str(tmp_path / "runs"),
            "seed": 3,
            "steps": 3,
            "models": {"actor": str(model_folder)},
            "prompts": {
                "source": {
                    "kind": "python",
                    "function": f"{COUNT / 'prompts.py'}:prompts",
                    "arguments": {"num_prompts": 6},
                }
            },
            "reward": {"kind": "python", "function": f"{COUNT / 'reward.py'}:reward"},
            "algorithm": {"kind": "grpo"},
            "batch": {"prompts": 4, "samples": 4, "micro_batch_rows": 4},
            "sampling": {"max_new_tokens": 12},
            "optimizer": {"learning_rate": 1e-3},
            "plan": {"actor_training": {"tp": 2}, "actor_generation": {"tp": 1, "dp": 2}},
            "cluster": {"gpus": 2, "device": "cpu", "timeout_s": 60},
            "checkpoint": {"every_steps": 2},
            "tracking": "tasks",
        }
        return CampaignConfig.model_validate(base | parts)

    return make
