"""Planning time: CPU milliseconds to plan a change of layout, cold (caches empty) and warm, on one thread.

Run: `OMP_NUM_THREADS=1 python -m benchmarks.reshard_plan`. Columns: bytes on the wire over M (one replica's
state, 14 bytes a parameter), over the lower bound, and with ranks as given; bytes of the busiest sender and
receiver over M; flows; CPU ms of the plan cold and warm, of its digest, and of one rank's lowering.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from nereus.emu import layout, partition, regions
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.kinds import training_kinds
from nereus.emu.layout import Layout
from nereus.emu.reshard import plan_reshard
from nereus.emu.tensor import ModelSpec
from nereus.emu.topology import Topology
from nereus.emu.unit import Unit, UnitId

T = TypeVar("T")
Shape = tuple[int, int, int]  # tp, pp, dp

MODEL_8B = decoder_spec(
    DecoderConfig(
        vocab_size=151936,
        hidden_size=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12288,
    ),
    vocab_multiple=64,
)
MODEL_70B = decoder_spec(
    DecoderConfig(
        vocab_size=128256,
        hidden_size=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=28672,
    ),
    vocab_multiple=64,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A change of layout. `limit_ms` is the goal for the cold plan, where there is one."""

    name: str
    model: ModelSpec
    old: Shape
    new: Shape
    limit_ms: float | None = None


CASES = (
    Case(name="8B split tp4 -> 2 x tp2", model=MODEL_8B, old=(4, 1, 1), new=(2, 1, 2)),
    Case(name="8B merge 2 x tp2 -> tp4", model=MODEL_8B, old=(2, 1, 2), new=(4, 1, 1)),
    Case(name="8B extend tp2 x1 -> x4", model=MODEL_8B, old=(2, 1, 1), new=(2, 1, 4)),
    Case(name="8B 8: tp4pp2 -> tp2pp2dp2", model=MODEL_8B, old=(4, 2, 1), new=(2, 2, 2)),
    Case(name="8B 16->32: dp2 -> dp4", model=MODEL_8B, old=(4, 2, 2), new=(4, 2, 4), limit_ms=20),
    Case(name="8B 16->32: tp8pp2 -> tp4pp2dp4", model=MODEL_8B, old=(8, 2, 1), new=(4, 2, 4), limit_ms=20),
    Case(name="70B 128->256: tp8pp4", model=MODEL_70B, old=(8, 4, 4), new=(8, 4, 8)),
    Case(name="70B 256->512: tp8pp4 -> tp4pp8", model=MODEL_70B, old=(8, 4, 8), new=(4, 8, 16), limit_ms=300),
    Case(name="70B 1024->2048: tp8pp4 -> tp4pp8", model=MODEL_70B, old=(8, 4, 32), new=(4, 8, 64)),
)


def units_of(model: ModelSpec, shape: Shape) -> list[Unit]:
    """Units on consecutive ranks."""
    tp, pp, dp = shape
    size = tp * pp
    return [
        Unit(
            id=UnitId("actor.training", i),
            model="actor",
            kinds=training_kinds("bf16"),
            layout=Layout.make(model, tp=tp, pp=pp, ranks=tuple(range(i * size, (i + 1) * size))),
        )
        for i in range(dp)
    ]


def clear_caches() -> None:
    """Forget all geometry."""
    for module in (layout, partition, regions):
        for value in vars(module).values():
            if clear := vars(type(value)).get("cache_clear"):
                clear(value)


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """The result and CPU milliseconds."""
    start = time.process_time()
    result = call()
    return result, (time.process_time() - start) * 1e3


def run(case: Case, repeats: int = 3) -> float:
    """Print one row and return the cold time (the least of the repeats) over its limit."""
    model = case.model
    old, new = units_of(model, case.old), units_of(model, case.new)
    num_ranks = max(rank for unit in (*old, *new) for rank in unit.layout.ranks) + 1
    topology = Topology.uniform(num_ranks, 8)
    cold = warm = float("inf")
    for _ in range(repeats):
        clear_caches()
        plan, first = timed(lambda: plan_reshard(model, old, new, None, topology))
        _, second = timed(lambda: plan_reshard(model, old, new, None, topology))
        cold, warm = min(cold, first), min(warm, second)
    digest, digest_ms = timed(lambda: plan.digest)
    _, lower_ms = timed(lambda: plan.rank_plan(plan.ranks[-1]))
    given = plan_reshard(model, old, new, None, topology, placement="as_given")
    state = model.num_elements * 14
    ratio = plan.bytes / plan.lower_bound if plan.lower_bound else 1.0
    print(
        f"{case.name:34s} {plan.bytes / state:8.3f} {ratio:6.2f} {given.bytes / state:8.3f} "
        f"{plan.traffic.max_sent / state:7.4f} {plan.traffic.max_received / state:7.4f} "
        f"{len(plan.streams.items):6d} "
        f"{cold:8.1f} {warm:8.1f} {digest_ms:7.1f} {lower_ms:7.1f}  {digest[:8]}"
    )
    return cold / case.limit_ms if case.limit_ms else 0.0


def main() -> int:
    """Run all cases; 1 when a goal is missed."""
    heads = (
        "bytes/M",
        "/bound",
        "given/M",
        "out/M",
        "in/M",
        "flows",
        "cold ms",
        "warm ms",
        "digest",
        "lower",
    )
    widths = (8, 6, 8, 7, 7, 6, 8, 8, 7, 7)
    print(f"{'case':34s} " + " ".join(f"{h:>{w}s}" for h, w in zip(heads, widths, strict=True)))
    worst = max(run(case) for case in CASES)
    print(f"slowest plan takes {worst:.0%} of its goal")
    return int(worst > 1)


if __name__ == "__main__":
    sys.exit(main())
