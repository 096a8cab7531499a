"""The program in the sandbox that runs code as tests: loads the solution, runs each test, tells which
passed.

stdin has the tests and a word that nobody can guess; only a line that begins with it counts. So a solution
that ends the process, or prints what it hopes we wait for, has passed nothing. One that searches this
process's memory could find the word: tests of input and output are compared outside and know no such way.
"""

from __future__ import annotations

import json
import os
import sys
import types


def main() -> None:
    """Read the tests, then run them one after the other in the solution's own names."""
    word, tests = json.loads(sys.stdin.read())
    write, result = os.write, os.dup(1)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    with open("solution.py", encoding="utf-8") as file:
        exec(compile(file.read(), "solution.py", "exec"), module.__dict__)
    passed = []
    for number, test in enumerate(tests):
        try:
            exec(compile(test, f"test {number}", "exec"), module.__dict__)
            passed.append(number)
        except Exception:  # a test that raises is a test that failed
            continue
    write(result, f"\n{word} {json.dumps(passed)}\n".encode())


if __name__ == "__main__":
    main()
