"""The transition graph: every operation that turns one cluster state into another, and who waits for whom.

```
before ┐                                  ┌ chain edges     operations of one chain, in order
       ├▶ chains, a model-stage at a time ┤ source edges    read a unit before another stage's chain ends it
target ┘                                  └ resource edges  release before acquire, where GPUs overlap
```
A node is one operation; `chain` says which chain, and so which reshard plan, carries its bytes. The graph is
a value: hashable, equal for equal inputs, checked acyclic when it is made (I3). A schedule replaces the
resource edges by those that memory really needs (`nereus.emu.schedule`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import networkx as nx

from nereus.emu.chains import Chain
from nereus.emu.derivation import change_of
from nereus.emu.footprint import Footprint, footprint
from nereus.emu.layout import Rank
from nereus.emu.operations import Destroy, Extend, Merge, Operation, Split, apply_all
from nereus.emu.precedence import ChainEdge, is_acyclic, precedence
from nereus.emu.topology import Topology
from nereus.emu.unit import ClusterState, Unit, UnitId
from nereus.errors import InvalidOperation, explain


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """Copy the shards that some units have on some ranks to pinned host memory and free them there.

    `rank_bytes` on each of the ranks. The chain that ends the units reads these shards from the host.
    """

    units: tuple[UnitId, ...]
    ranks: tuple[Rank, ...]
    rank_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes copied, over all ranks."""
        return self.rank_bytes * len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operation. `chain` numbers the chain that carries its bytes; a spill serves the chain it names.

    All bytes of a chain move in the node that `leads` it; the others say what has thereby happened.
    """

    id: str
    chain: int
    operation: Operation | Spill
    leads: bool

    @property
    def kind(self) -> str:
        """`split`, `destroy`, `extend`, `merge` or `spill`."""
        return type(self.operation).__name__.lower()

    @property
    def units(self) -> frozenset[UnitId]:
        """Units that the operation reads, makes or ends."""
        match self.operation:
            case Split(unit=unit, into=into):
                return frozenset({unit, *(name for name, _ in into)})
            case Merge(units=units, into=(name, _)):
                return frozenset({*units, name})
            case Extend(sources=sources, into=into):
                return frozenset({*sources, *(name for name, _ in into)})
            case Destroy(unit=unit):
                return frozenset({unit})
            case Spill(units=units):
                return frozenset(units)


@dataclass(frozen=True, kw_only=True)
class TransitionGraph:
    """All chains of a transition and the order among them. Make it with `build_graph`.

    `spills` names, with its chain, what goes to host memory first. Raises InvalidOperation when the edges
    close a circle.
    """

    before: ClusterState
    kept: tuple[Unit, ...]
    chains: tuple[Chain, ...]
    edges: tuple[ChainEdge, ...]
    spills: tuple[tuple[int, Spill], ...] = ()
    spill_edges: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        # Operations of a chain are in line, so the graph has a circle exactly if its chains have one.
        if not is_acyclic(len(self.chains), [(first, then) for first, then, _ in self.edges]):
            circle = " -> ".join(first for first, _ in nx.find_cycle(self.digraph))
            raise InvalidOperation(
                explain(
                    "cannot order the transition",
                    values=f"{circle} -> ...",
                    rule="I3: the transition graph has no cycle",
                    remedy="drop one of these edges; old and new state then meet in memory",
                )
            )

    @cached_property
    def footprint(self) -> Footprint:
        """Where its chains lie."""
        return footprint(self.chains)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Spills, then all operations, chain by chain."""
        spills = (
            Node(id=name, chain=chain, operation=spill, leads=False)
            for name, (chain, spill) in zip(self._spill_ids, self.spills, strict=True)
        )
        operations = (
            Node(id=_node_id(chain, at), chain=number, operation=operation, leads=at == 0)
            for number, chain in enumerate(self.chains)
            for at, operation in enumerate(chain.operations)
        )
        return (*spills, *operations)

    @property
    def _spill_ids(self) -> list[str]:
        return [f"{self.chains[chain].id} spill {at}" for at, (chain, _) in enumerate(self.spills)]

    @cached_property
    def digraph(self) -> nx.DiGraph[str]:
        """The graph in networkx; nodes are node ids, edges carry their `reason`. Not to be changed."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        spills = self._spill_ids
        graph.add_nodes_from(spills)
        first, last = [], []
        for chain in self.chains:
            ids = [_node_id(chain, at) for at in range(len(chain.operations))]
            graph.add_nodes_from(ids)
            graph.add_edges_from(pairwise(ids), reason="chain")
            first.append(ids[0])
            last.append(ids[-1])
        graph.add_edges_from((last[i], first[j], {"reason": reason}) for i, j, reason in self.edges)
        graph.add_edges_from((spills[i], first[j], {"reason": "spill"}) for i, j in self.spill_edges)
        return graph

    @cached_property
    def order(self) -> tuple[Node, ...]:
        """All nodes, predecessors first; ties as in `nodes`. Every rank may safely follow it."""
        by_id = {node.id: node for node in self.nodes}
        place = {name: at for at, name in enumerate(by_id)}
        return tuple(by_id[name] for name in nx.lexicographical_topological_sort(self.digraph, place.get))

    def node(self, node_id: str) -> Node:
        """The node of that id. Raises KeyError for a stranger."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)

    def predecessors(self, node_id: str) -> tuple[str, ...]:
        """The nodes that it waits for, sorted."""
        return tuple(sorted(self.digraph.predecessors(node_id)))

    @cached_property
    def waves(self) -> tuple[tuple[Node, ...], ...]:
        """Nodes by the earliest turn in which they may run; no unit is touched twice in one wave (I3)."""
        turn: dict[str, int] = {}
        waves: list[list[Node]] = []
        touched: list[set[UnitId]] = []
        for node in self.order:
            at = max((turn[name] + 1 for name in self.digraph.predecessors(node.id)), default=0)
            while at < len(waves) and touched[at] & node.units:
                at += 1
            if at == len(waves):
                waves.append([])
                touched.append(set())
            waves[at].append(node)
            touched[at] |= node.units
            turn[node.id] = at
        return tuple(tuple(wave) for wave in waves)

    @cached_property
    def after(self) -> ClusterState:
        """The cluster state when all is done. Raises InvalidOperation when it breaks I1."""
        made = (unit for chain in self.chains for unit in chain.makes)
        return ClusterState.of((*self.kept, *made), self.before.ranks)

    def apply(self) -> ClusterState:
        """Apply every operation in order, and return the state reached, which is `after`.

        Each model is taken by itself: where two model-stages of one stage trade places, both lie on a rank
        for a while, so that I1 holds before and after but at no moment between.
        """
        reached: list[Unit] = []
        for model in dict.fromkeys(unit.model for unit in self.before.units):
            mine = ClusterState.of((u for u in self.before.units if u.model == model), self.before.ranks)
            operations = [
                node.operation
                for node in self.order
                if self.chains[node.chain].model == model and not isinstance(node.operation, Spill)
            ]
            reached += apply_all(mine, operations).units
        return ClusterState.of(reached, self.before.ranks)

    def with_edges(
        self,
        edges: Iterable[ChainEdge],
        spills: Iterable[tuple[int, Spill]] = (),
        spill_edges: Iterable[tuple[int, int]] = (),
    ) -> TransitionGraph:
        """The same operations in another order. Raises InvalidOperation when it is circular."""
        return replace(
            self,
            edges=tuple(sorted(edges)),
            spills=tuple(spills),
            spill_edges=tuple(sorted(spill_edges)),
        )


def _node_id(chain: Chain, at: int) -> str:
    return f"{chain.id} {at}"


def build_graph(
    before: ClusterState, target: ClusterState, topology: Topology | None = None
) -> TransitionGraph:
    """The graph from a state to the units of another; names of units in `target` do not matter.

    With a topology, new units are extended from units on their own node. GPUs that joined are added to
    `before` first, lost units removed. Raises InvalidOperation when the ranks differ (I2) or a model would be
    left without a holder of some state, NoSource when nobody holds what a new unit needs.
    """
    if before.ranks != target.ranks:
        raise InvalidOperation(
            explain(
                "cannot plan the transition",
                values=f"ranks {sorted(before.ranks ^ target.ranks)} are on one side only",
                rule="I2: a transition begins and ends on the same set of ranks",
                remedy="add ranks that joined to the state before, or remove those that left",
            )
        )
    _keeps_all_state(before, target)
    olds, news = _by_model_stage(before), _by_model_stage(target)
    kept: list[Unit] = []
    chains: list[Chain] = []
    for model_stage in sorted({*olds, *news}):
        old, new = olds.get(model_stage, ()), news.get(model_stage, ())
        if old == new:
            kept += old
            continue
        others: tuple[Unit, ...] = ()
        if not old:
            others = tuple(unit for unit in before.units if unit.model == new[0].model)
        change = change_of(model_stage, old, new, others, topology)
        kept += change.kept
        chains += change.chains
    lie = footprint(chains)
    graph = TransitionGraph(
        before=before, kept=tuple(kept), chains=tuple(chains), edges=precedence(chains, lie)
    )
    graph.__dict__["footprint"] = lie  # the cached property, which is known here
    return graph


def _by_model_stage(state: ClusterState) -> dict[str, tuple[Unit, ...]]:
    """The units of every model-stage, sorted by id as the state has them."""
    out: dict[str, list[Unit]] = {}
    for unit in state.units:
        out.setdefault(unit.id.model_stage, []).append(unit)
    return {model_stage: tuple(units) for model_stage, units in out.items()}


def _keeps_all_state(before: ClusterState, target: ClusterState) -> None:
    held = []
    for state in (before, target):
        # Units of one model-stage are replicas: one stands for all.
        one_of_each = {unit.id.model_stage: unit for unit in state.units}.values()
        held.append({(unit.model, kind.name) for unit in one_of_each for kind in unit.kinds})
    if lost := sorted(held[0] - held[1]):
        raise InvalidOperation(
            explain(
                "cannot plan the transition",
                values="nobody would hold " + ", ".join(f"{kind} of {model}" for model, kind in lost),
                rule="the last holder of a model's state must live",
                remedy="give the model a unit that carries it",
            )
        )
