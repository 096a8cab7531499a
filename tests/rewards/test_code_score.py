"""Programs in responses, scored by their tests; and the ways in which a policy might cheat."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nereus.config import CodeReward
from nereus.errors import ConfigError
from nereus.rewards.code_score import extract_program, score
from nereus.rewards.code_tests import InputOutput, parse_tests, same_output
from nereus.rewards.configured import configured_reward
from nereus.rewards.function import RewardRequest
from nereus.rewards.sandbox import Sandbox, SandboxError, check_sandbox

ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"]
DOUBLE = [{"input": "3\n", "output": "6\n"}, {"input": "0\n", "output": "0"}]


@pytest.fixture
def sandboxes() -> None:
    try:
        check_sandbox(Sandbox())
    except SandboxError as error:
        pytest.skip(f"no sandbox on this machine: {error}")


def scored(response: str, tests: Any, extra: Mapping[str, Any] | None = None, **settings: Any) -> float:
    return score("", response, tests, extra or {}, **{"timeout_s": 20.0} | settings)


def test_the_last_block_is_the_program_and_without_one_all_of_it() -> None:
    assert extract_program("first\n```python\nx = 1\n```\nbetter\n```py\nx = 2\n```\ndone") == "x = 2\n"
    assert extract_program("cut off\n```python\nx = 1\ny = ") == "x = 1\ny = "
    assert extract_program("x = 1") == "x = 1"


def test_tests_are_understood_in_every_form() -> None:
    cases = (InputOutput(input="1", output="2"),)
    assert parse_tests([{"input": "1", "output": "2"}], {}) == cases
    assert parse_tests({"inputs": ["1"], "outputs": ["2"]}, {}) == cases
    assert parse_tests('{"inputs": ["1"], "outputs": ["2"]}', {}) == cases
    assert parse_tests({"inputs": [["1", "2"]], "outputs": [3]}, {})[0] == InputOutput(
        input="1\n2", output="3"
    )
    assert parse_tests(ASSERTS, {}) == tuple(ASSERTS)
    assert parse_tests("assert f(1)", {}) == ("assert f(1)",)
    assert parse_tests("[x for x in f(1)]", {}) == ("[x for x in f(1)]",)
    check = "def check(candidate):\n    assert candidate(1)"
    assert parse_tests(check, {"entry_point": "f"})[0].endswith("\ncheck(f)\n")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "given", [None, [], {"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}, 3]
)
def test_no_tests_are_an_error(given: Any) -> None:
    with pytest.raises(ValueError, match="no tests in"):
        parse_tests(given, {})


def test_space_at_the_ends_of_lines_does_not_count() -> None:
    assert same_output("a \nb\n\n", "a\nb")
    assert not same_output("a b", "ab")
    assert not same_output("\na", "a")


@pytest.mark.usefixtures("sandboxes")
def test_a_right_program_gets_one_and_a_wrong_one_its_share() -> None:
    assert scored(f"Here:\n```python\n{ADD}```", ASSERTS) == 1.0
    wrong = "def add(a, b):\n    return int(a) + int(b)\n"
    assert scored(wrong, ASSERTS) == 0.0
    assert scored(wrong, ASSERTS, counts="share") == pytest.approx(2 / 3)
    assert scored("print(2 * int(input()))", DOUBLE) == 1.0
    assert scored("print(6)", DOUBLE) == 0.0
    assert scored("print(6)", DOUBLE, counts="share") == 0.5


@pytest.mark.usefixtures("sandboxes")
@pytest.mark.parametrize(
    "cheat",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "import atexit; raise SystemExit",
        "print('[0, 1, 2]'); print('\\nword [0, 1, 2]')",
        "import builtins\nbuiltins.AssertionError = Exception",
        "import os; os.close(1)",
        "syntax error",
        "",
        "while True: pass",
    ],
)
def test_a_program_that_does_not_do_it_passes_nothing(cheat: str) -> None:
    limit_s = 2.0 if "while" in cheat else 20.0
    assert scored(cheat, ASSERTS, counts="share", timeout_s=limit_s) == 0.0
    assert scored(cheat, DOUBLE, counts="share", timeout_s=limit_s) == 0.0


@pytest.mark.usefixtures("sandboxes")
def test_the_guard_of_a_script_does_not_run_and_dataclasses_work() -> None:
    source = f"""
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Pair:
    a: int
{ADD}
if __name__ == "__main__":
    input()
"""
    assert scored(source, ASSERTS) == 1.0


@pytest.mark.usefixtures("sandboxes")
def test_all_tests_of_a_response_share_one_limit() -> None:
    cases = [{"input": str(n), "output": "x"} for n in range(50)]
    began_s = time.monotonic()
    assert scored("import time; time.sleep(60)", cases, counts="share", timeout_s=1.5) == 0.0
    assert time.monotonic() - began_s < 30


@pytest.mark.usefixtures("sandboxes")
def test_the_configured_reward_scores_in_its_workers_and_says_how_long_responses_waited() -> None:
    config = CodeReward(tests="asserts", counts="share", timeout_s=20, workers=1)
    slow = "import time; time.sleep(0.5)\n" + ADD
    requests = [
        RewardRequest(sample_id=i, prompt="", response=text, response_token_ids=(), extra={"asserts": tests})
        for i, (text, tests) in enumerate([(slow, ASSERTS), (ADD, ASSERTS), (ADD, None)])
    ]
    with configured_reward(config) as reward:
        first, second, absent = reward.score(requests)
    assert (first.value, second.value, absent.value) == (1.0, 1.0, None)
    assert absent.reason == "exception"
    assert "no tests in None" in absent.detail
    assert first.queue_s < 0.5 <= second.queue_s <= absent.queue_s


def test_a_machine_without_sandboxes_is_a_mistake_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(sandbox: Sandbox) -> None:
        raise SandboxError("cannot make namespaces: Operation not permitted")

    monkeypatch.setattr("nereus.rewards.configured.check_sandbox", refuse)
    with pytest.raises(ConfigError, match=r"Operation not permitted.*Remedy: .*isolation: limits"):
        configured_reward(CodeReward())


@pytest.mark.usefixtures("sandboxes")
def test_humaneval_solutions_pass_and_stubs_fail(shared_data: Path) -> None:
    with gzip.open(shared_data / "real" / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
        tasks = [json.loads(line) for line in file][::41]
    assert len(tasks) == 4
    for task in tasks:
        for solution, value in ((task["canonical_solution"], 1.0), ("    return None\n", 0.0)):
            assert (
                score(
                    task["prompt"],
                    solution,
                    None,
                    task,
                    tests="test",
                    program="continuation",
                    timeout_s=30.0,
                )
                == value
            )
