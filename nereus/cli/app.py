"""`nereus`: the command line's entry. Only the chosen command's module is imported, so help is instant."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated

import typer
from rich.markup import escape

from nereus import __version__
from nereus.cli.commands import COMMANDS, Command
from nereus.cli.failure import exit_code, show_failure
from nereus.config.environment import is_completing
from nereus.errors import NereusError

HELP = "Reinforcement-learning post-training of language models that changes its parallelism while it runs."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 ok, 1 failed, 2 bad input, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    app = build_app(chosen=next((word for word in given if not word.startswith("-")), None))
    try:
        app(given, prog_name="nereus")
    except NereusError as error:
        show_failure(error)
        sys.exit(exit_code(error))


def build_app(*, chosen: str | None) -> typer.Typer:
    """The app, in which `chosen` is real and the others are only named; all are real for completion."""
    app = typer.Typer(
        help=HELP,
        epilog=_examples(("nereus doctor", "nereus run examples/count/grpo.yaml", "nereus run --help")),
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    for command in COMMANDS:
        target = _load(command) if command.name == chosen or is_completing() else _named_only
        epilog = _examples(command.examples)
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=command.name, help=command.line, epilog=epilog)
        else:
            help_text = _paragraphs(target.__doc__ or "")
            app.command(command.name, help=help_text, short_help=command.line, epilog=epilog)(target)
    return app


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"nereus {__version__}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options before the command; the version is shown by its callback."""


def _load(command: Command) -> Callable[..., None] | typer.Typer:
    module, _, attribute = command.target.partition(":")
    target: Callable[..., None] | typer.Typer = vars(import_module(module))[attribute]
    return target


def _named_only() -> None:
    """Stands in the list of commands for one that was not chosen; it is never called."""
    raise AssertionError("a command that was not chosen was called")


def _paragraphs(docstring: str) -> str:
    """The text with line breaks between paragraphs only; the terminal's width decides the others."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in docstring.split("\n\n"))


def _examples(lines: Sequence[str]) -> str | None:
    if not lines:
        return None
    return "\n".join(["[bold]Examples[/bold]", *(f"  [dim]$[/dim] {escape(line)}" for line in lines)])
