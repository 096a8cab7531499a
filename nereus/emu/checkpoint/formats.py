"""A folder of any known format as a source: ours, Hugging Face, DCP, Megatron-core, FSDP shards, ZeRO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from nereus.emu.checkpoint.control import Control, OptimizerRecord
from nereus.emu.checkpoint.convert import Conversion
from nereus.emu.checkpoint.dcp_source import DcpSource
from nereus.emu.checkpoint.fsdp_source import FsdpSource
from nereus.emu.checkpoint.megatron_source import MegatronSource
from nereus.emu.checkpoint.resolve import Format, own_config, resolve
from nereus.emu.checkpoint.source import open_checkpoint
from nereus.emu.checkpoint.zero_source import ZeroSource
from nereus.emu.decoder import DecoderConfig, Head, decoder_spec
from nereus.emu.hf_folder import HFSource
from nereus.emu.source import LogicalSource
from nereus.emu.tensor import ModelSpec
from nereus.errors import CheckpointError, explain


class Saved(LogicalSource, Protocol):
    """A source that may hold an optimizer's state."""

    @property
    def unread(self) -> tuple[str, ...]:
        """What is stored of it and is no kind here."""
        ...

    def adam_steps(self) -> int | None:
        """Optimizer steps taken, where the checkpoint says so."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A folder as a source of one model. `control` and `adam_steps` are None where the format has none."""

    format: Format
    folder: Path
    config: DecoderConfig
    source: LogicalSource
    control: Control | None = None
    adam_steps: int | None = None

    @property
    def spec(self) -> ModelSpec:
        """The model's logical tensors."""
        return decoder_spec(self.config)


def open_folder(
    folder: Path | str,
    *,
    config: DecoderConfig | None = None,
    model: str = "actor",
    head: Head = "lm",
    value_head_seed: int | None = None,
    weights_only: bool = False,
) -> Opened:
    """Open a folder of any known format. Reads headers and indexes only.

    `config` describes the model; a Hugging Face folder and one of verl bring their own. `model` names one of
    the models in a checkpoint of ours, of verl or of OpenRLHF. With `weights_only` an optimizer state that
    cannot be read is passed over. The root of a run stands for its newest checkpoint.

    Raises CheckpointError for an unknown format, a missing config, or tensors that do not fit; ModelError for
    a Hugging Face folder that is none.
    """
    path, kind = resolve(Path(folder), model)
    if kind == "huggingface":
        source = HFSource(path, head=head, value_head_seed=value_head_seed)
        return Opened(format=kind, folder=path, config=source.config, source=source)
    if kind == "fsdp" and config is None:
        config = own_config(path)
    if config is None:
        raise CheckpointError(
            explain(
                f"cannot read {path}",
                values=f"format {kind}, no model given",
                rule="this format does not say how heads are grouped, so the model's config.json is needed",
                remedy="name the model's folder, which holds config.json",
            )
        )
    config = config.with_head(head)
    spec = decoder_spec(config)
    if kind == "nereus":
        checkpoint = open_checkpoint(path)
        stored = checkpoint.source(model)
        stored.check(spec)
        record = checkpoint.control.optimizers.get(model)
        steps = record.adam_steps if record else None
        return Opened(
            format=kind,
            folder=path,
            config=config,
            source=stored,
            control=checkpoint.control,
            adam_steps=steps,
        )
    saved: Saved
    match kind:
        case "megatron":
            saved = MegatronSource(path, config)
        case "fsdp":
            saved = FsdpSource(path, spec)
        case "zero":
            saved = ZeroSource(path, config)
        case "dcp":
            saved = DcpSource(path, spec)
    if saved.unread and not weights_only:
        raise CheckpointError(
            explain(
                f"cannot read the optimizer state in {path}",
                values=f"{len(saved.unread)} stored parts such as {saved.unread[0]}",
                rule="moments are read when every parameter has them in its own geometry",
                remedy="save them so (in Megatron without the distributed optimizer, in verl with "
                "strategy=fsdp2), or use --weights-only",
            )
        )
    return Opened(format=kind, folder=path, config=config, source=saved, adam_steps=saved.adam_steps())


def adam_steps_of(opened: Opened, given: int | None = None) -> int:
    """How many optimizer steps the moments have seen: `given`, or what the source says.

    Raises CheckpointError when nobody knows: Adam's bias correction would be wrong without a sign of it.
    """
    steps = opened.adam_steps if given is None else given
    if steps is None:
        raise CheckpointError(
            explain(
                f"cannot convert {opened.folder}",
                values="it holds Adam's moments and no step count",
                rule="the bias correction needs the number of optimizer steps",
                remedy="give it by --adam-steps",
            )
        )
    return steps


def control_for(opened: Opened, conversion: Conversion, adam_steps: int | None) -> Control:
    """The control record of a converted checkpoint: the source's own, or one at step 0.

    Raises CheckpointError when there are moments and nobody knows how many steps they have seen.
    """
    base = opened.control or Control(
        step=0, policy_version=0, epoch=0, position=0, seed=0, config_digest="", optimizers={}
    )
    if "exp_avg" not in conversion.dtypes:
        return replace(base, optimizers={})
    known = base.optimizers.get(conversion.model)
    record = OptimizerRecord(
        adam_steps=adam_steps_of(opened, adam_steps), learning_rate=known.learning_rate if known else 0.0
    )
    return replace(base, optimizers={conversion.model: record})
