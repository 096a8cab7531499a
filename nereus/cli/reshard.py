"""`nereus reshard`: a stored model, cut for another layout, without a GPU or a process group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from nereus.errors import ConfigError, explain

if TYPE_CHECKING:  # loads torch, so only once the work begins
    from nereus.emu.checkpoint.control import Control
    from nereus.emu.checkpoint.convert import Conversion
    from nereus.emu.checkpoint.formats import Opened
    from nereus.emu.layout import Layout
    from nereus.emu.tensor import ModelSpec

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        help="A Hugging Face folder, a torch or Megatron-core distributed checkpoint, or one of ours.",
        show_default=False,
    ),
]
Target = Annotated[
    Path,
    typer.Argument(metavar="DST", help="Where step-NNNNNN is written, in our format.", show_default=False),
]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="tp=N,pp=N,ep=N",
        help="The layout to cut for; layers=10+12 splits the layers unevenly, ep=N divides experts.",
        show_default=False,
    ),
]
ModelFolder = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="A folder with the model's config.json; a Hugging Face source has its own.",
        show_default=False,
    ),
]
Name = Annotated[
    str, typer.Option("--as", help="Name of the model in the checkpoint (and in a source of ours).")
]
HeadName = Annotated[
    Literal["lm", "value"], typer.Option("--head", help="value for a critic or a reward model.")
]
Dtype = Annotated[
    Literal["bf16", "fp16", "fp32"] | None,
    typer.Option("--dtype", help="Cast the weights; other state keeps its dtype.", show_default=False),
]
AdamSteps = Annotated[
    int | None,
    typer.Option(
        "--adam-steps",
        min=0,
        help="Optimizer steps that the moments have seen, where the source does not say.",
        show_default=False,
    ),
]
WeightsOnly = Annotated[bool, typer.Option("--weights-only", help="Leave the optimizer's state out.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be written, and write nothing.")]


def reshard(
    source: Source,
    target: Target,
    to: To,
    model: ModelFolder = None,
    name: Name = "actor",
    head: HeadName = "lm",
    dtype: Dtype = None,
    adam_steps: AdamSteps = None,
    weights_only: WeightsOnly = False,
    dry_run: DryRun = False,
) -> None:
    """Cut a stored model, and its optimizer where it is there, for a tensor- and pipeline-parallel layout.

    Reads any of four formats box by box and writes a checkpoint of ours with one file a rank, so memory stays
    at one tensor whatever the model's size. Any layout resumes from the result.
    """
    console = Console()
    with console.status("reading indexes"):
        from nereus.emu.checkpoint.convert import Conversion
        from nereus.emu.checkpoint.formats import control_for, open_folder
        from nereus.emu.decoder import DecoderConfig

        config = DecoderConfig.from_folder(model) if model is not None else None
        opened = open_folder(source, config=config, model=name, head=head, weights_only=weights_only)
        layout = read_layout(to, opened.spec)
        conversion = Conversion.of(
            opened.source, opened.spec, layout, model=name, theta=dtype, weights_only=weights_only
        )
        control = control_for(opened, conversion, adam_steps)
    show_plan(console, opened, conversion, target)
    if not dry_run:
        write(console, opened, conversion, target, control)


def read_layout(text: str, spec: ModelSpec) -> Layout:
    """The layout of `tp=2,pp=2,layers=10+12` on ranks 0, 1, ...

    Raises ConfigError for other text, InvalidLayout where the model cannot be cut so.
    """
    from nereus.emu.layout import Layout

    values: dict[str, str] = {}
    for word in text.split(","):
        key, _, value = word.strip().partition("=")
        if key not in ("tp", "pp", "ep", "layers") or key in values or not value.replace("+", "").isdigit():
            raise ConfigError(
                explain(
                    f"cannot read the layout {text!r}",
                    values=f"at {word.strip()!r}",
                    rule="it is tp=N,pp=N,ep=N and, for an uneven split, layers=N+N+...",
                    remedy="write for example --to tp=2,pp=2",
                )
            )
        values[key] = value
    layers = tuple(int(part) for part in values["layers"].split("+")) if "layers" in values else None
    tp, pp = int(values.get("tp", 1)), int(values.get("pp", len(layers) if layers else 1))
    ep = int(values.get("ep", 1))
    return Layout.make(spec, tp=tp, pp=pp, ep=ep, ranks=tuple(range(tp * pp * ep)), layers=layers)


def show_plan(console: Console, opened: Opened, conversion: Conversion, target: Path) -> None:
    """What is read, and what every rank's file will hold."""
    layout = conversion.layout
    kinds = ", ".join(f"{kind} {str(d).removeprefix('torch.')}" for kind, d in conversion.dtypes.items())
    console.print(f"from [bold]{opened.folder}[/bold] ({opened.format})")
    console.print(f"     {opened.spec.num_elements:,} weights in {len(opened.spec.tensors)} tensors: {kinds}")
    console.print(f"to   [bold]{target}[/bold] {layout.sizes_text}, {_size(conversion.total_bytes)}")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("file", "pp", "tp", "layers", "boxes", "size"):
        table.add_column(heading, justify="left" if heading in ("file", "layers") else "right")
    for place, rank in enumerate(layout.ranks):
        position = conversion.position(rank)
        lo, hi = layout.split[position.pp]
        boxes = len(conversion.owned[rank]) * len(conversion.dtypes)
        table.add_row(
            f"part-{place:05d}",
            str(position.pp),
            str(position.tp),
            f"{lo}-{hi - 1}",
            str(boxes),
            _size(conversion.num_bytes(rank)),
        )
    console.print(table)


def write(console: Console, opened: Opened, conversion: Conversion, target: Path, control: Control) -> None:
    """Convert under a progress bar, and say where the result is."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from nereus.emu.checkpoint.convert import convert

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("writing", total=conversion.total_bytes)
        path = convert(
            opened.source,
            conversion,
            target,
            control,
            on_bytes=lambda size: progress.update(task, advance=size),
        )
    console.print(f"[green]ok[/green]: {path}", soft_wrap=True)


def _size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"
