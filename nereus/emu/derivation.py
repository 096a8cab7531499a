"""From the units of a model-stage before and after to chains of operations, each fused into one minimal move.

```
old units ─┐  equal layouts are kept
           ├─▶ units that share ranks form a component ─▶ Split ▶ Destroy ▶ Extend ▶ Merge   (one Chain)
new units ─┘  old ones without a successor are destroyed, new ones on fresh ranks extended from a kept unit
```
Chains are closed, so those of one model-stage never wait for one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain as joined
from itertools import count, repeat

from nereus.emu.chains import Chain
from nereus.emu.dealing import deal
from nereus.emu.layout import Layout, Rank
from nereus.emu.operations import Destroy, Extend, Merge, Operation, Place, Split, Units
from nereus.emu.topology import Topology
from nereus.emu.unit import Unit, UnitId
from nereus.errors import InvalidOperation, NoSource, explain


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How one model-stage gets from its old units to the new ones."""

    kept: Units
    chains: tuple[Chain, ...]


@dataclass(slots=True)
class _Draft:
    """A component of old and new units while its chain is being made: their numbers.

    `is_merge`: known to be one new unit on exactly the ranks of its old ones, as most are.
    """

    old: list[int]
    new: list[int]
    fresh: tuple[int, ...] = ()
    is_merge: bool = False


@dataclass
class _Derivation:
    """One model-stage's change in the making."""

    model_stage: str
    old: Units
    new: Units
    names: Iterator[UnitId]

    @cached_property
    def owner_before(self) -> dict[Rank, int]:
        """The number of the old unit that lies on each rank."""
        return _owners(self.old)

    @cached_property
    def owner_after(self) -> dict[Rank, int]:
        """The number of the new unit that lies on each rank."""
        return _owners(self.new)


def change_of(
    model_stage: str, before: Units, after: Units, others: Units, topology: Topology | None = None
) -> Change:
    """The chains that turn units `before` of a model-stage into units `after`, whose names are chosen anew.

    A unit that has an equal layout after is kept, with its name. `others` are units of the same model in
    other stages: sources where the model-stage has none. Raises NoSource when nobody holds the state,
    InvalidOperation when the model-stage would change the kinds of state it carries.
    """
    kept, old, new = _kept(before, after)
    if before and set({id(unit.kinds): unit.kinds for unit in after}.values()) - {before[0].kinds}:
        raise InvalidOperation(
            explain(
                f"cannot change {model_stage}",
                values=f"it carries {', '.join(f'{k.name} in {k.dtype}' for k in before[0].kinds)}",
                rule="an operation keeps the kinds of state and their dtypes",
                remedy="give the units after the kinds of those before",
            )
        )
    if not old and not new:
        return Change(kept=kept, chains=())
    work = _Derivation(
        model_stage=model_stage,
        old=old,
        new=new,
        names=map(
            UnitId, repeat(model_stage), count(max([unit.id.index for unit in before], default=-1) + 1)
        ),
    )
    living, dying, fresh = _components(work)
    chains: list[Chain] = []
    if fresh and not kept and living:
        for at, number in enumerate(fresh):
            living[at % len(living)].fresh += (number,)
    elif fresh:
        moving = [old[i] for i in dying]
        sources = kept or tuple(moving) or _holders(model_stage, new[0], others)
        ends = frozenset() if kept or not moving else frozenset(unit.id for unit in moving)
        dealt = deal([new[i] for i in fresh], sources, topology)
        chains += [_extension(work, reads, units, reads[0].id in ends) for reads, units in dealt]
        if ends:
            used = {source.id for reads, _ in dealt for source in reads}
            dying = [i for i in dying if old[i].id not in used]
    chains += [_destruction(old[i]) for i in dying]
    chains += [_reshaping(work, draft) for draft in living]
    return Change(kept=kept, chains=tuple(chains))


def _owners(units: Units) -> dict[Rank, int]:
    """The number of the unit that lies on each rank."""
    ranks_of = [unit.layout.ranks for unit in units]
    numbers = joined.from_iterable(map(repeat, range(len(units)), map(len, ranks_of)))
    return dict(zip(joined.from_iterable(ranks_of), numbers, strict=True))


def _kept(before: Units, after: Units) -> tuple[Units, Units, Units]:
    """(kept, old, new): units that are equal but for the name, and the others of each side."""
    spare = {unit.layout.ranks[0]: unit for unit in before}  # they share no rank
    kept: dict[UnitId, Unit] = {}
    new: list[Unit] = []
    for unit in after:
        twin = spare.get(unit.layout.ranks[0])
        if twin is not None and twin.layout.ranks == unit.layout.ranks and twin.layout == unit.layout:
            kept[twin.id] = twin
        else:
            new.append(unit)
    old = tuple([unit for unit in before if unit.id not in kept]) if kept else before
    return tuple(kept.values()), old, tuple(new)


def _components(work: _Derivation) -> tuple[list[_Draft], list[int], list[int]]:
    """(living, dying, fresh): old and new units that share ranks, directly or through others, in order of
    their first new unit; old ones that share none; new ones that share none.
    """
    starts = {unit.layout.ranks[0]: number for number, unit in enumerate(work.old)}
    draft_of: dict[int, _Draft] = {}
    living: list[_Draft] = []
    fresh: list[int] = []
    for number, unit in enumerate(work.new):
        ranks = unit.layout.ranks
        if whole := _side_by_side(work.old, starts, ranks):
            home = _Draft(whole, [number], is_merge=True)
            for i in whole:
                draft_of[i] = home
            living.append(home)
            continue
        if work.owner_before.keys().isdisjoint(ranks):
            fresh.append(number)
            continue
        owners = set(map(work.owner_before.get, ranks))
        touched = sorted([i for i in owners if i is not None])
        found = list({id(draft_of[i]): draft_of[i] for i in touched if i in draft_of}.values())
        if found:
            home = found[0]
        else:
            home = _Draft([], [])
            living.append(home)
        home.new.append(number)
        for i in touched:
            if i not in draft_of:
                draft_of[i] = home
                home.old.append(i)
        for other in found[1:]:
            home.old += other.old
            home.new += other.new
            draft_of.update(dict.fromkeys(other.old, home))
            other.old, other.new = [], []
    living = [draft for draft in living if draft.new]
    return living, [i for i in range(len(work.old)) if i not in draft_of], fresh


def _side_by_side(old: Units, starts: Mapping[Rank, int], ranks: tuple[Rank, ...]) -> list[int]:
    """The old units that take exactly these ranks, one unit after the other; none where they lie otherwise.

    The short way to most merges, without a look at every rank. `starts` has the first rank of every unit.
    """
    found: list[int] = []
    at = 0
    while at < len(ranks):
        number = starts.get(ranks[at])
        if number is None:
            return []
        part = old[number].layout.ranks
        if part != ranks[at : at + len(part)]:
            return []
        found.append(number)
        at += len(part)
    return sorted(found)


def _is_merge(work: _Derivation, draft: _Draft) -> bool:
    """Whether the component is one new unit on exactly the ranks of its old ones, in whatever order."""
    if len(draft.new) > 1:
        return False
    ranks = work.new[draft.new[0]].layout.ranks
    held = sum([len(work.old[i].layout.ranks) for i in draft.old])
    return len(ranks) == held and all(map(work.owner_before.__contains__, ranks))


def _holders(model_stage: str, unit: Unit, others: Units) -> Units:
    """Units of other stages that hold every kind of the unit, all of one model-stage."""
    wanted = {kind.name for kind in unit.kinds}
    able = [other for other in others if wanted <= {kind.name for kind in other.kinds}]
    if not able:
        raise NoSource(
            explain(
                f"cannot make units of {model_stage}",
                values=f"no live unit of {unit.model} holds {', '.join(sorted(wanted))}",
                rule="every new unit is copied from a live one",
                remedy="restore this model from its last checkpoint",
            )
        )
    # One stage only: sources of one plan must be replicas of one another. Training holds the newest weights.
    chosen = max(able, key=lambda other: (other.id.stage == "training", other.model_stage)).model_stage
    return tuple(other for other in able if other.model_stage == chosen)


def _extension(work: _Derivation, reads: Units, units: list[Unit], ends: bool) -> Chain:
    """Copies of some units on fresh ranks; a unit itself ends where it moves rather than stays."""
    makes = tuple([unit.with_id(next(work.names)) for unit in units])
    into = tuple([(unit.id, unit.layout) for unit in makes])
    kinds = makes[0].kinds if makes[0].kinds != reads[0].kinds else None
    sources = tuple([source.id for source in reads])
    operations: tuple[Operation, ...] = (Extend(sources=sources, into=into, kinds=kinds),)
    if ends:
        operations += tuple([Destroy(unit=source) for source in sources])
    return Chain(
        id=f"{work.model_stage}:+{makes[0].id.index}",
        model_stage=work.model_stage,
        operations=operations,
        reads=reads,
        ends=reads if ends else (),
        makes=makes,
    )


def _destruction(unit: Unit) -> Chain:
    return Chain(
        id=f"{unit.model_stage}:-{unit.id.index}",
        model_stage=unit.model_stage,
        operations=(Destroy(unit=unit.id),),
        reads=(),
        ends=(unit,),
        makes=(),
    )


def _reshaping(work: _Derivation, draft: _Draft) -> Chain:
    """The chain of a component in which old and new units share ranks."""
    old = tuple([work.old[i] for i in draft.old])
    makes: Units
    operations: tuple[Operation, ...]
    if not draft.fresh and (draft.is_merge or _is_merge(work, draft)):
        unit = work.new[draft.new[0]].with_id(next(work.names))
        makes = (unit,)
        operations = (Merge(units=tuple([each.id for each in old]), into=(unit.id, unit.layout)),)
    else:
        final = {number: next(work.names) for number in (*draft.new, *draft.fresh)}
        makes = tuple([work.new[number].with_id(name) for number, name in final.items()])
        operations = _pieced(work, draft, final)
    return Chain(
        id=f"{work.model_stage}:+{makes[0].id.index}",
        model_stage=work.model_stage,
        operations=operations,
        reads=old,
        ends=old,
        makes=makes,
    )


def _pieced(work: _Derivation, draft: _Draft, final: Mapping[int, UnitId]) -> tuple[Operation, ...]:
    """The operations of a component: cut its old units into parts, and join these to the new ones."""
    pieces: dict[int, list[UnitId]] = {number: [] for number in draft.new}
    done: set[int] = set()
    splits: list[Operation] = []
    destroys: list[Operation] = []
    for i in draft.old:
        cells = _cells(work.old[i], work.owner_after)
        if len(cells) == 1:
            pieces[next(iter(cells))].append(work.old[i].id)  # a component has no unit without successor
            continue
        places: list[Place] = []
        for number, ranks in cells.items():
            if number >= 0 and len(ranks) == work.new[number].layout.world_size:
                places.append((final[number], work.new[number].layout))
                done.add(number)
                continue
            like = work.new[number].layout if number >= 0 else work.old[i].layout
            places.append((next(work.names), part_layout(ranks, like)))
            if number >= 0:
                pieces[number].append(places[-1][0])
            else:
                destroys.append(Destroy(unit=places[-1][0]))
        splits.append(Split(unit=work.old[i].id, into=tuple(places)))
    extends, merges = _growth(work, draft, final, pieces, done)
    return (*splits, *destroys, *extends, *merges)


def _growth(
    work: _Derivation,
    draft: _Draft,
    final: Mapping[int, UnitId],
    pieces: Mapping[int, list[UnitId]],
    done: set[int],
) -> tuple[list[Operation], list[Operation]]:
    """Extends onto ranks that the model-stage did not have, and the merges that complete the new units."""
    extends: list[Operation] = []
    merges: list[Operation] = []
    for number in draft.new:
        if number in done:
            continue
        unit, parts = work.new[number], pieces[number]
        fresh = [rank for rank in unit.layout.ranks if rank not in work.owner_before]
        if fresh:
            place = (next(work.names), part_layout(fresh, unit.layout))
            extends.append(Extend(sources=(parts[0],), into=(place,)))
            parts.append(place[0])
        merges.append(Merge(units=tuple(parts), into=(final[number], unit.layout)))
    if draft.fresh:
        into = tuple((final[number], work.new[number].layout) for number in draft.fresh)
        first = draft.new[0]
        source = final[first] if first in done else pieces[first][0]
        extends.append(Extend(sources=(source,), into=into))
    return extends, merges


def _cells(unit: Unit, owner_after: Mapping[Rank, int]) -> dict[int, list[Rank]]:
    """The unit's ranks by the new unit that takes them, -1 for those that none takes."""
    cells: dict[int, list[Rank]] = {}
    for rank in unit.layout.ranks:
        cells.setdefault(owner_after.get(rank, -1), []).append(rank)
    return cells


def part_layout(ranks: Iterable[Rank], like: Layout) -> Layout:
    """A layout for some ranks of a unit, with a tp that divides the unit's and layers spread evenly.

    It exists on paper only, between the operations of one chain: no byte is ever laid out by it.
    """
    mine = tuple(ranks)
    num_layers = sum(like.layers)
    fitting = [tp for tp in range(1, len(mine) + 1) if len(mine) % tp == 0 and like.tp % tp == 0]
    tp = next((tp for tp in reversed(fitting) if len(mine) // tp <= num_layers), len(mine))
    pp = len(mine) // tp
    base, extra = divmod(num_layers, pp)
    return Layout(tp=tp, pp=pp, ranks=mine, layers=tuple(base + (stage < extra) for stage in range(pp)))
