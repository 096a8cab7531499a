"""The graph of a transition as a picture: a file in the run folder, and an artifact of the flow run."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from nereus.emu.transition_svg import svg
from nereus.emu.transition_text import explain
from nereus.tasks.job import Job
from nereus.tasks.planned_transition import Transition

FOLDER = "transitions"


def draw(job: Job, transition: Transition, epoch: int) -> str:
    """Write the picture and attach it to the current flow run; returns its path in the run folder.

    The artifact carries the picture as a data URI, which the UI renders; inline SVG it does not.
    """
    name = f"{FOLDER}/step-{job.state.step:06d}-epoch-{epoch:06d}.svg"
    picture = svg(transition.graph)
    path = Path(job.config.run_folder, name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(picture, encoding="utf-8")
    data = b64encode(picture.encode()).decode()
    create_markdown_artifact(
        f"![operations](data:image/svg+xml;base64,{data})\n\n```\n{explain(transition.schedule)}\n```\n",
        key="transition",
        description=f"{job.config.name}, before step {job.state.step}: {transition.text}",
    )
    return name
