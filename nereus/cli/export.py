"""`nereus export`: a stored model, written as another trainer loads it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nereus.cli.reshard import HeadName, ModelFolder, Name, Source, WeightsOnly
from nereus.errors import ConfigError, explain


class Reader(StrEnum):
    """Who is to load it."""

    transformers = "transformers"
    verl = "verl"
    openrlhf = "openrlhf"


def export(
    source: Source,
    target: Annotated[
        Path, typer.Argument(metavar="DST", help="The folder to write into.", show_default=False)
    ],
    reader: Annotated[Reader, typer.Option("--for", help="Who is to load it.", show_default=False)],
    model: ModelFolder = None,
    name: Name = "actor",
    head: HeadName = "lm",
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="verl: GPUs of the job that resumes from it.", show_default=False),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=0, help="The step it counts as; that of the source where it has one."),
    ] = None,
    weights_only: WeightsOnly = False,
) -> None:
    """Write a stored model as transformers, verl or OpenRLHF load it.

    transformers gets a model folder. verl gets FSDP2 shards to resume from, with the optimizer's moments
    where they are there, and a model folder beside them. OpenRLHF gets a model folder in its own layout.
    """
    console = Console()
    if reader is Reader.verl and ranks is None:
        raise ConfigError(
            explain(
                "cannot write a checkpoint for verl",
                values="no number of GPUs",
                rule="verl reads one file for each of its ranks",
                remedy="give --ranks, trainer.nnodes * trainer.n_gpus_per_node of the job",
            )
        )
    with console.status(f"writing for {reader}"):
        from nereus.emu.checkpoint.formats import open_folder
        from nereus.emu.decoder import DecoderConfig
        from nereus.emu.hf_folder import write_hf_folder
        from nereus.integrations.checkpoints import write_openrlhf, write_verl

        given = DecoderConfig.from_folder(model) if model is not None else None
        opened = open_folder(source, config=given, model=name, head=head, weights_only=weights_only)
        at = step if step is not None else opened.control.step if opened.control is not None else 0
        if reader is Reader.transformers:
            write_hf_folder(opened.source, opened.config, target, origin=model or opened.folder)
            path = target
        elif reader is Reader.openrlhf:
            path = write_openrlhf(
                opened.source, opened.config, target, step=at, origin=model or opened.folder
            )
        else:
            assert ranks is not None, "it was asked for"
            path = write_verl(
                opened.source,
                opened.config,
                target,
                step=at,
                world_size=ranks,
                model=name,
                adam_steps=None if weights_only else opened.adam_steps,
                origin=model or opened.folder,
            )
    console.print(f"[green]ok[/green]: {path}", soft_wrap=True)
