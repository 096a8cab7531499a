"""Moves between meshes: refused by name where they do not fit, and equal bit for bit where they do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nereus.emu.arena import TORCH_DTYPE, ShardState
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.kinds import Kind, KindMove, serving_kinds
from nereus.emu.layout import Layout
from nereus.emu.mesh_moves import MeshMove, mesh_moves
from nereus.emu.rank_plan import RankPlan
from nereus.emu.reshard import ReshardPlan, plan_reshard
from nereus.emu.store import Store, StoreAddress
from nereus.emu.tensor import ModelSpec
from nereus.emu.transport.collective import CollectiveTransport
from nereus.emu.transport.mesh import M2nResharder, MeshMover
from nereus.emu.transport.protocol import Deadline
from nereus.emu.unit import Unit, UnitId
from nereus.errors import InvalidOperation
from tests.emu.late_device import LateDevice
from tests.emu.processes import Workers
from tests.emu.states import differences, direct_state, empty_state

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=16,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=24,
)
MODEL = decoder_spec(CONFIG)
BF16 = serving_kinds("bf16")


def units(model: ModelSpec, stage: str, tp: int, pp: int, *ranks: tuple[int, ...]) -> tuple[Unit, ...]:
    return tuple(
        Unit(
            id=UnitId(f"actor.{stage}", number),
            model="actor",
            layout=Layout.make(model, tp=tp, pp=pp, ranks=group),
            kinds=BF16,
        )
        for number, group in enumerate(ranks)
    )


def a_plan(old: Sequence[Unit], new: Sequence[Unit], model: ModelSpec = MODEL) -> ReshardPlan:
    moves = (KindMove(BF16[0], BF16[0]),)
    return plan_reshard(model, tuple(old), tuple(new), moves, placement="as_given", source=model)


CASES = {
    "tp 2 to tp 4": (units(MODEL, "training", 2, 1, (1, 0)), units(MODEL, "generation", 4, 1, (5, 4, 2, 3))),
    "two units to three": (
        units(MODEL, "training", 2, 1, (0, 1), (3, 2)),
        units(MODEL, "generation", 1, 1, (4,), (6,), (5,)),
    ),
    "a pipeline to tp": (units(MODEL, "training", 1, 2, (0, 1)), units(MODEL, "generation", 2, 1, (2, 3))),
    "tp to a pipeline": (
        units(MODEL, "training", 4, 1, (3, 0, 2, 1)),
        units(MODEL, "generation", 1, 4, (4, 5, 6, 7)),
    ),
}


@dataclass(eq=False)
class Table:
    """Where threads meet that reshard together: the shards of the sources, by tensor."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    given: dict[tuple[str, int], Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class PaperResharder:
    """What `nccl.m2n` promises, written from its documentation: rank i of a communicator has place i of the
    source's mesh, or i - its size of the target's; rows of a mesh are replicas.
    """

    rank: int

    def reshard(
        self, source: Tensor | None, target: Tensor | None, move: MeshMove, communicator: Any
    ) -> None:
        table, order = communicator
        place = order.index(self.rank)
        one, other = move.source, move.target
        size = one.num_replicas * one.num_shards
        with table.changed:
            if place < size:
                assert source is not None
                assert source.is_contiguous()
                assert tuple(source.shape) == one.shape
                table.given[move.logical, place] = source.clone()
                table.changed.notify_all()
                return
            assert target is not None
            assert target.is_contiguous()
            assert tuple(target.shape) == other.shape
            replica = place % one.num_replicas  # any may serve
            keys = [(move.logical, replica * one.num_shards + shard) for shard in range(one.num_shards)]
            assert table.changed.wait_for(lambda: all(key in table.given for key in keys), 20)
            whole = torch.cat([table.given[key] for key in keys], dim=one.dim)
        mine = (place - size) % other.num_shards
        target.copy_(whole.chunk(other.num_shards, dim=other.dim)[mine])


def rank_plans(plan: ReshardPlan) -> dict[int, RankPlan]:
    moves = mesh_moves(plan)
    return {
        rank: replace(
            plan.rank_plan(rank), chunks=(), meshes=tuple(move for move in moves if rank in move.ranks)
        )
        for rank in plan.ranks
    }


@pytest.mark.parametrize("case", list(CASES))
def test_shards_arrive_as_built_directly(case: str) -> None:
    old, new = CASES[case]
    plan = a_plan(old, new)
    tables: dict[tuple[int, ...], Table] = {}
    lock, found, sent = threading.Lock(), {}, []

    def connect(ranks: Any, order: tuple[int, ...], **_: object) -> tuple[Table, tuple[int, ...]]:
        with lock:
            return tables.setdefault(order, Table()), order

    def run(mine: RankPlan) -> None:
        mover = MeshMover(connect, PaperResharder(mine.rank), LateDevice(mine.rank).for_move)
        given: ShardState | None = None
        if mine.old is not None:
            given = direct_state(MODEL, mine.old, mine.rank)
        taken = None if mine.new is None else empty_state(MODEL, mine.new, mine.rank)
        sent.append(mover.run(mine, given, taken, epoch=1, deadline=Deadline.after(20)))
        if mine.new is not None and taken is not None:
            found[mine.rank] = differences(taken, direct_state(MODEL, mine.new, mine.rank))

    threads = [threading.Thread(target=run, args=(mine,)) for mine in rank_plans(plan).values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(found) == {rank for unit in new for rank in unit.ranks}
    assert not any(found.values()), found
    assert sum(sent) >= plan.bytes


def test_all_ranks_of_a_communicator_take_its_moves_in_one_order() -> None:
    for old, new in CASES.values():
        plans = rank_plans(a_plan(old, new))
        for move in mesh_moves(a_plan(old, new)):
            assert all(move in plans[rank].meshes for rank in move.ranks)
        orders = {tuple(move.ranks for move in mine.meshes) for mine in plans.values()}
        assert all(len(set(order)) <= 8 for order in orders), "few communicators"


def refused(old: Sequence[Unit], new: Sequence[Unit], words: str, model: ModelSpec = MODEL) -> None:
    with pytest.raises(InvalidOperation, match=words):
        mesh_moves(a_plan(old, new, model))


def test_what_does_not_fit_is_refused_by_name() -> None:
    old = units(MODEL, "training", 2, 1, (0, 1))
    refused(old, units(MODEL, "generation", 1, 1, (1,)), "both sides")
    padded = decoder_spec(replace(CONFIG, vocab_size=37), vocab_multiple=8)
    refused(
        units(padded, "training", 2, 1, (0, 1)),
        units(padded, "generation", 1, 1, (2,)),
        "embed_tokens.*evenly",
        padded,
    )
    wide = replace(CONFIG, num_heads=32, num_kv_heads=32, intermediate_size=64)
    many = decoder_spec(wide)
    refused(
        units(many, "training", 32, 1, tuple(range(32))),
        units(many, "generation", 1, 1, (40,)),
        "32 shards meet in one.*at most 16",
        many,
    )
    moves = (KindMove(Kind("theta", "fp32"), BF16[0]),)
    cast = plan_reshard(
        MODEL,
        tuple(replace(one, kinds=(Kind("theta", "fp32"),)) for one in old),
        units(MODEL, "generation", 1, 1, (3,)),
        moves,
        placement="as_given",
    )
    with pytest.raises(InvalidOperation, match="nothing is cast"):
        mesh_moves(cast)


class Recorder:
    """The library's module as far as it is used: what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.Mesh: Callable[..., Any] = lambda dims, start_rank: ("mesh", dims, start_rank)
        self.Replicate = lambda: "replicate"
        self.Shard = lambda dim: ("shard", dim)

    def reshard(self, *given: Any, **named: Any) -> None:
        self.calls.append((given, named))


class Group:
    def _comm_ptr(self) -> int:
        return 4711


def test_the_library_is_told_both_meshes_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    old, new = CASES["two units to three"]
    move = next(one for one in mesh_moves(a_plan(old, new)) if one.logical.endswith("o_proj.weight"))
    module = Recorder()
    M2nResharder(module, torch.device("cuda", 0)).reshard(None, None, move, Group())
    ((given, named),) = module.calls
    assert given == (None, None, 4711, "stream")
    assert named["src_mesh"] == ("mesh", (2, 2), 0)
    assert named["dst_mesh"] == ("mesh", (3, 1), 4)
    assert named["src_placements"] == ["replicate", ("shard", 1)]
    assert named["src_local_shape"] == (16, 16)
    assert named["dst_local_shape"] == (16, 32)
    assert named["src_dtype"] == named["dst_dtype"] == TORCH_DTYPE["bf16"]


def test_a_machine_without_the_library_is_told_what_is_needed() -> None:
    with pytest.raises(InvalidOperation, match=r"nccl-extensions.*NEREUS_M2N"):
        M2nResharder.load(torch.device("cpu"))


def place_in_order(worker: int, address: StoreAddress, order: tuple[int, ...]) -> list[int]:
    transport = CollectiveTransport.connect(address, worker=worker)
    group = transport.ordered(order, order, epoch=3, digest="d", deadline=Deadline.after(20))
    again = transport.ordered(order, order, epoch=3, digest="d", deadline=Deadline.after(20))
    assert again is group
    mine = torch.tensor([worker])
    found = [torch.zeros_like(mine) for _ in order]
    group.allgather([found], [mine]).wait()
    transport.close(3)
    return [int(one) for one in found]


def test_ranks_of_an_ordered_communicator_are_its_places() -> None:
    store, workers = Store(), Workers((0, 1, 2))
    try:
        order = (2, 0, 1)
        assert set(map(tuple, workers.run(place_in_order, store.address, order).values())) == {order}
    finally:
        workers.close()
        store.close()
