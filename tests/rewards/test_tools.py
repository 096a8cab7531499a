"""Tools in their own processes: what they may return, faults, time limits, and a number that changes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nereus.config import ToolsConfig
from nereus.errors import Cancelled, DataError
from nereus.rewards.configured import configured_tools
from nereus.rewards.tools import Observation, ToolRequest, Tools

SOURCE = """
import os, time

def calls(turn, turns, state, response, prompt, ground_truth, extra, sample_id):
    if turn == "raise":
        raise ValueError("no such tool")
    if turn == "hang":
        time.sleep(60)
    if turn == "exit":
        os._exit(3)
    if turn == "number":
        return 5
    if turn == "odd":
        return {"observation": "x", "reward": 1}
    if turn == "object":
        return {"observation": "x", "state": object()}
    if turn == "end":
        return None
    if turn == "nap":
        time.sleep(0.3)
        return str(os.getpid())
    told = [turn, list(turns), state, response, prompt, ground_truth, extra, sample_id]
    return {"observation": repr(told), "state": {"calls": (state or {"calls": 0})["calls"] + 1}}

def spin(turn):
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    return turn

def wrong(solution_str):
    return None
"""


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def tools(file: Path) -> Iterator[Tools]:
    with Tools(target=f"{file}:calls", limit_s=1.0, num_processes=2) as tools:
        yield tools


def request(turn: str, **given: object) -> ToolRequest:
    parts = {"sample_id": 7, "prompt": "p", "response": f"r{turn}", "turns": ("a", turn)} | given
    return ToolRequest(turn=turn, **parts)  # type: ignore[arg-type]


def ask(tools: Tools, *turns: str) -> list[Observation]:
    for key, turn in enumerate(turns):
        tools.submit(key, request(turn))
    found: dict[int, Observation] = {}
    while tools.num_away or len(found) < len(turns):
        found |= tools.results(wait_s=0.5)
    return [found[key] for key in range(len(turns))]


def test_a_tool_is_told_of_turn_state_and_prompt(tools: Tools) -> None:
    tools.submit(3, request("x", state={"calls": 4}, ground_truth=[1], extra={"k": None}))
    found: dict[int, Observation] = {}
    while not found:
        found = tools.results(wait_s=0.5)
    told = ["x", ["a", "x"], {"calls": 4}, "rx", "p", [1], {"k": None}, 7]
    assert found == {3: Observation(text=repr(told), state={"calls": 5})}


@pytest.mark.parametrize(
    ("turn", "reason", "detail"),
    [
        ("raise", "exception", "ValueError: no such tool (tools.py line "),
        ("hang", "timeout", "no answer in 1 s"),
        ("exit", "exit", "ended with code 3"),
        ("number", "invalid", "returned 5, neither text nor None"),
        ("odd", "invalid", "neither text nor None"),
        ("object", "invalid", "a state that is no JSON"),
    ],
)
def test_a_fault_is_told_to_the_model_and_counted_and_harms_no_other(
    tools: Tools, turn: str, reason: str, detail: str
) -> None:
    first, fault, end = ask(tools, "x", turn, "end")
    assert first.text is not None
    assert end.text is None
    assert end.reason is None
    assert (fault.text, fault.reason) == (f"error: {reason}", reason)
    assert detail in fault.detail
    assert tools.first_failure.startswith(reason)
    assert tools.take_failures() == {reason: 1}
    assert tools.take_failures() == {}


def test_the_number_of_processes_changes_between_calls_and_no_call_is_lost(tools: Tools) -> None:
    assert len(set(tools.pool.pids)) == 2
    tools.pool.resize(3)
    assert len({told.text for told in ask(tools, *["nap"] * 9)}) == 3
    tools.pool.resize(1)
    assert len({told.text for told in ask(tools, *["nap"] * 3)}) == 1
    assert len(tools.pool.pids) == 1


def test_busy_processes_end_their_call_before_they_go(tools: Tools) -> None:
    for key in range(2):
        tools.submit(key, request("nap"))
    tools.results(wait_s=0)
    tools.pool.resize(1)
    found: dict[int, Observation] = {}
    while len(found) < 2:
        found |= tools.results(wait_s=0.5)
    assert all(told.reason is None for told in found.values())
    tools.results(wait_s=0)
    assert len(tools.pool.pids) == 1


def test_calls_are_measured_by_clock_and_cpu(file: Path, tools: Tools) -> None:
    ask(tools, "nap", "nap")
    load = tools.take_load()
    assert load.num_calls == 2
    assert load.longest_s >= 0.3
    assert load.cpu_s < 0.5 * load.busy_s
    assert tools.take_load().num_calls == 0
    with Tools(target=f"{file}:spin", limit_s=20) as spinning:
        ask(spinning, "x")
        assert spinning.take_load().cpu_s >= 0.2


def test_waiting_for_a_tool_ends_with_the_stop_and_dropped_calls_do_not_answer(file: Path) -> None:
    stop = threading.Event()
    with Tools(target=f"{file}:calls", limit_s=60, stop=stop) as tools:
        tools.submit(0, request("hang"))
        tools.results(wait_s=0.0)
        stop.set()
        began_s = time.monotonic()
        with pytest.raises(Cancelled, match="tool function"):
            tools.results(wait_s=0.5)
        assert time.monotonic() - began_s < 5
        stop.clear()
        tools.drop()
        assert tools.num_away == 0
        (told,) = ask(tools, "end")
        assert told == Observation(text=None)


def test_a_tool_with_other_arguments_is_refused_at_the_start(file: Path) -> None:
    with pytest.raises(DataError, match=r"cannot load the tool function.*there are prompt, response, turn"):
        Tools(target=f"{file}:wrong", limit_s=5).__enter__()


def test_the_configuration_chooses_function_limit_and_processes(file: Path) -> None:
    with configured_tools(ToolsConfig(function=f"{file}:calls", workers=2)) as tools:
        assert len(tools.pool.pids) == 2
        assert os.getpid() not in tools.pool.pids
    with pytest.raises(ValueError, match=r"write \{observation\} once"):
        ToolsConfig(function="tools.py:f", template="tool")
