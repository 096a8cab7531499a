"""The program of a process for a user's function, a reward or a tool: loads it, then answers requests.

    parent                                   worker
      | {"target", "kind", "batched",      ->   |  load
      |  "arguments", "sys_path"}               |
      | <-  {"ready": true} or {"failed": why}  |
      | {"requests": [...]}                ->   |  call
      | <-  {"values": [...], "cpu_s"}          |
      |     or {"exception", "cpu_s"}           |

Lines of JSON, so nothing that the user's code makes is ever unpickled. Run as a file with `python -P`, with
the standard library only: the process holds no more than the user's file imports, and no folder of this
package shadows a module. The user's prints go to stderr; the protocol has a descriptor of its own. The
process ends with its parent.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

REWARD_NAMES = ("prompt", "response", "response_token_ids", "turns", "ground_truth", "extra", "sample_id")
TOOL_NAMES = ("prompt", "response", "turn", "turns", "state", "ground_truth", "extra", "sample_id")
VERL_NAMES = ("solution_str", "data_source", "extra_info")  # so that a verl compute_score works as it is
MAX_DETAIL = 500


class CannotLoad(Exception):
    """The function can't be found, or asks for an argument that there is not."""


def main() -> None:
    """Serve until the parent closes the pipe."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # input() in the user's code must not read requests
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()

    def reply(message: Mapping[str, object]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    start = json.loads(requests.readline() or b"null")
    if start is None:
        return
    sys.path[:] = start["sys_path"]
    try:
        function = partial(load(start["target"]), **start["arguments"])
        kind = KINDS[start["kind"]]
        names = wanted(function, *kind.names)
    except (Exception, SystemExit) as error:
        reply({"failed": describe(error)})
        return
    reply({"ready": True})
    for line in requests:
        began_s = cpu_seconds()
        answer = call(function, names, kind.read, json.loads(line)["requests"], batched=start["batched"])
        reply({**answer, "cpu_s": cpu_seconds() - began_s})


def cpu_seconds() -> float:
    """CPU time of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def load(target: str) -> Callable[..., Any]:
    """The function of `package.module:function` or `path/to/file.py:function`."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise CannotLoad(f"{target!r} is not of the form package.module:function or path/to/file.py:function")
    if place.endswith(".py"):
        path = os.path.abspath(place)
        if not os.path.isfile(path):
            raise CannotLoad(f"{path} does not exist")
        sys.path.insert(0, os.path.dirname(path))  # its siblings, as if it had been run
        spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
        assert spec is not None, f"no loader for {path}"
        assert spec.loader is not None, f"no loader for {path}"
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise CannotLoad(f"{place} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def wanted(function: Callable[..., Any], own: Sequence[str], foreign: Sequence[str]) -> tuple[str, ...]:
    """The arguments that the function takes, by name; all of `own` if it takes any keyword."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind == parameter.VAR_KEYWORD:
            names += [name for name in own if name not in names]
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            if parameter.name in (*own, *foreign):
                names.append(parameter.name)
            elif parameter.default is parameter.empty:
                verl = f" (and verl's {', '.join(foreign)})" if foreign else ""
                raise CannotLoad(
                    f"the function needs an argument {parameter.name!r}; there are {', '.join(own)}{verl}"
                )
    return tuple(dict.fromkeys(names))


def call(
    function: Callable[..., Any],
    names: Sequence[str],
    read: Callable[[Any], Any],
    requests: Sequence[Mapping[str, Any]],
    *,
    batched: bool,
) -> dict[str, object]:
    """The reply to one call: a value or a fault for each request, or the exception."""
    columns = {name: [argument(request, name) for request in requests] for name in names}
    try:
        if batched:
            values = function(**columns)
            if not isinstance(values, Sequence) and hasattr(values, "tolist"):
                values = values.tolist()  # an array or tensor
            if not isinstance(values, Sequence) or len(values) != len(requests):
                got = len(values) if isinstance(values, Sequence) else type(values).__name__
                return {
                    "exception": f"a batched reward must return {len(requests)} values; it returned {got}"
                }
            return {"values": [read(value) for value in values]}
        (value,) = [function(**{name: columns[name][i] for name in names}) for i in range(len(requests))]
        return {"values": [read(value)]}
    except (
        Exception,
        SystemExit,
    ) as error:  # the user's code may raise anything; it becomes a missing value
        return {"exception": describe(error)}


def argument(request: Mapping[str, Any], name: str) -> Any:
    """The value of an argument, by our name or verl's."""
    if name == "solution_str":
        return request["response"]
    if name == "data_source":
        return request["extra"].get("data_source")
    if name == "extra_info":
        return request["extra"].get("extra_info", request["extra"])
    return request[name]


def as_number(value: Any) -> float | dict[str, str] | None:
    """A finite float, None, or what is wrong with the value. verl's mapping with `score` counts as its
    score.
    """
    if isinstance(value, Mapping) and "score" in value:
        value = value["score"]
    if value is None:
        return None
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return {"invalid": f"returned {value!r:.60}, a {type(value).__name__} and no number"}
    number = float(value)
    return number if math.isfinite(number) else {"invalid": f"returned {number}"}


def as_observation(value: Any) -> dict[str, Any]:
    """Text and state, or what is wrong with the value: text, None, or a mapping of `observation` and maybe
    `state`.
    """
    text, state = value, None
    if isinstance(value, Mapping) and "observation" in value and value.keys() <= {"observation", "state"}:
        text, state = value["observation"], value.get("state")
    if text is not None and not isinstance(text, str):
        return {"invalid": f"returned {value!r:.60}, neither text nor None nor {{'observation', 'state'}}"}
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        return {"invalid": f"returned a state that is no JSON: {error}"}
    return {"text": text, "state": state}


class Kind(NamedTuple):
    """The names of arguments that there are, ours and others', and how a returned value is read."""

    names: tuple[Sequence[str], Sequence[str]]
    read: Callable[[Any], Any]


KINDS = {
    "reward": Kind((REWARD_NAMES, VERL_NAMES), as_number),
    "tool": Kind((TOOL_NAMES, ()), as_observation),
}


def describe(error: BaseException) -> str:
    """Type, message and place of an exception, on one line."""
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, CannotLoad) and (frames := traceback.extract_tb(error.__traceback__)):
        text += f" ({os.path.basename(frames[-1].filename)} line {frames[-1].lineno})"
    return text[:MAX_DETAIL]


def _end_with_parent(parent: int) -> None:
    """A function that hangs never sees the closed pipe; this thread does see that the parent is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main()
