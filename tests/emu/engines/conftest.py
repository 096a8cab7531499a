"""Four gloo workers that all engine tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nereus.emu.store import Store
from tests.emu.engines.torch_cases import Pool
from tests.emu.processes import Workers


@pytest.fixture(scope="package")
def pool() -> Iterator[Pool]:
    """Workers 0 to 3 and their store."""
    store, workers = Store(), Workers(range(4))
    yield Pool(workers, store.address)
    workers.close()
    store.close()
