"""Keeps this process's signal handlers through a library that installs its own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def kept_handler(number: signal.Signals) -> Iterator[None]:
    """Keep the handler of `number` through the block, whatever handler is installed there, and call it once
    more after the block if the signal came meanwhile. Does nothing outside the main thread.

    Ray answers SIGTERM by leaving the process, its native core by aborting it, so that nobody looks after
    actors and records; an orderly stop needs the handler that was there before. So does Prefect: a run that
    is cancelled while the handler is another's counts as crashed. And what a handler raises may be lost:
    Python ignores it in what it calls back at a fork, of which Ray's start has many. So the signal is noted
    beside the handlers. (A thread for Ray's start, while the main thread keeps its handlers, is no way: Ray's
    processes end with the thread that started them.)
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(number)
    noted, note = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    earlier = signal.set_wakeup_fd(note, warn_on_full_buffer=False)
    install = signal.signal

    def install_others(signalnum: int, handler: Any) -> Any:
        return before if signalnum == number else install(signalnum, handler)

    signal.signal = install_others
    try:
        yield
    finally:
        signal.signal = install
        signal.set_wakeup_fd(earlier)
        signal.signal(number, before)
        came = number in _read(noted)
        os.close(noted)
        os.close(note)
        if came:
            os.kill(os.getpid(), number)


def _read(pipe: int) -> bytes:
    """The numbers of the signals that came, a byte each."""
    try:
        return os.read(pipe, 4096)
    except BlockingIOError:
        return b""
