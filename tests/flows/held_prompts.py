"""Prompts of the count task that bring a listener along: at a stage of a step it freezes the workers.

Prompt functions are called in the campaign's own process, before its cluster starts, so this is how a test
gets a campaign that a worker of the Prefect server started to stand still exactly where it wants it.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from nereus.record.listener import current_listener
from tests.flows.striker import Striker

FIRST_STAGES = {"start": "starting ", "wait": "waiting for "}  # and how the message begins that tells of them
COUNT = Path(__file__).resolve().parents[2] / "examples" / "count"


def prompts(marker: str, stage: str, step: int, slow_s: float = 0.0, num_prompts: int = 6) -> Any:
    """The count task's prompts. When `stage` of `step` begins for the first time, every worker process is
    stopped (SIGSTOP) and this process's pid and theirs are written to the file `marker`. Before there are
    workers a campaign is held up by what it waits for: its stage then is `start`, or `wait` (for GPUs), of
    step 0. Other stages take `slow_s` longer. `marker.pid` has this process's pid; `marker.ended` is made
    when it ends in good order.
    """
    Path(f"{marker}.pid").write_text(str(os.getpid()))
    atexit.register(Path(f"{marker}.ended").touch)

    def strike(at: int, name: str) -> None:
        if (at, name) == (step, stage) and not Path(marker).exists():
            pids = worker_pids(os.getpid())
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            Path(marker).write_text(" ".join(map(str, (os.getpid(), *pids))))
        else:
            time.sleep(slow_s)

    class Holder(Striker):
        def on_message(self, text: str) -> None:
            if stage in FIRST_STAGES and text.startswith(FIRST_STAGES[stage]):
                strike(0, stage)

    current_listener.set(Holder(strike))
    sys.path.insert(0, str(COUNT))  # the task's own modules
    return runpy.run_path(str(COUNT / "prompts.py"))["prompts"](num_prompts=num_prompts)


def worker_pids(pid: int) -> list[int]:
    """The Ray actors of the campaign that runs as process `pid`."""
    return [
        child.pid
        for child in psutil.Process(pid).children(recursive=True)
        if " ".join(child.cmdline()).startswith("ray::Worker")
    ]
