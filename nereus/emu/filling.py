"""How a shard gets its numbers where no transition left them: from a model folder, a checkpoint, or both."""

from __future__ import annotations

from nereus.emu.adapter_weights import Adapted, FreshAdapters, parts_of
from nereus.emu.arena import ShardState
from nereus.emu.checkpoint.source import CheckpointSource, kinds_to_fill
from nereus.emu.engines.protocol import TrainEngine
from nereus.emu.hf_folder import HFSource
from nereus.emu.peft_folder import PeftSource
from nereus.emu.source import LogicalSource, fill
from nereus.emu.stage import FromCheckpoint, FromFolder, FromMemory, StageSpec


def fill_engine(engine: TrainEngine, spec: StageSpec) -> None:
    """Fill a new engine's shard from the model-stage's origin, and set the count of steps that it has taken.

    What a transition left in memory is there already. Raises ModelError or CheckpointError for what is not.
    """
    match spec.origin:
        case FromFolder() as folder:
            fill_from_folder(engine.state, spec, folder)
        case FromCheckpoint(step_count=step_count) as checkpoint:
            fill_from_checkpoint(engine.state, spec, checkpoint)
            engine.step_count = step_count
        case FromMemory(step_count=step_count):
            engine.step_count = step_count


def fill_from_folder(state: ShardState, spec: StageSpec, origin: FromFolder) -> None:
    """Weights from a model folder, and their master copies; adapters from their own folder, or drawn.

    Raises ModelError when a folder does not hold what the model needs.
    """
    source: LogicalSource = HFSource(origin.folder, head=spec.model.head, value_head_seed=origin.seed)
    if (lora := spec.model.lora) is not None:
        given = origin.adapter
        adapters: LogicalSource = FreshAdapters(spec.tensors, origin.seed)
        if given is not None:
            adapters = PeftSource(given, spec.tensors, lora)
        source = Adapted(source, adapters)
    fill(state, source, {kind: "theta" for kind in state.arenas if kind in ("theta", "master")})


def fill_from_checkpoint(state: ShardState, spec: StageSpec, origin: FromCheckpoint) -> None:
    """All kinds of what is trained from a checkpoint, and what is frozen from the folder it was in at first.

    Raises CheckpointError when the checkpoint lacks a kind or a tensor.
    """
    stored = CheckpointSource(origin.folder)
    trained = state
    if spec.model.lora is not None:
        assert origin.base is not None, "a checkpoint holds adapters alone; the model is where it was"
        frozen, trained = parts_of(state)
        fill_from_folder(frozen, spec, origin.base)
    fill(trained, stored, kinds_to_fill(state.arenas, stored))
