"""What an engine cannot cut a model into, though a layout could. Pure: configurations are checked with it."""

from __future__ import annotations

from nereus.emu.decoder import DecoderConfig
from nereus.emu.layout import Layout
from nereus.errors import InvalidLayout, explain


def check_layout(engine: str, config: DecoderConfig, layout: Layout) -> None:
    """Raise InvalidLayout unless the engine can train the model under this layout."""
    if engine == "megatron" and (problem := _megatron(config, layout.tp)):
        values, rule, remedy = problem
        raise InvalidLayout(
            explain("cannot cut the model for megatron", values=values, rule=rule, remedy=remedy)
        )


def _megatron(config: DecoderConfig, tp: int) -> tuple[str, str, str] | None:
    """The values, the rule and the remedy of what does not fit; None when all fits."""
    for what, size in (("kv heads", config.num_kv_heads), ("feed-forward columns", config.intermediate_size)):
        if size % tp:
            return (
                f"tp={tp}, {size} {what}",
                f"megatron gives every rank equally many whole {what}",
                f"choose a tp that divides {size}, or engines.training=torch",
            )
    if config.attention_out_bias:
        return (
            "attention_bias=true",
            "megatron adds a bias to the output of attention only together with those of the MLP",
            "choose engines.training=torch for this model",
        )
    return None
