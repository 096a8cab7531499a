"""Prompts of the count task that let a test look at a running campaign: before a stage of a step it waits."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

from prefect.logging import get_run_logger

from nereus.flows.run_log import RunLog
from nereus.record.listener import current_listener

COUNT = Path(__file__).resolve().parents[2] / "examples" / "count"


def prompts(marker: str, stage: str, step: int, num_prompts: int = 64) -> Any:
    """The count task's prompts. When `stage` of `step` begins the file `marker` is made, and the campaign
    goes on once `marker.seen` exists. Everything else is logged to the flow run, as without this.
    """
    seen = Path(f"{marker}.seen")

    class Waiting(RunLog):
        def on_stage(self, at: int, name: str, seconds: float | None) -> None:
            if (at, name, seconds) == (step, stage, None):
                Path(marker).touch()
                while not seen.exists():
                    time.sleep(0.2)

    current_listener.set(Waiting(get_run_logger()))
    sys.path.insert(0, str(COUNT))  # the task's own modules
    return runpy.run_path(str(COUNT / "prompts.py"))["prompts"](num_prompts=num_prompts)
