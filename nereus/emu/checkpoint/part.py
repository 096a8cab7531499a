"""A rank's part of a checkpoint: one safetensors file with the boxes that this rank owns, of every kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nereus.emu.arena import ShardState
from nereus.emu.checkpoint.ownership import owned_pieces
from nereus.emu.host_ring import HostRing
from nereus.emu.layout import Layout, Piece, Rank
from nereus.emu.tensor import Box, ModelSpec, box_shape
from nereus.emu.tensor_writer import FileSum, Outgoing, write_tensors
from nereus.errors import CheckpointError, explain


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One stored box of one kind of one logical tensor."""

    kind: str
    logical: str
    box: Box

    @property
    def key(self) -> str:
        """Its name in the file: kind/logical/lo:hi,lo:hi."""
        return f"{self.kind}/{self.logical}/{','.join(f'{lo}:{hi}' for lo, hi in self.box)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank reports to the driver: the file it wrote, its checksum, and the boxes in it."""

    model: str
    file: str
    sum: FileSum
    dtypes: tuple[tuple[str, str], ...]
    entries: tuple[Entry, ...]


def write_part(
    folder: Path | str,
    model: str,
    spec: ModelSpec,
    layout: Layout,
    rank: Rank,
    state: ShardState,
    omega: Layout | None = None,
) -> Part:
    """Write `folder/model/part-<place>.safetensors`, flushed to the disk. Called on every rank of one unit.

    `grad` is never stored. The file's number is the rank's place in the layout. Where the units share the
    optimizer's state, `omega` is its layout and every rank of it writes; those outside `layout`, which is
    that of one unit, write no weights. Raises CheckpointError when the disk refuses.
    """
    name = f"part-{(omega or layout).ranks.index(rank):05d}.safetensors"
    path = Path(folder) / model / name
    kinds = [kind for kind in state.arenas if kind != "grad"]
    theta = owned_pieces(spec, layout).get(rank, ())
    other = theta if omega is None else owned_pieces(spec, omega)[rank]
    pieces = {kind: theta if kind == "theta" else other for kind in kinds}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        ring = HostRing.of(next(iter(state.arenas.values())).device)
        checksum = write_tensors(path, _outgoing(state, pieces), ring)
    except OSError as problem:
        raise CheckpointError(
            explain(
                f"cannot write {path}",
                values=str(problem),
                rule="every rank of one unit writes its part",
                remedy="make room or name another folder; the previous checkpoint still holds",
            )
        ) from problem
    return Part(
        model=model,
        file=name,
        sum=checksum,
        dtypes=tuple((kind, str(state[kind].flat.dtype).removeprefix("torch.")) for kind in kinds),
        entries=tuple(
            Entry(kind=kind, logical=piece.logical, box=piece.box) for kind in kinds for piece in pieces[kind]
        ),
    )


def _outgoing(state: ShardState, pieces: Mapping[str, Sequence[Piece]]) -> list[Outgoing]:
    return [
        Outgoing(
            name=Entry(kind=kind, logical=piece.logical, box=piece.box).key,
            shape=box_shape(piece.box),
            dtype=state[kind].flat.dtype,
            load=lambda kind=kind, piece=piece: state[kind].piece(piece),  # type: ignore[misc]
        )
        for kind, held in pieces.items()
        for piece in held
    ]
