"""On which databases a test's Prefect server runs: SQLite unless the test says otherwise."""

from __future__ import annotations

import pytest

from tests.postgres import postgres_programs

SQLITE = pytest.param(None, id="sqlite")  # the value of tests that say nothing, so that all share one server
POSTGRES = pytest.param(
    "postgres",
    id="postgres",
    marks=(
        pytest.mark.slow,
        pytest.mark.skipif(postgres_programs() is None, reason="needs Postgres: install postgresql"),
    ),
)
on_both_databases = pytest.mark.parametrize("server", [SQLITE, POSTGRES], indirect=True)
on_postgres = pytest.mark.parametrize("server", [POSTGRES], indirect=True)
