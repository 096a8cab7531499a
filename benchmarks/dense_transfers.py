"""Dense scheduling problems: every GPU holds two shards, receives two, and each old one has several readers.

Harder than real transitions, whose chains seldom meet: every memory bin and every link is shared by many
transfers. A shard is freed when its last reader is done, which a task of no duration does.
"""

from __future__ import annotations

import random

from nereus.emu.schedule_problem import Problem, Task, mask_of

SHARDS = 2
MEAN_SHARD = 250


def dense_problem(seed: int, *, num_gpus: int, slack: float) -> Problem:
    """The problem of a seed; `slack` is the free memory in mean shards beside the larger of both states."""
    draw = random.Random(seed)
    old = {(gpu, at): draw.randint(100, 400) for gpu in range(num_gpus) for at in range(SHARDS)}
    tasks: list[Task] = []
    readers: dict[tuple[int, int], list[int]] = {}
    new = [0] * num_gpus
    for gpu in range(num_gpus):
        for _ in range(SHARDS):
            num_sources = draw.choice((1, 1, 2))
            sources = {(draw.randrange(num_gpus), draw.randrange(SHARDS)) for _ in range(num_sources)}
            size = draw.randint(100, 400)
            for source in sources:
                readers.setdefault(source, []).append(len(tasks))
            new[gpu] += size
            tasks.append(
                Task(
                    chain=len(tasks),
                    seconds=float(size),
                    sends=mask_of({holder for holder, _ in sources}),
                    receives=1 << gpu,
                    acquires=((gpu, size),),
                )
            )
    used = [sum(old[gpu, at] for at in range(SHARDS)) for gpu in range(num_gpus)]
    cap = [int(max(pair) + slack * MEAN_SHARD) for pair in zip(used, new, strict=True)]
    for (gpu, at), size in old.items():
        if (gpu, at) in readers:
            after = tuple(readers[gpu, at])
            tasks.append(Task(chain=len(tasks), seconds=0.0, releases=((gpu, size),), after=after))
        else:
            used[gpu] -= size
    return Problem(
        tasks=tuple(tasks), bins=tuple((gpu,) for gpu in range(num_gpus)), used=tuple(used), cap=tuple(cap)
    )
