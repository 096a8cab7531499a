"""The product with a weight that has an adapter: x W^T + scale * (x A^T) B^T, on this rank's part of each.

Letters: n tokens, i inputs, o outputs, r the adapter's rank.

A weight that stores several targets one below the other has their A's stored likewise, so one product takes x
down for all of them, and each B brings its share up to its own columns:

    x_ni --A_q,A_k,A_v--> [n, 3r] --B_q | B_k | B_v--> [n, q + k + v]

Cut by columns, x W^T and (x A^T) B^T are both parts of sums over the tensor-parallel group, so the collective
that sums the first sums the second with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nereus.emu.engines.torch.product import product
from nereus.emu.lora import Lora, down_of, up_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The factors of the targets in one stored weight: `down_ri` of all, `ups_or` one a part of the weight.

    A part that is no target has None, and `widths` are the rows of every part.
    """

    down_ri: Tensor
    ups_or: tuple[Tensor | None, ...]
    widths: tuple[int, ...]
    scale: float

    def delta(self, x_ni: Tensor) -> Tensor:
        """What the adapter adds to the product, [n, o]."""
        low_nr = product(x_ni, self.down_ri) * self.scale
        lows = iter(low_nr.chunk(sum(up is not None for up in self.ups_or), dim=1))
        parts = [
            x_ni.new_zeros(len(x_ni), width) if up_or is None else product(next(lows), up_or)
            for up_or, width in zip(self.ups_or, self.widths, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def adapted(x_ni: Tensor, weight_oi: Tensor, bias_o: Tensor | None, adapter: Adapter | None) -> Tensor:
    """x W^T + bias, with what the adapter adds; [n, o], a fresh tensor."""
    out_no = product(x_ni, weight_oi, bias_o)
    return out_no if adapter is None else out_no + adapter.delta(x_ni)


def adapter_of(
    views: Mapping[str, Tensor], lora: Lora | None, weight: str, parts: Sequence[tuple[str, int]]
) -> Adapter | None:
    """The adapter of the stored weight of that name, None where no part of it is a target.

    `parts` are the logical weights in it and the rows of each; `views` hold the factors by stored name.
    """
    if lora is None:
        return None
    ups_or = tuple(views.get(up_of(name)) for name, _ in parts)
    targets = [name for (name, _), up in zip(parts, ups_or, strict=True) if up is not None]
    if not targets:
        return None
    down_ri = views[down_of(weight if len(targets) > 1 else targets[0])]
    return Adapter(down_ri=down_ri, ups_or=ups_or, widths=tuple(rows for _, rows in parts), scale=lora.scale)
