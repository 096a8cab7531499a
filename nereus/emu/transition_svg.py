"""The transition graph as an SVG picture: a lane for each model-stage, time from left to right.

Up to a hundred operations each has a box; above that, chains of one model-stage with equal operations at
equal depth share one box, marked `x 128`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from xml.sax.saxutils import escape

from nereus.emu.graph import Node, TransitionGraph
from nereus.emu.transition_text import chain_text, operation_text

MOST_BOXES = 100
WIDTH, HEIGHT, GAP_X, GAP_Y, LEFT, TOP = 190, 40, 60, 12, 150, 40
COLOURS = {
    "split": "#dbeafe",
    "destroy": "#fee2e2",
    "extend": "#dcfce7",
    "merge": "#fef3c7",
    "spill": "#ede9fe",
    "chain": "#f1f5f9",
}
LEGEND = "solid: one chain · dashed: frees memory for · dotted: must be read or spilled before"
LEGEND_WIDTH = 20 + 6 * len(LEGEND)
DASHES = {"chain": "", "resource": "6 3", "source": "2 3", "spill": "2 3"}


@dataclass(frozen=True, slots=True)
class _Box:
    lane: str
    column: int
    colour: str
    title: str
    lines: tuple[str, str]


def svg(graph: TransitionGraph) -> str:
    """The picture as one SVG document. Boxes show the full operation when the pointer rests on them."""
    boxes, arrows = _detailed(graph) if len(graph.nodes) <= MOST_BOXES else _grouped(graph)
    places, lanes, height = _place(boxes)
    columns = 1 + max((box.column for box in boxes.values()), default=0)
    width = max(LEGEND_WIDTH, LEFT + columns * (WIDTH + GAP_X))
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#475569"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="20" fill="#475569">{LEGEND}</text>',
    ]
    for name, (top, bottom) in lanes.items():
        body.append(f'<line x1="0" y1="{top - 8}" x2="{width}" y2="{top - 8}" stroke="#e2e8f0"/>')
        middle = (top + bottom) // 2
        body.append(f'<text x="10" y="{middle}" font-weight="bold" fill="#0f172a">{escape(name)}</text>')
    body += [_arrow(places[first], places[then], reason) for first, then, reason in arrows]
    body += [_draw(box, places[name]) for name, box in boxes.items()]
    return "\n".join([*body, "</svg>"]) + "\n"


def _detailed(graph: TransitionGraph) -> tuple[dict[str, _Box], list[tuple[str, str, str]]]:
    depth = _depths(graph)
    boxes = {node.id: _box_of(graph, node, depth[node.id]) for node in graph.nodes}
    arrows = [(first, then, str(data["reason"])) for first, then, data in graph.digraph.edges(data=True)]
    return boxes, arrows


def _box_of(graph: TransitionGraph, node: Node, column: int) -> _Box:
    text = operation_text(node.operation)
    head, _, rest = text.partition(" ")
    lane = graph.chains[node.chain].model_stage
    return _Box(lane, column, COLOURS[node.kind], text, (head, rest.replace(f"{lane}#", "#")))


def _grouped(graph: TransitionGraph) -> tuple[dict[str, _Box], list[tuple[str, str, str]]]:
    depth = _chain_depths(graph)
    name_of = {
        number: f"{chain.model_stage} {chain_text(chain)} {depth[number]}"
        for number, chain in enumerate(graph.chains)
    }
    counts = Counter(name_of.values())
    boxes: dict[str, _Box] = {}
    for number, chain in enumerate(graph.chains):
        name = name_of[number]
        text = chain_text(chain)
        title = f"{counts[name]} chains like {chain.id}: {text}"
        lines = (text, f"x {counts[name]}")
        boxes[name] = _Box(chain.model_stage, depth[number], COLOURS["chain"], title, lines)
    arrows = {
        (name_of[first], name_of[then], str(reason))
        for first, then, reason in graph.edges
        if name_of[first] != name_of[then]
    }
    return boxes, sorted(arrows)


def _depths(graph: TransitionGraph) -> dict[str, int]:
    """Longest path to every node."""
    depth: dict[str, int] = {}
    for node in graph.order:
        depth[node.id] = max((depth[name] + 1 for name in graph.digraph.predecessors(node.id)), default=0)
    return depth


def _chain_depths(graph: TransitionGraph) -> list[int]:
    """Longest path to every chain, in chains."""
    earlier: dict[int, list[int]] = defaultdict(list)
    for first, then, _ in graph.edges:
        earlier[then].append(first)
    depth = [0] * len(graph.chains)
    for number in dict.fromkeys(node.chain for node in graph.order if node.kind != "spill"):
        depth[number] = max((depth[other] + 1 for other in earlier[number]), default=0)
    return depth


def _place(
    boxes: dict[str, _Box],
) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]], int]:
    """(upper left corner of every box, top and bottom of every lane, height of the picture)."""
    cells: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, box in boxes.items():
        cells[box.lane][box.column].append(name)
    places: dict[str, tuple[int, int]] = {}
    lanes: dict[str, tuple[int, int]] = {}
    top = TOP
    for lane in sorted(cells):
        rows = max(len(names) for names in cells[lane].values())
        for column, names in cells[lane].items():
            for row, name in enumerate(names):
                places[name] = (LEFT + column * (WIDTH + GAP_X), top + row * (HEIGHT + GAP_Y))
        bottom = top + rows * (HEIGHT + GAP_Y) - GAP_Y
        lanes[lane] = (top, bottom)
        top = bottom + 2 * GAP_Y
    return places, lanes, top


def _draw(box: _Box, place: tuple[int, int]) -> str:
    x, y = place
    first, second = (escape(_short(line)) for line in box.lines)
    return (
        f"<g><title>{escape(box.title)}</title>"
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
        f'fill="{box.colour}" stroke="#94a3b8"/><text x="{x + 8}" y="{y + 16}" font-weight="bold" '
        f'fill="#0f172a">{first}</text><text x="{x + 8}" y="{y + 31}" fill="#334155">{second}</text></g>'
    )


def _arrow(start: tuple[int, int], end: tuple[int, int], reason: str) -> str:
    x0, y0 = start[0] + WIDTH, start[1] + HEIGHT // 2
    x1, y1 = end[0], end[1] + HEIGHT // 2
    bend = max(GAP_X // 2, (x1 - x0) // 3)
    return (
        f'<path d="M{x0} {y0} C{x0 + bend} {y0} {x1 - bend} {y1} {x1} {y1}" fill="none" stroke="#475569" '
        f'stroke-dasharray="{DASHES[reason]}" marker-end="url(#head)"><title>{escape(reason)}</title></path>'
    )


def _short(text: str, limit: int = 31) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
