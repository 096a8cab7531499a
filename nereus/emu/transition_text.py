"""A transition in words: what each operation does, what it waits for, and where memory is short."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from nereus.emu.chains import Chain
from nereus.emu.graph import Node, Spill, TransitionGraph
from nereus.emu.layout import Layout, Rank
from nereus.emu.operations import Destroy, Extend, Merge, Operation, Place, Split
from nereus.emu.schedule import Schedule, Slot
from nereus.emu.unit import UnitId

MOST_RANKS = 6


def explain(schedule: Schedule) -> str:
    """The transition in the order in which it runs, one block a chain."""
    graph = schedule.graph
    num_operations = sum(len(chain.operations) for chain in graph.chains)
    if not graph.chains:
        return "nothing changes: every unit is kept"
    lines = [
        f"transition: {_count(num_operations, 'operation')} in {_count(len(graph.chains), 'chain')} and "
        f"{_count(len(graph.waves), 'wave')}, {_count(len(graph.kept), 'unit')} kept, "
        f"about {seconds_text(schedule.makespan_s)}",
        _memory_line(schedule),
    ]
    waits = _waits(graph)
    for slot in schedule.slots:
        lines += _block(graph, slot, waits)
    return "\n".join(lines)


def _block(graph: TransitionGraph, slot: Slot, waits: dict[int, list[str]]) -> list[str]:
    chain = graph.chains[slot.chain]
    times = f"[{seconds_text(slot.start_s)} - {seconds_text(slot.end_s)}]"
    if slot.spill is not None:
        return [f"{chain.id}  {times}  {spill_text(slot.spill)}"]
    head = f"{chain.id}  {times}"
    if chain.makes and slot.end_s > slot.start_s:
        head += f"  reads {_units(unit.id for unit in chain.reads)}"
    lines = [head, *(f"    {operation_text(operation)}" for operation in chain.operations)]
    return lines + [f"    after {reason}" for reason in waits.get(slot.chain, [])]


def _waits(graph: TransitionGraph) -> dict[int, list[str]]:
    out: dict[int, list[str]] = {}
    for first, then, reason in graph.edges:
        why = "frees memory" if reason == "resource" else "still reads what ends here"
        out.setdefault(then, []).append(f"{graph.chains[first].id}, which {why}")
    for number, then in graph.spill_edges:
        out.setdefault(then, []).append(f"{_units(graph.spills[number][1].units)} went to the host")
    return out


def _memory_line(schedule: Schedule) -> str:
    if not schedule.tight:
        return "memory: old and new state fit together everywhere; one transaction in shadow mode"
    line = f"memory: short on {ranks_text(sorted(schedule.tight))}"
    if schedule.peak_bytes:
        line += f"; at most {bytes_text(max(schedule.peak_bytes.values()))} of state at once"
    if schedule.spilled_bytes:
        line += f"; {bytes_text(schedule.spilled_bytes)} pass through host memory"
    return line


def node_text(graph: TransitionGraph, node: Node, num_bytes: int | None) -> str:
    """One operation with the layouts it starts from and its bytes, e.g.
    `Split actor.training#0 into #1 tp1 pp1 on 0; #2 tp1 pp1 on 1; from tp2 pp1; 1.2 MB`.

    Without `num_bytes` it only frees, or its bytes travel with the operation that leads its chain.
    """
    layouts = {unit.id: unit.layout for unit in graph.before.units}
    for operation in graph.chains[node.chain].operations:
        layouts |= _made(operation)
    parts = [operation_text(node.operation)]
    match node.operation:
        case Destroy(unit=unit):
            parts[0] += f" {layout_text(layouts[unit])}"
        case Split(unit=unit) | Merge(units=(unit, *_)) | Extend(sources=(unit, *_)):
            parts.append(f"from {layouts[unit].text}")
    if num_bytes is not None:
        parts.append(bytes_text(num_bytes))
    elif not node.leads:
        leader = type(graph.chains[node.chain].operations[0]).__name__
        parts.append(f"bytes travel with {leader}")
    return "; ".join(parts)


def _made(operation: Operation) -> dict[UnitId, Layout]:
    match operation:
        case Split(into=into) | Extend(into=into):
            return dict(into)
        case Merge(into=(name, layout)):
            return {name: layout}
        case Destroy():
            return {}


def operation_text(operation: Operation | Spill) -> str:
    """One operation, e.g. `Merge actor.generation#0, #1 into #4 tp4 pp1 on 0-3`."""
    match operation:
        case Split(unit=unit, into=into):
            return f"Split {unit} into {_places(into)}"
        case Merge(units=units, into=(name, layout)):
            return f"Merge {_units(units)} into #{name.index} {layout_text(layout)}"
        case Extend(sources=sources, into=into):
            return f"Extend {_units(sources)} to {_places(into, full=into[0][0].model_stage)}"
        case Destroy(unit=unit):
            return f"Destroy {unit}"
        case Spill():
            return spill_text(operation)


def spill_text(spill: Spill) -> str:
    """A spill, e.g. `Spill actor.training#0 on 4-7 to host memory, 2.1 GB a rank`."""
    where = ranks_text(spill.ranks)
    return f"Spill {_units(spill.units)} on {where} to host memory, {bytes_text(spill.rank_bytes)} a rank"


def chain_text(chain: Chain) -> str:
    """The kinds of operations of a chain, e.g. `Split, Destroy x 2`."""
    names = [type(operation).__name__ for operation in chain.operations]
    runs = ((name, len(list(run))) for name, run in groupby(names))
    return ", ".join(name if count == 1 else f"{name} x {count}" for name, count in runs)


def layout_text(layout: Layout) -> str:
    """E.g. `tp4 pp2 on 0-7`, ep and cp where they are above 1."""
    return f"{layout.text} on {ranks_text(layout.ranks)}"


def ranks_text(ranks: Iterable[Rank]) -> str:
    """Ranks in their order, runs shortened: `0-3, 8, 10-11`."""
    runs: list[list[Rank]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    shown = ["-".join(map(str, run)) for run in runs[:MOST_RANKS]]
    return ", ".join(shown) + (f" and {len(runs) - MOST_RANKS} more" if len(runs) > MOST_RANKS else "")


def bytes_text(num_bytes: float) -> str:
    """Bytes with three digits and a unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


def seconds_text(seconds: float) -> str:
    """Seconds, or milliseconds where they are few."""
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{1e3 * seconds:.3g} ms"


def _count(num: int, word: str) -> str:
    return f"{num} {word}" + ("" if num == 1 else "s")


def _places(into: Iterable[Place], full: str = "") -> str:
    texts = [f"#{name.index} {layout_text(layout)}" for name, layout in into]
    shown = "; ".join(texts[:4]) + (f"; and {len(texts) - 4} more" if len(texts) > 4 else "")
    return f"{full} {shown}" if full else shown


def _units(names: Iterable[UnitId]) -> str:
    ids = list(names)
    shown = [str(ids[0]), *(f"#{name.index}" for name in ids[1:8])]
    return ", ".join(shown) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
