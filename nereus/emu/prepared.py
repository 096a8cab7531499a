"""What a worker has prepared of the epoch that is open, until it is decided."""

from __future__ import annotations

from dataclasses import dataclass, field

from nereus.emu.arena import ShardState
from nereus.emu.ballot import Vote
from nereus.emu.host_copy import HostCopy
from nereus.emu.orders import Moved, Order


@dataclass(eq=False)
class Prepared:
    """`shadows` are the new shards by model-stage, None where one is dropped; `spilled` lie on the host."""

    epoch: int
    orders: list[Order] = field(default_factory=list)
    shadows: dict[str, ShardState | None] = field(default_factory=dict)
    spilled: dict[str, HostCopy] = field(default_factory=dict)
    done: list[Moved] = field(default_factory=list)
    reason: str = ""
    vote: Vote | None = None
    deadline_s: float = 0.0

    @property
    def left_on_host(self) -> set[str]:
        """Model-stages whose shard a commit would leave in host memory."""
        kept = {key for key, copy in self.spilled.items() if self.shadows.get(key) is copy.state}
        return kept | (self.spilled.keys() - self.targets)

    @property
    def targets(self) -> set[str]:
        """Model-stages that an order has made or dropped."""
        return {order.target for order in self.orders if order.changes_target}
