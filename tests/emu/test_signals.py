"""A handler survives a library that installs its own."""

from __future__ import annotations

import signal
import threading

from nereus.emu.signals import kept_handler


def test_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with kept_handler(signal.SIGTERM):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == before


def test_other_threads_are_left_alone() -> None:
    done = []

    def enter() -> None:
        with kept_handler(signal.SIGTERM):
            done.append(True)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert done == [True]
