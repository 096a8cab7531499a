"""Random plan-selection problems in whole microseconds and MiB: tight and loose, one pool and two."""

from __future__ import annotations

import numpy as np

from nereus.planner.problem import PoolLimit, Problem, Seat, Timing

MIB = float(1 << 20)
PPO = (("actor", 0, 2), ("critic", 1, 2))


def random_problem(seed: int) -> Problem:
    """Like those of the cost model, but perturbed so that no order among candidates can be relied on."""
    rng = np.random.default_rng(seed)
    pools = tuple(
        PoolLimit(
            num_gpus=int(rng.choice([8, 16, 32, 64])), limit_bytes=float(rng.integers(24_000, 90_000)) * MIB
        )
        for _ in range(int(rng.choice([1, 1, 2])))
    )
    critic = rng.random() < 0.7
    names = [("actor.generation", 0), ("reference.inference", 1), ("actor.training", 2)]
    if critic:
        names += [("critic.inference", 1), ("critic.training", 2)]
    if rng.random() < 0.7:
        names.append(("reward.inference", 1))
    names.sort(key=lambda item: item[1])
    sizes = {name.split(".")[0]: float(rng.integers(4_000, 90_000)) for name, _ in names}
    seats = tuple(_seat(rng, name, stage, sizes[name.split(".")[0]], pools) for name, stage in names)
    order = [name for name, _ in names]
    pairs = [(order.index("actor.generation"), order.index("actor.training"))]
    if critic:
        pairs.append((order.index("critic.inference"), order.index("critic.training")))
    own = bool(rng.random() < 0.35)
    timing: Timing = "overlap" if own and rng.random() < 0.6 else "sync"
    in_turn = frozenset(stage for stage in (1, 2) if rng.random() < 0.3)
    return Problem(
        seats=seats,
        pools=pools,
        pairs=tuple(pairs),
        timing=timing,
        own_generation_pool=own,
        in_turn=in_turn,
        must_share=frozenset(pair for pair in pairs if rng.random() < 0.2 and not own),
    )


def _seat(
    rng: np.random.Generator, name: str, stage: int, size_mib: float, pools: tuple[PoolLimit, ...]
) -> Seat:
    """Every power-of-two (tp, pp, dp) on every pool, some left out, times and sizes with noise."""
    work = {0: 400.0, 1: 60.0, 2: 300.0}[stage] * size_mib / 16_000
    factor = {0: 1.0, 1: 1.0, 2: 6.0}[stage]
    rows = []
    for pool, limit in enumerate(pools):
        for tp in (1, 2, 4, 8):
            for pp in (1, 2, 4):
                for dp in (1, 2, 3, 4, 6, 8, 16, 32):
                    gpus = tp * pp * dp
                    if gpus > limit.num_gpus or rng.random() < 0.25:
                        continue
                    latency = work / gpus**0.9 * (1 + 0.1 * pp) * rng.uniform(0.8, 1.25)
                    persistent = size_mib * factor / (tp * pp)
                    transient = rng.uniform(500, 20_000) / (tp if rng.random() < 0.7 else dp)
                    sync = 0.05 * size_mib / 1000 / (tp * pp)
                    layout = ((pool * 16 + tp) * 64 + pp) * 4096 + dp
                    rows.append((pool, gpus, persistent, transient, latency, sync, layout))
    if not rows:
        return _seat(rng, name, stage, size_mib, pools)
    pool, gpus, persistent, transient, latency, sync, layout = np.array(rows).T
    return Seat(
        name=name,
        stage=stage,
        pool=pool.astype(np.int64),
        gpus=gpus.astype(np.int64),
        persistent_bytes=np.round(persistent) * MIB,
        transient_bytes=np.round(transient) * MIB,
        latency_s=np.round(latency * 1e6) / 1e6,
        sync_s=np.round(sync * 1e6) / 1e6,
        layout=layout.astype(np.int64),
    )
