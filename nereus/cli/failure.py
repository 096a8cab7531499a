"""What a failed command shows and exits with."""

from __future__ import annotations

from textwrap import indent

from rich.console import Console
from rich.text import Text

from nereus.errors import (
    Cancelled,
    CheckpointError,
    ConfigError,
    DataError,
    Infeasible,
    InvalidLayout,
    ModelError,
)

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
MAX_LINES = 12
USERS_MISTAKES = (ConfigError, DataError, ModelError, CheckpointError, InvalidLayout, Infeasible)


def exit_code(error: BaseException) -> int:
    """2 for what the user can change in the input, 130 for an interruption, 1 for a failed run."""
    if isinstance(error, USERS_MISTAKES):
        return BAD_INPUT
    if isinstance(error, KeyboardInterrupt | Cancelled):
        return INTERRUPTED
    return FAILED


def show_failure(error: BaseException, *, console: Console | None = None) -> None:
    """Print the error's message to stderr, readable: no traceback, a long message shortened in its middle."""
    console = console or Console(stderr=True)
    message = describe(error)
    if "\n" in message:
        message = "\n" + indent(message, "  ")
    console.print(Text("error: ", style="bold red") + Text(message), soft_wrap=True)


def describe(error: BaseException) -> str:
    """The error's message; errors that are not ours carry the name of their class."""
    message = str(error).strip()
    name = type(error).__name__
    if not type(error).__module__.startswith("nereus."):
        message = f"{name}: {message}" if message else name
    lines = message.splitlines()
    if len(lines) > MAX_LINES and not isinstance(error, USERS_MISTAKES):
        left_out = len(lines) - MAX_LINES
        lines = [lines[0], f"  ... {left_out} lines left out ...", *lines[1 - MAX_LINES :]]
    return "\n".join(lines)
