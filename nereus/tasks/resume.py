"""Which checkpoint a run continues from, and how its model-stages are filled from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nereus.config import CampaignConfig
from nereus.emu.checkpoint.commit import abandon
from nereus.emu.checkpoint.folder import latest
from nereus.emu.checkpoint.source import Checkpoint, open_checkpoint
from nereus.emu.stage import FromCheckpoint, FromFolder, StageSpec
from nereus.errors import CheckpointError, explain
from nereus.tasks.prepare import Prepared
from nereus.tasks.stages import CRITIC, TRAINING

MODEL_OF_STAGE = {TRAINING: "actor", CRITIC: "critic"}
"""The model-stages whose state a checkpoint holds, and under which name."""


def checkpoints_folder(config: CampaignConfig) -> Path:
    """Where a run keeps its checkpoints."""
    return config.run_folder / "checkpoints"


def newest_checkpoint(config: CampaignConfig) -> Checkpoint | None:
    """The newest checkpoint of the run, verified; None without one. Raises CheckpointError when it is
    damaged.
    """
    path = latest(checkpoints_folder(config), checksums=False)
    return None if path is None else open_checkpoint(path)


def checkpoint_in_folder(config: CampaignConfig, *, resume: bool) -> Checkpoint | None:
    """The newest checkpoint of the run's folder, None for a fresh run. Reads no prompts and no models.

    Raises CheckpointError when there is none to resume, when it is damaged, or when a fresh run finds one in
    its way.
    """
    root = checkpoints_folder(config)
    checkpoint = newest_checkpoint(config)
    if checkpoint is None:
        if resume:
            raise CheckpointError(
                explain(
                    "cannot resume",
                    values=f"{root} holds no checkpoint",
                    rule="a run saves one every checkpoint.every_steps steps",
                    remedy="run without --resume, or name the run's folder with output= and name=",
                )
            )
        return None
    if not resume:
        raise CheckpointError(
            explain(
                "cannot start a new run here",
                values=f"{checkpoint.path} is a checkpoint of an earlier run",
                rule="a run never overwrites another's state",
                remedy="continue it with --resume, choose another name=, or delete the folder",
            )
        )
    return checkpoint


def find_checkpoint(prepared: Prepared, *, resume: bool) -> Checkpoint | None:
    """The checkpoint to continue from, None for a fresh run; what crashed writers left is deleted.

    Raises CheckpointError as `checkpoint_in_folder` does, and when it is of another campaign or model.
    """
    checkpoint = checkpoint_in_folder(prepared.config, resume=resume)
    if checkpoint is None:
        return None
    abandon(checkpoints_folder(prepared.config))
    # A checkpoint that was converted from another format has no digest: it has read no data yet.
    if (found := checkpoint.control.config_digest) and found != prepared.digest:
        raise CheckpointError(
            explain(
                f"cannot resume from {checkpoint.path}",
                values=f"its data has digest {found[:12]}, the config's {prepared.digest[:12]}",
                rule="a position in the data means something only for the same prompts, order and seed",
                remedy="restore these settings, or start a new run from its final model",
            )
        )
    for spec in prepared.stages_at(checkpoint.control.step).values():
        if (model := MODEL_OF_STAGE.get(spec.name)) in checkpoint.models:
            checkpoint.source(str(model)).check(spec.trained)
    return checkpoint


def with_origin(spec: StageSpec, checkpoint: Checkpoint | None) -> StageSpec:
    """The stage filled from the checkpoint if that holds its model, else from where it was."""
    model = MODEL_OF_STAGE.get(spec.name)
    if checkpoint is None or model is None or model not in checkpoint.models:
        return spec
    steps = checkpoint.control.optimizers[model].adam_steps
    base = spec.origin if isinstance(spec.origin, FromFolder) else None
    return replace(spec, origin=FromCheckpoint(folder=checkpoint.path / model, step_count=steps, base=base))
