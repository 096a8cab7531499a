"""Where chains lie: flat arrays of (chain, rank), so that a thousand ranks are handled at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain as joined

import numpy as np
from numpy.typing import NDArray

from nereus.emu.chains import Chain
from nereus.emu.operations import Units
from nereus.emu.unit import Unit

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entries:
    """`chains[i]` has a unit on rank `ranks[i]`; units one after the other, each in layout order."""

    chains: Ints
    ranks: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footprint:
    """The ranks of the units that chains read, end and make."""

    reads: Entries
    ends: Entries
    makes: Entries

    @property
    def num_ranks(self) -> int:
        """Above every rank."""
        return 1 + max(int(one.ranks.max(initial=-1)) for one in (self.reads, self.ends, self.makes))


def footprint(chains: Sequence[Chain]) -> Footprint:
    """The footprint of chains, which are numbered as they come."""
    return Footprint(
        reads=_entries([chain.reads for chain in chains]),
        ends=_entries([chain.ends for chain in chains]),
        makes=_entries([chain.makes for chain in chains]),
    )


def ranks_of(units: Iterable[Unit]) -> Ints:
    """The ranks of units, one unit after the other."""
    return np.fromiter(joined.from_iterable([unit.layout.ranks for unit in units]), dtype=np.int64)


def _entries(units_of: Sequence[Units]) -> Entries:
    sizes = [sum([len(unit.layout.ranks) for unit in units]) for units in units_of]
    return Entries(
        chains=np.repeat(np.arange(len(units_of)), sizes),
        ranks=ranks_of(joined.from_iterable(units_of)),
    )
