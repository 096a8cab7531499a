"""One rank's part of a reshard plan: what the executor reads, and nothing else.

```
RankPlan ── chunks ──▶ Chunk ── copies   (old storage -> new storage on this rank)
                            └── rounds ─▶ Round ── sends    ─▶ Message(peer): direct + packed transfers
                                               ├── receives ─▶ Message(peer): the same, in the same order
                                               └── shared   ─▶ Message(root) among several ranks
```
In `shadow` mode there is one chunk. In `bounded` mode there is one chunk a place (first, layer 0, ..., last):
the executor allocates `Chunk.allocates`, runs the chunk, then frees `Chunk.frees`.

What both ends may rely on:
- `Round.number` is global. A message of round n is sent and received in round n; a rank takes its rounds in
  rising order and skips the numbers it has no part in, so no order of ranks can deadlock.
- A relay sends in a later round of the same chunk what it received in an earlier one, from its *new* storage.
- Copies may run at any time inside their chunk: no message reads what a copy writes, except a relay's send,
  and a relay received that region from a peer.
- The n-th `direct` transfer of a message and the order of `packed` are equal at both ends. Each direct
  transfer is one operation; all packed transfers of a message are one operation on one buffer, widest wire
  dtype first, so that every part of it is aligned.
- A broadcast is one message to several peers; an all-gather is a broadcast of each of its ranks, all in one
  group call. Its parts are direct or packed alike at all ends.
- At most `operation_cap` operations a rank and round, sends and receives together.
- The destination starts as zeros: rows that no region covers are padding and must hold zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nereus.emu.kinds import DTYPE_BYTES, Kind, KindMove, KindMoves
from nereus.emu.layout import Rank
from nereus.emu.tensor import Box, box_size
from nereus.emu.unit import Unit

if TYPE_CHECKING:
    from nereus.emu.mesh_moves import MeshMove

Mode = Literal["shadow", "bounded"]
Side = Literal["old", "new"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """`num` runs of `width` elements, `stride` apart, the first at element `at` of a stored tensor.

    A single run has its width as stride.
    """

    at: int
    num: int
    width: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A box of a logical tensor and where this end stores it.

    `side` says in which of the rank's two shards `physical` lies. `rows` is `stored` as runs of memory, None
    where these lie in more than one stride.
    """

    logical: str
    box: Box
    side: Side
    physical: str
    stored: Box
    rows: Rows | None

    @property
    def contiguous(self) -> bool:
        """Whether `stored` is one run of memory."""
        return self.rows is not None and self.rows.num == 1

    @property
    def num_elements(self) -> int:
        """Elements of the region."""
        return box_size(self.box)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One region of one kind, as one end of a message sees it."""

    region: Region
    move: KindMove

    @property
    def kind(self) -> Kind:
        """The kind (name and stored dtype) of the arena that this end reads or writes."""
        return self.move.source if self.region.side == "old" else self.move.target

    @property
    def casts(self) -> bool:
        """Whether this end converts between its stored dtype and the wire's."""
        return self.kind.dtype != self.move.wire_dtype

    @property
    def zero_copy(self) -> bool:
        """Whether this end can hand its live storage to the transport."""
        return self.region.contiguous and not self.casts

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self.region.num_elements * DTYPE_BYTES[self.move.wire_dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Everything that goes to, or comes from, one peer in one round."""

    peer: Rank
    direct: tuple[Transfer, ...]
    packed: tuple[Transfer, ...]

    @property
    def num_operations(self) -> int:
        """Point-to-point operations the message costs."""
        return len(self.direct) + bool(self.packed)

    @property
    def packed_bytes(self) -> int:
        """Size of the packed buffer."""
        return sum(transfer.num_bytes for transfer in self.packed)

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self.packed_bytes + sum(transfer.num_bytes for transfer in self.direct)

    @property
    def staging_bytes(self) -> int:
        """Bytes this end stages: the packed buffer, and direct transfers it cannot give from live storage."""
        return self.packed_bytes + sum(t.num_bytes for t in self.direct if not t.zero_copy)

    @property
    def far_staging_bytes(self) -> int:
        """The same where the old shard lies in host memory."""
        return self.packed_bytes + sum(
            t.num_bytes for t in self.direct if not t.zero_copy or t.region.side == "old"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A message that `message.peer`, the root, broadcasts among `ranks` (ascending), itself one of them."""

    ranks: tuple[Rank, ...]
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One group call: all its sends, receives and broadcasts are in flight together."""

    number: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    shared: tuple[Shared, ...] = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """All that this rank sends, receives or broadcasts."""
        return (*self.sends, *self.receives, *(shared.message for shared in self.shared))

    @property
    def num_operations(self) -> int:
        """Operations of the group call."""
        return sum(message.num_operations for message in self.messages)

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging that the group call holds."""
        return sum(message.staging_bytes for message in self.messages)

    @property
    def far_staging_bytes(self) -> int:
        """The same where the old shard lies in host memory."""
        return sum(message.far_staging_bytes for message in self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCopy:
    """A region that this rank holds: `source` on the old side, `target` on the new one, for all kinds."""

    source: Region
    target: Region
    moves: KindMoves


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of the transfer after which the old storage it read may be freed (bounded mode).

    `allocates` and `frees` name physical tensors of the new and the old shard.
    """

    allocates: tuple[str, ...]
    copies: tuple[LocalCopy, ...]
    rounds: tuple[Round, ...]
    frees: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank does.

    `ranks` are all that send or receive in the whole plan, ascending: the executor opens one channel over
    them, and a rank outside it has local work at most. `digest` is that of the whole plan and must be equal
    on all ranks before a byte moves. `old` and `new` are the units whose shards this rank holds before and
    after, None where it holds none.
    """

    rank: Rank
    ranks: tuple[Rank, ...]
    digest: str
    mode: Mode
    old: Unit | None
    new: Unit | None
    chunks: tuple[Chunk, ...]
    meshes: tuple[MeshMove, ...] = ()
    """Instead of chunks: the rank's part as moves between meshes (`mesh_moves`)."""

    @property
    def rounds(self) -> tuple[Round, ...]:
        """All rounds in order."""
        return tuple(turn for chunk in self.chunks for turn in chunk.rounds)

    @property
    def copies(self) -> tuple[LocalCopy, ...]:
        """All local copies in order."""
        return tuple(copy for chunk in self.chunks for copy in chunk.copies)

    @property
    def groups(self) -> tuple[tuple[Rank, ...], ...]:
        """The sets of ranks in which this one broadcasts or is broadcast to."""
        return tuple(sorted({shared.ranks for turn in self.rounds for shared in turn.shared}))

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank sends, relays included; a broadcast counts once for each that it reaches."""
        sent = sum(message.num_bytes for turn in self.rounds for message in turn.sends)
        return sent + sum(
            shared.message.num_bytes * (len(shared.ranks) - 1)
            for turn in self.rounds
            for shared in turn.shared
            if shared.message.peer == self.rank
        )

    @property
    def received_bytes(self) -> int:
        """Bytes this rank receives."""
        received = sum(message.num_bytes for turn in self.rounds for message in turn.receives)
        return received + sum(
            shared.message.num_bytes
            for turn in self.rounds
            for shared in turn.shared
            if shared.message.peer != self.rank
        )

    @property
    def staging_bytes(self) -> int:
        """Most staging held at once when two successive rounds overlap (double buffering)."""
        return self._overlapping([turn.staging_bytes for turn in self.rounds])

    @property
    def far_staging_bytes(self) -> int:
        """The same where the old shard lies in host memory: all that is sent from it is staged."""
        return self._overlapping([turn.far_staging_bytes for turn in self.rounds])

    @staticmethod
    def _overlapping(sizes: list[int]) -> int:
        return max((a + b for a, b in zip([0, *sizes], [*sizes, 0], strict=True)), default=0)
