"""Sections of the GPU suite that move state: between ranks on one GPU, to and from the host, in parts."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.multiprocessing.spawn import spawn

from benchmarks.gpu_exchange import DEATH, exchange_rank, mesh_rank
from benchmarks.gpu_sections import Row, Size
from nereus.emu.arena import TORCH_DTYPE, ShardState
from nereus.emu.decision import Decision, Outcome, StoreRecord
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.host_copy import HostCopy
from nereus.emu.host_ring import HostRing
from nereus.emu.kinds import KindMove, Kinds, serving_kinds, training_kinds
from nereus.emu.lanes import Lanes
from nereus.emu.layout import Layout, shard
from nereus.emu.local_copies import copy_local
from nereus.emu.mesh_moves import mesh_moves
from nereus.emu.pages import Pages, mappable
from nereus.emu.rank_plan import RankPlan
from nereus.emu.reshard import plan_reshard
from nereus.emu.staging import StagingPool
from nereus.emu.store import Store
from nereus.emu.tensor import ModelSpec
from nereus.emu.transport.mesh import M2nResharder
from nereus.emu.transport.protocol import Deadline
from nereus.emu.unit import Unit, UnitId
from nereus.errors import InvalidOperation

T = TypeVar("T")
SHARES_FROM = (2, 30)  # NCCL that lets ranks share a GPU


def exchange_rows(device: torch.device, size: Size) -> list[Row]:
    """A training state is split and merged between ranks that share the GPU; then one of them dies."""
    if why := _unshared(device):
        return [Row(section="exchange", what="not possible", note=why)]
    model, out = _model(size), []
    for ranks in size.ranks:
        kinds = training_kinds("bf16")
        whole = (_unit(model, 0, ranks, tuple(range(ranks)), kinds),)
        halves = tuple(
            _unit(model, 1 + i, ranks // 2, tuple(range(i * ranks // 2, (i + 1) * ranks // 2)), kinds)
            for i in range(2)
        )
        split = plan_reshard(model, whole, halves)
        plans = [split, plan_reshard(model, split.new, whole)]
        parts = [[plan.rank_plan(rank) for rank in range(ranks)] for plan in plans]
        found = _spawned(exchange_rank, ranks, device, model, parts)
        for number, name in enumerate(("split", "merge")):
            took_s = max(one["seconds"][number] for one in found)
            moved = sum(one["received"][number] for one in found)
            what = f"{ranks} ranks, {name} tp {ranks}: {moved / 1e6:.0f} MB"
            out.append(Row(section="exchange", what=what, value=took_s * 1e3, unit="ms"))
        wrong = sorted({name for one in found for name in one["wrong"]})
        right = _verdict(size, not wrong)
        note = ", ".join(wrong[:3]) or "equal bit for bit to shards built directly"
        out.append(Row(section="exchange", what=f"{ranks} ranks, new shards", ok=right, note=note))
        noticed_s = max(one["noticed_s"] for one in found)
        what = f"{ranks} ranks, one dies: the others know after"
        out.append(Row(section="exchange", what=what, value=noticed_s, unit="s", note="deadline 20 s"))
    return out


def mesh_rows(device: torch.device, size: Size) -> list[Row]:
    """The weights of a unit go to another by `nccl.m2n`, where it is installed."""
    try:
        M2nResharder.load(device)
    except InvalidOperation as error:
        return [Row(section="m2n", what="not possible", note=str(error)[:160])]
    if why := _unshared(device):
        return [Row(section="m2n", what="not possible", note=why)]
    model, kinds = _model(size), serving_kinds("bf16")
    old, new = _unit(model, 0, 2, (0, 1), kinds), _unit(model, 1, 1, (2,), kinds)
    moves = (KindMove(kinds[0], kinds[0]),)
    plan = plan_reshard(model, (old,), (new,), moves, placement="as_given", source=model)
    meshes = mesh_moves(plan)
    parts = [
        RankPlan(
            rank=rank, ranks=(0, 1, 2), digest=plan.digest, mode="shadow", old=plan.old_unit(rank),
            new=plan.new_unit(rank), chunks=(), meshes=tuple(one for one in meshes if rank in one.ranks),
        )
        for rank in range(3)
    ]  # fmt: skip
    found = _spawned(mesh_rank, 3, device, model, parts)
    took_s = max(one["seconds"] for one in found)
    wrong = [name for one in found for name in one["wrong"]]
    return [
        Row(section="m2n", what="tp 2 to tp 1, weights", value=took_s * 1e3, unit="ms"),
        Row(section="m2n", what="new shard", ok=_verdict(size, not wrong), note=", ".join(wrong[:3])),
    ]


def host_rows(device: torch.device, size: Size) -> list[Row]:
    """State between pageable host memory and the device, through the ring and without it."""
    ring = HostRing.of(device)
    if ring is None:
        lanes = Lanes.of(device)
        ring = HostRing(device, lane=lanes.pack, engine=lanes.engine, buffer_bytes=1 << 10)
    source = torch.randn(size.matrix, size.matrix // 4)
    target = torch.zeros(size.matrix, size.matrix // 2, dtype=torch.bfloat16, device=device)
    half = target[:, : size.matrix // 4]

    def put() -> None:
        ring.put(source, half)
        ring.finish()

    def get() -> None:
        for _ in ring.get([half]):
            pass

    calls: dict[str, Callable[[], object]] = {
        "put, through the ring": put,
        "put, pageable copy": lambda: half.copy_(source),
        "get, through the ring": get,
        "get, pageable copy": lambda: half.cpu(),
    }
    out = []
    for what, call in calls.items():
        num_bytes = source.numel() * (4 if what.startswith("put") else 2)
        out.append(Row(section="host", what=what, value=num_bytes / _best(call, device) / 1e9, unit="GB/s"))
    same = torch.equal(half.cpu(), source.to(torch.bfloat16))
    return [
        *out,
        Row(section="host", what="numbers", ok=_verdict(size, same), note="equal" if same else "differ"),
    ]


def pages_rows(device: torch.device, size: Size) -> list[Row]:
    """Memory of an arena that is given back in parts while the rest stays."""
    with _environment("NEREUS_GPU_PAGES", "1"):
        if not mappable(device):
            return [Row(section="pages", what="not possible", note="the driver maps no memory in parts")]
        num_bytes = max(size.matrix * size.matrix * 4, 64 << 20)  # far above what else comes and goes
        before = _free(device)
        pages = Pages(num_bytes, device, whole=True)
        start = time.perf_counter()
        pages.hold(0, num_bytes)
        _wait(device)
        hold_s = time.perf_counter() - start
        pages.flat.fill_(7)
        _wait(device)
        held = before - _free(device)
        start = time.perf_counter()
        pages.release(0, num_bytes // 2)
        release_s = time.perf_counter() - start
        back = held - (before - _free(device))
        kept = bool((pages.flat[num_bytes // 2 :] == 7).all())
    rate = num_bytes / hold_s / 1e9
    share = back / max(held, 1)
    return [
        Row(section="pages", what=f"hold {num_bytes >> 20} MiB", value=rate, unit="GB/s"),
        Row(section="pages", what="give back half of it", value=release_s * 1e3, unit="ms"),
        Row(section="pages", what="share that came back", value=share, target="0.45 to 0.55",
            ok=_verdict(size, 0.45 <= share <= 0.55)),
        Row(section="pages", what="the other half", ok=_verdict(size, kept), note="as it was"),
    ]  # fmt: skip


def spill_rows(device: torch.device, size: Size) -> list[Row]:
    """A shard that goes to host memory, is read from there into a new one, and comes back."""
    model, kinds = _model(size), training_kinds("bf16")
    dtypes = {kind.name: TORCH_DTYPE[kind.dtype] for kind in kinds}
    plan = plan_reshard(model, (_unit(model, 0, 1, (0,), kinds),), (_unit(model, 1, 2, (0, 1), kinds),))
    state, new = (ShardState.empty(shard(model, u.layout, 0), dtypes, device) for u in (*plan.old, *plan.new))
    for arena in state.arenas.values():
        arena.flat.copy_(torch.randn(arena.flat.shape))
    lanes, deadline = Lanes.of(device), Deadline.after(60)
    was, num_bytes = {kind: arena.flat.cpu() for kind, arena in state.arenas.items()}, state.num_bytes
    before = _free(device)
    copy, take_s = _timed(lambda: HostCopy.take(state, lanes, deadline), device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    freed = _free(device) - before
    copies = plan.rank_plan(0).copies
    pool = StagingPool(device, lanes)
    read_bytes, read_s = _timed(lambda: copy_local(copies, copy.state, new, pool), device)
    _, back_s = _timed(lambda: copy.put_back(lanes, deadline), device)
    same = all(torch.equal(arena.flat.cpu(), was[kind]) for kind, arena in state.arenas.items())
    near = ShardState.empty(new.shard, dtypes, device)
    copy_local(copies, state, near, pool)
    same &= all(torch.equal(near[kind].flat, arena.flat) for kind, arena in new.arenas.items())
    rates = {
        "to the host": num_bytes / take_s,
        "a new shard from there": read_bytes / read_s,
        "back": num_bytes / back_s,
    }
    out = [Row(section="spill", what=what, value=rate / 1e9, unit="GB/s") for what, rate in rates.items()]
    if device.type == "cuda":
        share = freed / num_bytes
        out.append(Row(section="spill", what="share of the device's memory that was given back", value=share,
                       target="at least 0.9", ok=_verdict(size, share >= 0.9)))  # fmt: skip
    note = "equal" if same else "differ"
    return [
        *out,
        Row(
            section="spill",
            what="what came back, and what was read from there",
            ok=_verdict(size, same),
            note=note,
        ),
    ]


MOVES: dict[str, Callable[[torch.device, Size], list[Row]]] = {
    "exchange": exchange_rows,
    "m2n": mesh_rows,
    "host": host_rows,
    "pages": pages_rows,
    "spill": spill_rows,
}


def shares_gpu(device: torch.device) -> bool:
    """Whether several workers can share a GPU here: NCCL can, and there are no GPUs enough."""
    return device.type == "cuda" and not _unshared(device)


def _unshared(device: torch.device) -> str:
    """Why ranks cannot share the device; nothing when they can."""
    if device.type != "cuda":
        return ""
    found = tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    if torch.version.hip or found >= SHARES_FROM:
        return ""
    return f"NCCL {'.'.join(map(str, found))}: ranks share a GPU from 2.30 on"


def _spawned(
    body: Callable[..., None], ranks: int, device: torch.device, *given: Any
) -> list[dict[str, Any]]:
    """What each rank has saved. Raises what a rank raised."""
    store = Store()
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "found")
            context = spawn(body, args=(store.address, device.type, *given, file), nprocs=ranks, join=False)
            assert context is not None, "it was not joined"
            while all(process.is_alive() for process in context.processes):
                time.sleep(0.05)
            # What a driver does when a worker's process has ended.
            StoreRecord(store.client).decide(Decision(epoch=DEATH, outcome=Outcome.ABORT, reason="a death"))
            while not context.join():
                pass
            return [torch.load(f"{file}.{rank}", weights_only=False) for rank in range(ranks)]
    finally:
        store.close()


def _model(size: Size) -> ModelSpec:
    """About 100 M parameters, or very few."""
    hidden = 768 if size.claims else 32
    return decoder_spec(
        DecoderConfig(
            vocab_size=32_000 if size.claims else 64, hidden_size=hidden, num_layers=size.layers,
            num_heads=12 if size.claims else 4, num_kv_heads=4, head_dim=64 if size.claims else 8,
            intermediate_size=hidden * 8 // 3 // 4 * 4, max_positions=64,
        )
    )  # fmt: skip


def _unit(model: ModelSpec, index: int, tp: int, ranks: tuple[int, ...], kinds: Kinds) -> Unit:
    layout = Layout.make(model, tp=tp, pp=1, ranks=ranks)
    return Unit(id=UnitId("actor.training", index), model="actor", layout=layout, kinds=kinds)


def _verdict(size: Size, right: bool) -> bool | None:
    """A failure always counts; a success where something is claimed."""
    return False if not right else True if size.claims else None


def _timed(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What a call returns, and its seconds."""
    _wait(device)
    start = time.perf_counter()
    out = call()
    _wait(device)
    return out, time.perf_counter() - start


def _best(call: Callable[[], object], device: torch.device) -> float:
    call()
    return min(_timed(call, device)[1] for _ in range(3))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> int:
    """Bytes that the device has free; on a CPU those that this process does not hold."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return -pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
