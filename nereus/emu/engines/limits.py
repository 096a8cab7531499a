"""What an engine cannot cut a model into, though a layout could. Pure: configurations are checked with it."""

from __future__ import annotations

from nereus.emu.decoder import DecoderConfig
from nereus.emu.layout import Layout
from nereus.errors import InvalidLayout, explain


def check_layout(engine: str, config: DecoderConfig, layout: Layout) -> None:
    """Raise InvalidLayout unless the engine can train the model under this layout."""
    problem: Problem | None = None
    if engine == "megatron":
        problem = _megatron(config, layout.tp)
    elif engine == "deepspeed":
        problem = _deepspeed(config, layout)
    if problem is not None:
        values, rule, remedy = problem
        raise InvalidLayout(
            explain(f"cannot cut the model for {engine}", values=values, rule=rule, remedy=remedy)
        )


Problem = tuple[str, str, str]  # the values, the rule and the remedy of what does not fit


def _uneven(engine: str, config: DecoderConfig, tp: int) -> Problem | None:
    for what, size in (("kv heads", config.num_kv_heads), ("feed-forward columns", config.intermediate_size)):
        if size % tp:
            return (
                f"tp={tp}, {size} {what}",
                f"{engine} gives every rank equally many whole {what}",
                f"choose a tp that divides {size}, or engines.training=torch",
            )
    return None


def _deepspeed(config: DecoderConfig, layout: Layout) -> Problem | None:
    if layout.pp > 1:
        return (
            f"pp={layout.pp}",
            "DeepSpeed's pipeline needs a PipelineModule, which a Hugging Face decoder is not",
            "choose pp=1 with a larger tp, or engines.training=torch or megatron",
        )
    return _uneven("deepspeed", config, layout.tp)


def _megatron(config: DecoderConfig, tp: int) -> Problem | None:
    if problem := _uneven("megatron", config, tp):
        return problem
    if config.attention_out_bias:
        return (
            "attention_bias=true",
            "megatron adds a bias to the output of attention only together with those of the MLP",
            "choose engines.training=torch for this model",
        )
    return None
