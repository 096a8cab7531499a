"""Locked pages: unlocked when the memory goes, and a refusal is no error."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nereus.emu.page_locks import lock_pages


class Library:
    """A driver that keeps the addresses that are locked."""

    def __init__(self, code: int) -> None:
        self.code, self.locked = code, dict[int, int]()

    def __getitem__(self, name: str) -> Callable[..., int]:
        return {"cuMemHostRegister_v2": self.lock, "cuMemHostUnregister": self.unlock}[name]

    def lock(self, address: Any, num_bytes: Any, flags: Any) -> int:
        if not self.code:
            self.locked[address.value] = num_bytes.value
        return self.code

    def unlock(self, address: Any) -> int:
        del self.locked[address.value]
        return 0


@pytest.mark.parametrize("code", [0, 712])
def test_pages_are_locked_until_the_tensor_is_gone(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(code)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    flat = torch.zeros(1000)
    assert lock_pages(flat) == (code == 0)
    assert library.locked == ({flat.data_ptr(): 4000} if code == 0 else {})
    del flat
    gc.collect()
    assert not library.locked


def test_without_a_driver_nothing_is_locked() -> None:
    assert not lock_pages(torch.zeros(10)) or torch.cuda.is_available()
    assert not lock_pages(torch.zeros(0))


@pytest.mark.gpu
def test_a_refusal_is_not_the_next_error_of_torch() -> None:
    device = torch.zeros(1, device="cuda")
    flat = torch.zeros(1 << 20)
    assert lock_pages(flat)
    assert not lock_pages(flat), "it is locked already"
    assert float((device + 1).sum()) == 1
    assert flat.is_pinned()
