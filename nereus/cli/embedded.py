"""The environment of a campaign on the command line: a private Prefect server unless one is chosen.

The embedded server is a child process on SQLite in the run's own folder, so that two runs never wait for one
another's database lock, and a run is moved or deleted as one folder. Nothing is sent to anybody. Prefect
reads its environment when it is imported, so this comes first.
"""

from __future__ import annotations

from pathlib import Path

from nereus.config.environment import prefect_api_url, set_defaults

# The live display owns the terminal; what goes wrong comes back as an exception.
QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_CLI_PROMPT": "false",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_task_events_report_interval_ms": "0",  # nobody reads them; a run that stops may wait 5 s for them
}
EMBEDDED = {
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "true",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",  # 6 s when idle; a busy machine takes minutes
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",  # SQLite has one writer, which states and events need
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
}


def prepare_environment(run_folder: Path) -> str:
    """Set this process's defaults; variables that the user has set stay. Return where the run is tracked."""
    set_defaults(QUIET)
    if url := prefect_api_url():
        return url
    home = run_folder / "prefect"
    home.mkdir(parents=True, exist_ok=True)  # Prefect makes no parents
    set_defaults({**EMBEDDED, "PREFECT_HOME": str(home)})
    return "the embedded Prefect server"
