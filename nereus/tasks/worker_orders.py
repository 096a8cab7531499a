"""The operations of a schedule, and what each worker has to do for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from nereus.emu.chains import Chain
from nereus.emu.graph import Node, Spill
from nereus.emu.layout import Rank
from nereus.emu.orders import Order, SpillOrder
from nereus.emu.rank_plan import Mode, RankPlan
from nereus.emu.reshard import ReshardPlan
from nereus.emu.schedule import Schedule
from nereus.emu.tensor import ModelSpec
from nereus.emu.transition_text import node_text, operation_text
from nereus.emu.unit import Unit
from nereus.tasks.planned_transition import PlannedOperation


def planned_operations(
    found: Schedule,
    plans: Mapping[str, ReshardPlan],
    models: Mapping[str, ModelSpec],
    bounded: Collection[str],
) -> Iterable[PlannedOperation]:
    """Every operation in the order of the schedule, which puts predecessors first."""
    graph = found.graph
    nodes: dict[int, list[Node]] = {}
    spills: dict[tuple[int, Spill], Node] = {}
    for node in graph.nodes:
        if isinstance(node.operation, Spill):
            spills[node.chain, node.operation] = node
        else:
            nodes.setdefault(node.chain, []).append(node)
    for slot in found.slots:
        chain = graph.chains[slot.chain]
        if slot.spill is not None:
            plan = plans.get(chain.id)
            stored = models[chain.model] if plan is None else plan.source
            yield _spilling(chain, spills[slot.chain, slot.spill], slot.spill, stored)
            continue
        leader = nodes[slot.chain][0]
        for node in nodes[slot.chain]:
            plan = plans.get(chain.id) if node.leads else None
            yield PlannedOperation(
                id=node.id,
                kind=node.kind,
                model_stage=chain.model_stage,
                text=node_text(graph, node, None if plan is None else plan.bytes),
                after=graph.predecessors(node.id),
                ranks=tuple(sorted(_ranks(chain))),
                orders=_orders(chain, plan, models, bounded) if node.leads else {},
                bytes=0 if plan is None else plan.bytes,
                carrier=None if node.leads else leader.id,
            )


def _spilling(chain: Chain, node: Node, spill: Spill, stored: ModelSpec) -> PlannedOperation:
    """The shards that go to host memory before the operations of a chain, which ends them."""
    (unit,) = [unit for unit in chain.ends if unit.id in spill.units]
    order = SpillOrder(source=chain.model_stage, model=stored, unit=unit)
    return PlannedOperation(
        id=node.id,
        kind=node.kind,
        model_stage=chain.model_stage,
        text=operation_text(spill),
        after=(),
        ranks=spill.ranks,
        orders=dict.fromkeys(spill.ranks, order),
        bytes=spill.bytes,
    )


def _ranks(chain: Chain) -> set[Rank]:
    return {rank for unit in (*chain.reads, *chain.ends, *chain.makes) for rank in unit.layout.ranks}


def _orders(
    chain: Chain, plan: ReshardPlan | None, models: Mapping[str, ModelSpec], bounded: Collection[str]
) -> dict[Rank, Order]:
    """What each worker does for a chain: its part of the plan, or dropping a shard where nothing is made."""
    if plan is not None:
        source = chain.reads[0].model_stage if chain.reads else chain.model_stage
        mode: Mode = "bounded" if chain.model_stage in bounded else "shadow"
        stored = None if plan.source == plan.model else plan.source
        return {
            rank: Order(
                source=source,
                target=chain.model_stage,
                model=plan.model,
                plan=plan.rank_plan(rank, mode),
                stored=stored,
            )
            for rank in plan.ranks
        }
    model = models[chain.model]
    return {
        rank: Order(source=chain.model_stage, target=chain.model_stage, model=model, plan=_drop(unit, rank))
        for unit in chain.ends
        for rank in unit.layout.ranks
    }


def _drop(unit: Unit, rank: Rank) -> RankPlan:
    """A plan of a rank that gives up its shard: nothing is sent, and the commit frees it."""
    return RankPlan(
        rank=rank, ranks=(), digest=f"drop {unit.id}", mode="shadow", old=unit, new=None, chunks=()
    )
