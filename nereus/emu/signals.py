"""Keeps this process's signal handlers through a library that installs its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_handler(number: signal.Signals) -> Iterator[None]:
    """Put the handler of `number` back after the block. Does nothing outside the main thread.

    Ray's native core answers SIGTERM by aborting the driver, so that nobody looks after actors and records;
    an orderly stop needs the handler that was there before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(number)
    try:
        yield
    finally:
        signal.signal(number, before)
