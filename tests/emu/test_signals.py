"""A handler survives a library that installs its own, and hears of a signal that came meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from nereus.emu.signals import kept_handler


class Stopped(Exception):
    """What the handler raises."""


@pytest.fixture
def _stopping() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGUSR1, stop)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with kept_handler(signal.SIGTERM):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("_stopping")
def test_a_handler_that_the_block_installs_takes_no_effect() -> None:
    before, after = signal.getsignal(signal.SIGUSR1), []
    with pytest.raises(Stopped), kept_handler(signal.SIGUSR1):  # noqa: PT012
        signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(number))
        assert signal.getsignal(signal.SIGUSR1) is before
        os.kill(os.getpid(), signal.SIGUSR1)
        after.append("the block goes on")
    assert after == []


@pytest.mark.usefixtures("_stopping")
def test_what_a_handler_raised_and_the_block_lost_is_raised_once_more() -> None:
    after = []
    with pytest.raises(Stopped), kept_handler(signal.SIGUSR1):  # noqa: PT012
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
        except Stopped:
            after.append("lost")
        other = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # other signals' handlers are the block's
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
        signal.signal(signal.SIGUSR2, other)
        after.append("the block goes on")
    assert after == ["lost", "the block goes on"]


@pytest.mark.usefixtures("_stopping")
def test_without_a_signal_nothing_is_raised_and_what_the_block_raises_is() -> None:
    with kept_handler(signal.SIGUSR1):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with pytest.raises(ZeroDivisionError), kept_handler(signal.SIGUSR1):
        raise ZeroDivisionError


def test_other_threads_are_left_alone() -> None:
    done = []

    def enter() -> None:
        with kept_handler(signal.SIGTERM):
            done.append(True)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert done == [True]
