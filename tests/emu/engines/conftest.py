"""Gloo workers that all engine tests share: four that run functions, four that hold model-stages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nereus.emu.store import Store
from tests.emu.engines.torch_cases import Pool
from tests.emu.engines.training_conformance import Trainers
from tests.emu.processes import Workers


@pytest.fixture(scope="package")
def pool() -> Iterator[Pool]:
    """Workers 0 to 3 and their store."""
    store, workers = Store(), Workers(range(4))
    yield Pool(workers, store.address)
    workers.close()
    store.close()


@pytest.fixture(scope="package")
def trainers() -> Iterator[Trainers]:
    """Workers 0 to 3 that build model-stages as a campaign's do."""
    store, workers = Store(), Workers(range(4))
    yield Trainers(workers, store.address)
    workers.close()
    store.close()
