"""The share of a prompt's tests that the program in a response passes, as a reward function for a reward
process.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from nereus.rewards.code_tests import InputOutput, parse_tests, same_output
from nereus.rewards.sandbox import Isolation, Sandbox, run_program

BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
HARNESS = Path(__file__).with_name("code_harness.py")


def score(
    prompt: str,
    response: str,
    ground_truth: Any,
    extra: Mapping[str, Any],
    *,
    tests: str | None = None,
    program: Literal["block", "continuation"] = "block",
    counts: Literal["all", "share"] = "all",
    timeout_s: float = 10.0,
    memory_bytes: int = 1 << 30,
    num_processes: int = 8,
    isolation: Isolation = "namespaces",
) -> float:
    """1 where every test passes, else 0; with `counts` "share" the share of them.

    The tests are `ground_truth`, or `extra[tests]`; see `parse_tests`. All together may take `timeout_s`. A
    program that fails, is stopped or is none at all passes nothing. Raises ValueError for a prompt without
    tests, SandboxError when the program cannot be run: then the reward is missing.
    """
    given = ground_truth if tests is None else extra.get(tests)
    parsed = parse_tests(given, extra)
    source = prompt + response if program == "continuation" else extract_program(response)
    sandbox = Sandbox(isolation=isolation, memory_bytes=memory_bytes, num_processes=num_processes)
    cases = [test for test in parsed if isinstance(test, InputOutput)]
    if cases:
        num_passed = _passed_cases(source, cases, timeout_s, sandbox, stop_early=counts == "all")
    else:
        num_passed = _passed_code(source, [str(test) for test in parsed], timeout_s, sandbox)
    return num_passed / len(parsed) if counts == "share" else float(num_passed == len(parsed))


def extract_program(response: str) -> str:
    """The last fenced block of Python, also one that the length limit cut off; else the whole response."""
    blocks: list[str] = BLOCK.findall(response)
    return blocks[-1] if blocks else response


def _passed_cases(
    source: str, cases: Sequence[InputOutput], timeout_s: float, sandbox: Sandbox, *, stop_early: bool
) -> int:
    num_passed, left_s = 0, timeout_s
    for case in cases:
        if left_s <= 0:
            break
        began_s = time.monotonic()
        outcome = run_program({"main.py": source}, stdin=case.input, time_s=left_s, sandbox=sandbox)
        left_s -= time.monotonic() - began_s
        printed = outcome.output.decode(errors="replace")
        if outcome.ending == "exit" and outcome.code == 0 and same_output(printed, case.output):
            num_passed += 1
        elif stop_early:
            break
    return num_passed


def _passed_code(source: str, tests: Sequence[str], timeout_s: float, sandbox: Sandbox) -> int:
    word = secrets.token_hex(16)
    files = {"main.py": HARNESS.read_text(encoding="utf-8"), "solution.py": source}
    outcome = run_program(files, stdin=json.dumps([word, tests]), time_s=timeout_s, sandbox=sandbox)
    told = re.search(rf"^{word} (\[[0-9, ]*\])$", outcome.output.decode(errors="replace"), re.MULTILINE)
    return len(json.loads(told[1])) if told and outcome.ending == "exit" else 0
