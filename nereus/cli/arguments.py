"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CampaignFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="The campaign's YAML file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Values laid over the file's, e.g. batch.prompts=4; typed as in YAML. "
        "`nereus config keys` lists the keys.",
        show_default=False,
    ),
]
