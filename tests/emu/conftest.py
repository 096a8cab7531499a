"""Four worker processes that the tests of model-stages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nereus.emu.store import Store
from tests.emu.driver import Driver
from tests.emu.processes import Workers


@pytest.fixture(scope="package")
def driver() -> Iterator[Driver]:
    """Workers 0 to 3; a stage that is built replaces one of the same name."""
    store, workers = Store(), Workers(range(4))
    yield Driver(workers, store.address)
    workers.close()
    store.close()
