"""`nereus export`: a stored model, written as another trainer loads it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from pydantic import ValidationError
from rich.console import Console

from nereus.cli.reshard import AdamSteps, HeadName, ModelFolder, Name, Source, WeightsOnly
from nereus.config.training import OptimizerConfig
from nereus.errors import ConfigError, explain

if TYPE_CHECKING:  # loads torch, so only once the work begins
    from nereus.emu.checkpoint.formats import Opened
    from nereus.integrations.zero_files import ZeroCut


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
        typer.Option(
            min=1, help="verl, OpenRLHF: GPUs that train in the job that resumes from it.", show_default=False
        ),
    ] = None,
    zero_stage: Annotated[
        int, typer.Option(min=1, max=3, help="OpenRLHF: --zero_stage of the job that resumes from it.")
    ] = 2,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="OpenRLHF: a setting of the campaign's `optimizer` that is not its default; give it again "
            "for each.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=0, help="The step it counts as; that of the source where it has one."),
    ] = None,
    adam_steps: AdamSteps = None,
    weights_only: WeightsOnly = False,
) -> None:
    """Write a stored model as transformers, verl or OpenRLHF load it.

    transformers gets a model folder. verl gets FSDP2 shards to resume from, with the optimizer's moments
    where they are there, and a model folder beside them. OpenRLHF gets a model folder in its own layout, and
    where the moments are there DeepSpeed's files to resume from.
    """
    console = Console()
    settings = _settings(optimizer or ())
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
        from nereus.emu.checkpoint.formats import adam_steps_of, open_folder
        from nereus.emu.decoder import DecoderConfig
        from nereus.emu.hf_folder import write_hf_folder
        from nereus.integrations.checkpoints import write_openrlhf, write_verl

        given = DecoderConfig.from_folder(model) if model is not None else None
        opened = open_folder(source, config=given, model=name, head=head, weights_only=weights_only)
        with_moments = reader is not Reader.transformers and not weights_only
        with_moments = with_moments and "exp_avg" in opened.source.kinds()
        steps = adam_steps_of(opened, adam_steps) if with_moments else None
        at = step if step is not None else opened.control.step if opened.control is not None else 0
        if reader is Reader.transformers:
            write_hf_folder(opened.source, opened.config, target, origin=model or opened.folder)
            path = target
        elif reader is Reader.openrlhf:
            if steps is not None:
                cut = _cut(ranks, zero_stage)
                _for_openrlhf(opened, target, settings, name=name, step=at, cut=cut, steps=steps)
            path = write_openrlhf(
                opened.source, opened.config, target, step=at, origin=model or opened.folder
            )
            path = path if steps is None else target
        else:
            assert ranks is not None, "it was asked for"
            path = write_verl(
                opened.source,
                opened.config,
                target,
                step=at,
                world_size=ranks,
                model=name,
                adam_steps=steps,
                origin=model or opened.folder,
            )
    console.print(f"[green]ok[/green]: {path}", soft_wrap=True)


def _settings(words: Sequence[str]) -> OptimizerConfig:
    """AdamW's settings from `key=value` words. Raises ConfigError for others."""
    values: dict[str, Any] = dict(word.partition("=")[::2] for word in words)
    try:
        return OptimizerConfig.model_validate(values)
    except ValidationError as problem:
        raise ConfigError(
            explain(
                "cannot read --optimizer",
                values=" ".join(words),
                rule=problem.errors()[0]["msg"],
                remedy="name settings of the campaign's optimizer, such as --optimizer beta2=0.95",
            )
        ) from problem


def _cut(ranks: int | None, stage: int) -> ZeroCut:
    """How DeepSpeed's files are cut. Raises ConfigError without a number of ranks."""
    from nereus.integrations.zero_files import ZeroCut

    if ranks is None:
        raise ConfigError(
            explain(
                "cannot write a checkpoint for OpenRLHF",
                values="an optimizer's state, and no number of GPUs",
                rule="DeepSpeed reads one file of it for each of its ranks",
                remedy="give --ranks, the actor's nodes times its GPUs per node, or --weights-only",
            )
        )
    return ZeroCut(ranks=ranks, stage=cast(Literal[1, 2, 3], stage))


def _for_openrlhf(
    opened: Opened, target: Path, settings: OptimizerConfig, *, name: str, step: int, cut: ZeroCut, steps: int
) -> None:
    """Write DeepSpeed's files."""
    from nereus.emu.engines.torch.optimizer import AdamW
    from nereus.integrations.checkpoints import write_openrlhf_state

    control = opened.control
    record = control.optimizers.get(name) if control is not None else None
    write_openrlhf_state(
        opened.source,
        opened.config,
        target,
        step=step,
        cut=cut,
        adam_steps=steps,
        learning_rate=record.learning_rate if record else settings.learning_rate,
        settings=AdamW(
            betas=(settings.beta1, settings.beta2), eps=settings.eps, weight_decay=settings.weight_decay
        ),
        model=name,
        epoch=control.epoch if control is not None else 0,
        prompts=control.position if control is not None else 0,
    )
