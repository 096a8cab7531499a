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
    makes = _entries([chain.makes for chain in chains])
    reads_of, ends_of = [chain.reads for chain in chains], [chain.ends for chain in chains]
    if not any(reads and ends and reads is not ends for reads, ends in zip(reads_of, ends_of, strict=True)):
        # As chains are derived: what is both read and ended is looked at once.
        old = _entries([reads or ends for reads, ends in zip(reads_of, ends_of, strict=True)])
        return Footprint(reads=_of_those(old, reads_of), ends=_of_those(old, ends_of), makes=makes)
    return Footprint(reads=_entries(reads_of), ends=_entries(ends_of), makes=makes)


def ranks_of(units: Iterable[Unit]) -> Ints:
    """The ranks of units, one unit after the other."""
    return np.fromiter(joined.from_iterable([unit.layout.ranks for unit in units]), dtype=np.int64)


def _entries(units_of: Sequence[Units]) -> Entries:
    ranks = [unit.layout.ranks for units in units_of for unit in units]
    number = np.repeat(np.arange(len(units_of)), [*map(len, units_of)])
    return Entries(
        chains=np.repeat(number, [*map(len, ranks)]),
        ranks=np.fromiter(joined.from_iterable(ranks), dtype=np.int64),
    )


def _of_those(entries: Entries, units_of: Sequence[Units]) -> Entries:
    """The entries of those chains that have such units."""
    if all(units_of):
        return entries
    there = np.array([*map(bool, units_of)])[entries.chains]
    return Entries(chains=entries.chains[there], ranks=entries.ranks[there])
