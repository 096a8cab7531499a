"""Moving live state between layouts: ours against floors, collectives, checkpoints and Megatron, in one run.

    OMP_NUM_THREADS=1 python -m benchmarks.reshard                 # the whole table
    OMP_NUM_THREADS=1 python -m benchmarks.reshard --cases Merge --methods ours,floor --repeats 5

All processes run on this machine, one thread each; the state is one model's 220 MB (bf16 weights, fp32
master, two moments). Ours reads the peers' memory; `ours over gloo` is the same executor where that is not
permitted, and all other methods use gloo on the loopback or files. Each method moves the same numbers and
its result is compared bit for bit with shards built directly, except the floors, which move bytes without
meaning. Ours and the floors take turns, repeat by repeat. New storage is allocated and touched before the
clock starts. Wall is the median over repeats, from the first process's beginning to the last one's end, by
the clock that all processes of a machine share; best is the least. (One process's own clock would miss what
the others do before it is scheduled.) CPU is the least sum over processes. Ratios are of best walls, since
other work on the machine only adds to them. Bytes are those that cross between processes (checkpoints:
written plus read); the bound is what no method can go below with the best placement. Peak is the largest
growth of any process's resident memory during the move.
Peers that are not installed are reported as such.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import reshard_dcp, reshard_deepspeed, reshard_megatron
from benchmarks.reshard_cases import CASES, STATE_BYTES, Case, direct, empty, equal, plan_of
from benchmarks.reshard_methods import (
    Move,
    Setup,
    allgather_slice,
    gather_scatter,
    memcpy_floor,
    ours,
    ours_over_gloo,
    read_floor,
    transport_floor,
)
from benchmarks.reshard_table import Row, show, verdict
from nereus.emu.arena import ShardState
from nereus.emu.executor import Executor
from nereus.emu.reshard import ReshardPlan
from nereus.emu.store import Store, StoreAddress
from nereus.emu.transport.collective import CollectiveTransport

SHM, DISK = "/dev/shm", tempfile.gettempdir()


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table. `exact` results are compared; `contiguous` takes ranks as they come."""

    key: str
    title: str
    make: Callable[[Setup], Move]
    exact: bool = True
    contiguous: bool = False
    heavy: bool = False
    peer: str = ""


METHODS = (
    Method("ours", "ours", ours),
    Method("floor-memcpy", "memcpy floor", memcpy_floor, exact=False),
    Method("floor-read", "read floor", read_floor, exact=False),
    Method("floor-gloo", "gloo floor", transport_floor, exact=False),
    Method("gloo", "ours over gloo", ours_over_gloo),
    Method("allgather", "AllGather + slice", allgather_slice),
    Method("gather", "gather + scatter", gather_scatter),
    Method("dcp-shm", "torch DCP, /dev/shm", partial(reshard_dcp.through, SHM), heavy=True),
    Method("dcp-disk", "torch DCP, disk", partial(reshard_dcp.through, DISK), heavy=True),
    Method("megatron", "Megatron resharding", reshard_megatron.resharding, contiguous=True, peer="megatron"),
    Method(
        "megatron-placed",
        "Megatron resharding, our ranks",
        reshard_megatron.resharding,
        peer="megatron",
    ),
    Method(
        "mcp",
        "Megatron dist_checkpointing, /dev/shm",
        partial(reshard_megatron.dist_checkpointing, SHM),
        heavy=True,
        peer="megatron",
    ),
)


TOGETHER = ("ours", "floor-memcpy", "floor-read", "floor-gloo")


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", default="", help="run the cases whose name contains this")
    parser.add_argument("--methods", default="", help="run the methods whose key starts with one of these")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, help="write the rows to this file")
    options = parser.parse_args()
    rows: list[Row] = []
    print(machine())
    for processes in sorted({case.processes for case in CASES}):
        cases = [case for case in CASES if case.processes == processes and options.cases in case.name]
        if cases:
            rows += run(cases, processes, options.repeats, options.methods)
    rows += reshard_deepspeed_rows(options.methods, options.cases)
    for case in CASES:
        show(case, [row for row in rows if row.case == case.name])
    verdict(rows)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def machine() -> str:
    """What the numbers were taken on."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    described = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":")[1].strip() for line in described if "model name" in line),
        platform.processor(),
    )
    return (
        f"{os.cpu_count()} CPUs ({model}), torch {torch.__version__}, gloo on loopback, "
        f"state {STATE_BYTES / 1e6:.0f} MB, load before the run {load}"
    )


def chosen(only: str) -> list[Method]:
    """The methods asked for."""
    wanted = tuple(only.split(",")) if only else ("",)
    return [method for method in METHODS if method.key.startswith(wanted)]


def taking_turns(methods: list[Method]) -> list[list[Method]]:
    """Ours and the floors in one group, whose members alternate; every other method by itself."""
    first = [method for method in methods if method.key in TOGETHER]
    rest = [[method] for method in methods if method.key not in TOGETHER]
    return [first, *rest] if first else rest


def run(cases: Sequence[Case], processes: int, repeats: int, only: str) -> list[Row]:
    """All cases of one number of processes, in one set of processes."""
    store = Store()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        arguments = (processes, port, store.address, [case.name for case in cases], repeats, only, str(out))
        mp.spawn(_work, arguments, nprocs=processes)
        raw: list[dict[str, Any]] = json.loads(out.read_text())
    store.close()
    return [Row(**fields) for fields in raw]


def _work(
    rank: int,
    processes: int,
    port: int,
    address: StoreAddress,
    names: list[str],
    repeats: int,
    only: str,
    out: str,
) -> None:
    torch.set_num_threads(1)
    reshard_megatron.shim()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes)
    executors = [
        Executor(CollectiveTransport.connect(address, worker=rank, reads=reads), torch.device("cpu"))
        for reads in (True, False)
    ]
    rows: list[Row] = []
    for index, case in enumerate(case for case in CASES if case.name in names):
        bound = plan_of(case).lower_bound
        for number, methods in enumerate(taking_turns(chosen(only))):
            if methods[0].peer == "megatron" and not reshard_megatron.INSTALLED:
                rows.append(_absent(case, methods[0], "megatron-core is not installed"))
                continue
            plan = plan_of(case, contiguous=methods[0].contiguous)
            setup = _setup(case, rank, plan, executors, 1000 * index + number)
            found = measure(methods, setup, bound, 1 if methods[0].heavy else repeats)
            rows += found
            if rank == 0:
                for row in found:
                    took = f"{row.best_s or 0:.3f} s, CPU {row.cpu_s or 0:.3f} s"
                    print(f"# {row.case}: {row.title} {took} {row.remark}", flush=True)
            for executor in executors:
                executor.transport.close(setup.epoch)
            reshard_dcp.remove(SHM, setup)
            reshard_dcp.remove(DISK, setup)
    if rank == 0:
        Path(out).write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def _setup(case: Case, rank: int, plan: ReshardPlan, executors: list[Executor], epoch: int) -> Setup:
    """A rank that is in no unit takes part with nothing."""
    return Setup(
        case=case,
        rank=rank,
        plan=plan,
        mine=plan.rank_plan(rank),
        old=direct(plan.old_unit(rank), rank),
        executor=executors[0],
        over_gloo=executors[1],
        epoch=epoch,
        folder=f"{os.getppid()}-{epoch}",
    )


def measure(methods: Sequence[Method], setup: Setup, bound: int, repeats: int) -> list[Row]:
    """Let the methods take turns, `repeats` by the clock after one to warm up (not if heavy)."""
    kept = setup.mine.old == setup.mine.new
    new = None if kept else empty(setup.mine.new, setup.rank)
    runs = [Timed(method, setup, method.make(setup), bound) for method in methods]
    for repeat in range(methods[0].heavy, repeats + 1):
        for one in runs:
            one.run(new, counts=repeat > 0)
    return [one.row() for one in runs]


@dataclass(eq=False)
class Timed:
    """One method on one case, and what was measured of it so far."""

    method: Method
    setup: Setup
    move: Move
    bound: int
    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    received: int = 0
    compared: bool = False

    def run(self, new: ShardState | None, *, counts: bool) -> None:
        """Move once, after a barrier; the first result is compared."""
        gc.collect()
        before = reset_peak()
        dist.barrier()
        cpu, began_s = time.process_time(), time.perf_counter()
        self.received = self.move(new)
        cpu, ended_s = time.process_time() - cpu, time.perf_counter()
        wall = from_first_to_last(began_s, ended_s)
        self.peaks.append(largest(peak_growth(before)))
        if counts:
            self.walls.append(wall)
            self.cpus.append(total(cpu))
        if self.method.exact and not self.compared:
            self.compared = True
            kept = self.setup.mine.old == self.setup.mine.new
            same = kept or equal(new, direct(self.setup.mine.new, self.setup.rank))
            assert same, f"{self.setup.case.name}: {self.method.title}: rank {self.setup.rank} differs"

    def row(self) -> Row:
        """The row of the table."""
        crossed = total(float(self.received))
        return Row(
            case=self.setup.case.name,
            processes=self.setup.case.processes,
            method=self.method.key,
            title=self.method.title,
            megabytes=crossed / 1e6,
            bytes_over_bound=over(crossed, self.bound) if self.method.exact else None,
            wall_s=median(self.walls),
            best_s=min(self.walls),
            cpu_s=min(self.cpus),
            peak_mb=max(self.peaks) / 1e6,
        )


def over(crossed: float, bound: int) -> float:
    """Bytes over the lower bound; moving nothing where nothing must move is exactly the bound."""
    if bound:
        return crossed / bound
    return math.inf if crossed else 1.0


def _absent(case: Case, method: Method, why: str) -> Row:
    return Row(case=case.name, processes=case.processes, method=method.key, title=method.title, remark=why)


def from_first_to_last(began_s: float, ended_s: float) -> float:
    """Seconds from the first process's beginning to the last one's end. Collective."""
    return largest(ended_s) + largest(-began_s)


def total(value: float) -> float:
    """The sum over all processes."""
    number = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(number)
    return float(number)


def largest(value: float) -> float:
    """The largest over all processes."""
    number = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return float(number)


def reset_peak() -> int:
    """Restart the kernel's mark of peak resident memory; returns what is resident now, in bytes."""
    ctypes.CDLL(None).malloc_trim(0)  # or memory freed earlier would hide what a method takes
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_growth(before: int) -> float:
    """Bytes of resident memory at the peak above `before`."""
    return float(max(0, _status("VmHWM") - before))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def reshard_deepspeed_rows(only: str, cases: str) -> list[Row]:
    """The universal checkpoint on the cases that DeepSpeed can express."""
    title = "DeepSpeed universal checkpoint"
    if only and not any("deepspeed".startswith(key) for key in only.split(",")):
        return []
    out = []
    for case in CASES:
        if cases in case.name and case.name in reshard_deepspeed.CASES:
            found = reshard_deepspeed.measure(case.name)
            out.append(
                Row(case=case.name, processes=case.processes, method="deepspeed", title=title, **found)
            )
    return out


if __name__ == "__main__":
    main()
