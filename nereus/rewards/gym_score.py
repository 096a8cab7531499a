"""The score that a reasoning-gym task gives to a response, as a reward function for a reward process."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score(response: str, extra: Mapping[str, Any]) -> float:
    """The task's own score of the answer, 0 to 1; not always 0 for rubbish, by the tasks' design.

    The answer is what stands in the last `<answer>...</answer>`, else the whole response, without the space
    around it. The problem is made again from its task's settings in `extra["reasoning_gym"]`, which the
    prompt carries.
    """
    problem = extra["reasoning_gym"]
    dataset = _dataset(
        problem["name"], problem["size"], problem["seed"], json.dumps(problem["config"], sort_keys=True)
    )
    tagged = ANSWER.findall(response)
    answer = (tagged[-1] if tagged else response).strip()
    return float(dataset.score_answer(answer, entry=dataset[problem["index"]]))


@lru_cache(maxsize=8)
def _dataset(name: str, size: int, seed: int, config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=size, seed=seed, **json.loads(config))
