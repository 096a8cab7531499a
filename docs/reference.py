"""Writes the reference pages of the site from the program itself: configuration keys and the command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from nereus.cli.commands import COMMANDS
from nereus.cli.config import key_rows


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the two pages before the site is built."""
    pages = {"reference/configuration.md": configuration(), "reference/command-line.md": command_line()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def configuration() -> str:
    """Every key with its default and meaning."""
    lines = [
        "# Configuration keys",
        "",
        "Generated from the program. `nereus config keys WORD` prints those that hold a word.",
        "Keys that only some alternatives have name their kinds.",
        "",
        "| key | default | meaning |",
        "|---|---|---|",
    ]
    for (dotted, default, meaning), kinds in key_rows().items():
        name = f"`{dotted}`" + (f" ({', '.join(kinds)})" if kinds else "")
        lines.append("| " + " | ".join(_cell(text) for text in (name, f"`{default}`", meaning)) + " |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def command_line() -> str:
    """The help of every command."""
    from nereus.cli.app import build_app

    lines = ["# Command line", "", "Generated from the program.", ""]
    for command in COMMANDS:
        app: Any = typer.main.get_command(build_app(chosen=command.name))
        lines += [f"## nereus {command.name}", ""]
        lines += _command(app.commands[command.name], f"nereus {command.name}")
        lines += ["```", *command.examples, "```", ""] if command.examples else []
    return "\n".join(lines)


def _command(command: Any, name: str) -> Iterator[str]:
    if hasattr(command, "commands"):  # a group
        for child, inner in command.commands.items():
            yield from (f"### {name} {child}", "")
            yield from _command(inner, f"{name} {child}")
        return
    yield from (
        (command.help or "").strip(),
        "",
        "| argument or option | default | meaning |",
        "|---|---|---|",
    )
    for parameter in command.params:
        meaning = _cell(getattr(parameter, "help", None) or "")
        names = ", ".join(f"`{option}`" for option in parameter.opts)
        shown = parameter.default not in (None, False, ()) and not callable(parameter.default)
        default = f"`{parameter.default}`" if shown else ""
        yield f"| {names} | {default} | {meaning} |"
    yield ""
