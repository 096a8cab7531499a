"""`nereus adopt`: a job of verl or OpenRLHF as a campaign file, with the fate of every setting."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nereus.errors import ConfigError, explain

if TYPE_CHECKING:
    from nereus.integrations.adoption import Adoption


class Trainer(StrEnum):
    """Whose job it is."""

    verl = "verl"
    openrlhf = "openrlhf"


def adopt(
    trainer: Annotated[Trainer, typer.Argument(help="Whose job it is.", show_default=False)],
    job: Annotated[
        list[str],
        typer.Argument(
            help="verl: a YAML file, key=value overrides. openrlhf: a shell script, or the command after --.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write.", show_default=False)
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Do not list settings that were mapped.")
    ] = False,
) -> None:
    """Turn a verl or OpenRLHF job into a campaign file, and say what became of every setting.

    Nothing is left out in silence: each setting is mapped, not needed here, not supported, or not known.
    What the job leaves open is asked for at the end; then check with nereus validate.
    """
    import yaml
    from rich.console import Console

    found = _read(trainer, job)
    text = yaml.safe_dump(found.tree, sort_keys=False, allow_unicode=True)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
    console = Console(stderr=True)
    _report(console, found, quiet=quiet)
    if output is not None:
        console.print(f"wrote {output}; next: nereus validate {output}", soft_wrap=True, highlight=False)


def _read(trainer: Trainer, job: list[str]) -> Adoption:
    if trainer is Trainer.verl:
        from nereus.integrations.verl import read_verl

        file = None if "=" in job[0] else Path(job[0])
        if file is not None and not file.is_file():
            raise _no_file(file)
        return read_verl(file, job if file is None else job[1:])
    from nereus.integrations.openrlhf import read_openrlhf, words_of

    if len(job) > 1:
        return read_openrlhf(job)
    if not Path(job[0]).is_file():
        raise _no_file(Path(job[0]))
    return read_openrlhf(words_of(Path(job[0])))


def _no_file(path: Path) -> ConfigError:
    return ConfigError(
        explain(
            f"cannot read the job {path}",
            values="no such file",
            rule="give a file, or the job's own words",
            remedy="nereus adopt verl data.train_files=... ; nereus adopt openrlhf -- --pretrain MODEL ...",
        )
    )


def _report(console: object, found: Adoption, *, quiet: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from nereus.integrations.adoption import Fate

    assert isinstance(console, Console)
    colours = {Fate.UNSUPPORTED: "red", Fate.UNKNOWN: "yellow", Fate.MAPPED: "green", Fate.NOT_NEEDED: "dim"}
    for fate in Fate:
        entries = found.of(fate)
        if not entries or (quiet and fate in (Fate.MAPPED, Fate.NOT_NEEDED)):
            continue
        table = Table(
            "setting", "value", "campaign", "", title=f"{fate} ({len(entries)})", title_justify="left"
        )
        for entry in entries:
            table.add_row(entry.key, str(entry.value), entry.target, entry.note, style=colours[fate])
        console.print(table)
    for line in found.missing:
        console.print(f"still open: {line}", style="bold", soft_wrap=True, markup=False)
    if found.checkpoints and Path(found.checkpoints).is_dir():
        run = f"{found.tree.get('output', 'runs')}/{found.tree.get('name', 'NAME')}"
        console.print(
            f"to go on from the job's newest checkpoint: nereus reshard {found.checkpoints} "
            f"{run}/checkpoints --to tp=1 --model MODEL; then nereus run FILE --resume",
            soft_wrap=True,
            markup=False,
        )
