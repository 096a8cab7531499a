"""A campaign that a server's worker started ends soon after that worker has died.

    worker killed ─▶ this process gets another parent ─▶ SIGTERM to ourselves ─▶ Crashed, GPUs freed

Nobody could cancel it any more, and its log goes into a closed pipe, which ends it anyway at some later line.
Run again, it goes on from its newest checkpoint.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.context import FlowRunContext

LOOK_S = 2.0


@contextmanager
def ended_with_worker() -> Iterator[None]:
    """Watch the worker that started this process. Does nothing for a run that no worker started."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.deployment_id is None:
        yield
        return
    ended, parent = threading.Event(), os.getppid()

    def watch() -> None:
        while not ended.wait(LOOK_S):
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    threading.Thread(target=watch, name="worker watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
