"""`nereus config`: the configuration's keys, its schema, and a whole configuration with every default."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
import yaml
from pydantic_core import PydanticUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nereus.cli.arguments import CampaignFile, Overrides
from nereus.config import CampaignConfig
from nereus.config.keys import KnownKey, known_keys, models_in
from nereus.config.load import load_campaign

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@app.command()
def schema() -> None:
    """Print the JSON schema of a campaign, for editors and forms."""
    typer.echo(json.dumps(CampaignConfig.model_json_schema(), indent=2))


@app.command()
def show(file: CampaignFile, overrides: Overrides = None) -> None:
    """Print a campaign as YAML with every default filled in and every path resolved."""
    config = load_campaign(file, overrides or ())
    typer.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), nl=False)


@app.command()
def keys(
    word: Annotated[
        str,
        typer.Argument(
            metavar="WORD", help="Only keys whose name or meaning holds this.", show_default=False
        ),
    ] = "",
) -> None:
    """List the keys of a campaign with default and meaning."""
    console = Console()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("key", "default", "meaning"):
        table.add_column(column, overflow="fold")
    for (dotted, default, meaning), kinds in key_rows().items():
        if word.lower() in f"{dotted} {meaning}".lower():
            name = Text(dotted) + Text(f" ({', '.join(kinds)})" if kinds else "", style="dim")
            table.add_row(name, Text(default), Text(meaning))
    if not table.row_count:
        console.print(f"no key holds {word!r}", markup=False)
        raise typer.Exit(1)
    console.print(table)


def key_rows() -> dict[tuple[str, str, str], list[str]]:
    """(key, default, meaning) of every key that holds a value, with the kinds that have it."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for key in known_keys():
        if not models_in(key.field.annotation) and key.path[-1] != "kind":
            row = (key.dotted, _default(key), " ".join((key.field.description or "").split()))
            rows.setdefault(row, []).extend([key.kind] if key.kind else [])
    return rows


def _default(key: KnownKey) -> str:
    value: Any = key.field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    return json.dumps(value, default=str)
