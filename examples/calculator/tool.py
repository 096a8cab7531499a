"""The tool of the calculator task: it adds what the model asks for in parentheses."""

from __future__ import annotations

import re


def calculator(turn: str) -> str | None:
    """`095=` after a turn that ends with `(37+58)`, `=` after one that ends with another `)`; else None: the
    model has answered.
    """
    if not turn.endswith(")"):
        return None
    asked = re.search(r"\((\d+)\+(\d+)\)$", turn)
    return f"{int(asked[1]) + int(asked[2]):03d}=" if asked else "="
