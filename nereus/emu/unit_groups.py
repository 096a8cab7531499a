"""The process groups of one unit as one of its ranks sees them, passed in explicitly; None where a group is
trivial.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from nereus.emu.layout import Layout, Position, Rank


@dataclass(frozen=True, kw_only=True)
class UnitGroups:
    """Groups in layout order (never sorted ranks). Ranks are worker ids, as in every layout; in a group's
    operations give group ranks (`group_dst`), or map ids with `Generation.world_rank`.

    `tp`: the stage's tensor-parallel ranks. `pp`: this position's pipeline. `kv`: the tensor-parallel ranks
    that hold the same kv head (tp > kv heads). `ep` and `cp`: the ranks along that axis at this position;
    `copies`: those along both, which hold the same of every tensor but those of experts. `tie`: first and
    last stage at this position of a stage (tied embeddings, pp > 1), present on those two stages only. `dp`:
    the same position in every unit of the model-stage. `unit`: all ranks of the unit.
    """

    layout: Layout
    rank: Rank
    unit: ProcessGroup | None = None
    tp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    copies: ProcessGroup | None = None
    kv: ProcessGroup | None = None
    tie: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    dp_size: int = 1

    @property
    def position(self) -> Position:
        """Where this rank sits in the unit."""
        return self.layout.position(self.rank)

    @classmethod
    def alone(cls, layout: Layout) -> UnitGroups:
        """The groups of a unit of one rank: none."""
        assert layout.world_size == 1, f"a unit of {layout.world_size} ranks needs process groups"
        return cls(layout=layout, rank=layout.ranks[0])
