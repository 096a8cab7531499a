"""Problems of the reasoning-gym package as records.

A record carries the task's settings and the problem's index, not the problem's metadata (which need not
be JSON): the reward process makes the same data set again and scores with the entry at that index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from nereus.data.files import Record
from nereus.errors import DataError, explain


def gym_records(*, name: str, size: int, seed: int, config: Mapping[str, object]) -> Iterator[Record]:
    """`size` problems of the task: `prompt` is the question, `answer` the task's own answer.

    Raises DataError for an unknown task or options that it refuses. Importing reasoning-gym takes seconds.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = ", ".join(get_close_matches(name, DATASETS, n=3)) or "none"
        raise DataError(
            explain(
                f"cannot find the reasoning-gym task {name!r}",
                values=f"{len(DATASETS)} tasks are installed; near it: {near}",
                remedy="reasoning_gym.factory.DATASETS lists them",
            )
        )
    try:
        dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(
            explain(
                f"cannot make the reasoning-gym task {name!r}",
                values=f"size {size}, seed {seed}, config {dict(config)}: {error}",
                remedy="prompts.source.config must hold options of that task",
            )
        ) from error
    for index in range(size):
        entry = dataset[index]
        yield Record(
            where=f"reasoning-gym {name} problem {index}",
            values={
                "prompt": entry["question"],
                "answer": None if entry["answer"] is None else str(entry["answer"]),
                "reasoning_gym": {
                    "name": name,
                    "size": size,
                    "seed": seed,
                    "config": dict(config),
                    "index": index,
                },
            },
        )
