"""Saving the campaign's whole state, and the final model in Hugging Face form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from nereus.emu.adapter_weights import Merged
from nereus.emu.checkpoint.commit import begin, commit
from nereus.emu.checkpoint.part import Part
from nereus.emu.checkpoint.source import CheckpointSource
from nereus.emu.cluster import Call
from nereus.emu.hf_folder import HFSource, write_hf_folder
from nereus.emu.peft_folder import write_peft_folder
from nereus.emu.source import LogicalSource
from nereus.emu.tensor import ModelSpec
from nereus.tasks.control import control_record
from nereus.tasks.job import Job
from nereus.tasks.resume import MODEL_OF_STAGE
from nereus.tasks.stages import TRAINING


@task(name="save checkpoint", cache_policy=NO_CACHE)
def save_checkpoint(job: Job) -> Path:
    """Write weights, moments and the control record of the current state; returns the checkpoint's folder.

    Each model is written by the ranks of its first unit, side by side; where units share an optimizer each
    writes its slice of it. The folder counts only once it is complete.
    """
    with job.stage("checkpoint"):
        folder = begin(job.checkpoints, job.state.step)
        parts: list[Part] = []
        steps: dict[str, int] = {}
        specs: dict[str, ModelSpec] = {}
        for stage, model in MODEL_OF_STAGE.items():
            if stage not in job.stages:
                continue
            ranks = job.stages[stage].writers
            calls = dict.fromkeys(ranks, Call("write_checkpoint", (stage, model, folder)))
            written = job.cluster.run(calls, what="checkpoint")
            parts += [part for part, _ in written.values()]
            steps[stage] = written[ranks[0]][1]
            specs[model] = job.stages[stage].trained
        control = replace(control_record(job, steps), prompt_lengths=job.lengths.means)
        job.checkpoint = commit(folder, specs, parts, control, keep_last=job.config.checkpoint.keep_last)
    return job.checkpoint


@task(name="export model", cache_policy=NO_CACHE)
def export_model(job: Job) -> Path:
    """Write the actor of the newest checkpoint as a Hugging Face folder with the tokenizer beside it.

    Where adapters were trained they are added to its weights; in `adapter` they lie alone, in PEFT's form.
    """
    assert job.checkpoint is not None, "a model is exported from a checkpoint"
    models, spec = job.config.models, job.stages[TRAINING]
    target = job.config.run_folder / "model"
    source: LogicalSource = CheckpointSource(job.checkpoint / MODEL_OF_STAGE[spec.name])
    if (lora := spec.model.lora) is not None:
        write_peft_folder(
            source,
            spec.tensors,
            lora,
            job.config.run_folder / "adapter",
            base=models.actor,
            dtype=spec.model.dtype,
        )
        source = Merged(HFSource(models.actor), source, lora)
    write_hf_folder(source, spec.model.with_lora(None), target, origin=Path(models.tokenizer or models.actor))
    return target
