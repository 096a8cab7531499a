"""The golden numbers of verl's `core_algos.py`: outputs and gradients for one small batch, float32 on CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Golden:
    """Golden values by key; inputs as tensors."""

    values: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def input(self, name: str) -> Tensor:
        return torch.tensor(self.values["inputs"][name])

    @property
    def mask_bt(self) -> Tensor:
        return self.input("mask")

    @property
    def group_b(self) -> Tensor:
        names = self.values["inputs"]["uid"]
        return torch.tensor([sorted(set(names)).index(name) for name in names])
