"""Mixtures of experts as the cost model sees them: an equivalent dense decoder for time, all experts for
memory.

This serves to check the model against published runs of mixtures, whose trainers cut them otherwise than
units do (experts across units, shared experts, latent attention). What the search prices is in `layer_time`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nereus.emu.decoder import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """A decoder whose feed-forward part is `num_experts` experts of width `expert_width`.

    `active` is the dense decoder that one token sees: its width is that of the experts a token visits, shared
    ones included. The first `num_dense_layers` layers have no experts.
    """

    active: DecoderConfig
    num_experts: int
    experts_per_token: int
    expert_width: int
    num_dense_layers: int = 0

    @property
    def expert_parameters(self) -> float:
        """Weights of one expert of one layer."""
        return 3.0 * self.active.hidden_size * self.expert_width

    def hidden_parameters(self, ep: int) -> float:
        """Weights of one layer's experts on a rank of `ep`, beyond those that `active` counts."""
        return self.expert_parameters * (self.num_experts / ep - self.experts_per_token)

    def touched_parameters(self, tokens: float) -> float:
        """Weights of one layer that `tokens` tokens read: E (1 - (1 - k/E)^n) experts, tokens choosing
        evenly.
        """
        share = 1.0 - float((1.0 - self.experts_per_token / self.num_experts) ** tokens)
        return self.expert_parameters * self.num_experts * share


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """A Megatron-style training layout: experts over `ep` ranks of tp * dp, optimizer state cut over dp
    (ZeRO-1).

    `offloaded` is the share of the optimizer state that lives in host memory; `layers` the layers of every
    stage.
    """

    tp: int
    pp: int
    dp: int
    ep: int
    offloaded: float
    layers: tuple[int, ...]


def training_peak_bytes(
    shape: ExpertShape, layout: ExpertLayout, *, micro_batch_tokens: int, fixed_bytes: float = 3.5e9
) -> float:
    """Peak bytes on the fullest rank: weights 2, gradients 4, optimizer 12 cut and offloaded, full recompute.

    Hidden-sized tensors are cut by tp (sequence parallelism); fp32 logits of the micro-batch live three
    times.
    """
    return fixed_bytes + max(
        _stage_bytes(shape, layout, index, micro_batch_tokens) for index in range(layout.pp)
    )


def _stage_bytes(shape: ExpertShape, layout: ExpertLayout, index: int, tokens: int) -> float:
    active, layers = shape.active, layout.layers[index]
    h, d = active.hidden_size, active.head_dim
    attention = h * d * 2 * (active.num_heads + active.num_kv_heads)
    shared = 3 * h * (active.intermediate_size - shape.experts_per_token * shape.expert_width)
    vocabulary = active.vocab_size * h / layout.tp
    ends = (index == 0) + (index == layout.pp - 1)
    dense = layers * (attention + shared) / layout.tp + ends * vocabulary
    experts = layers * shape.expert_parameters * shape.num_experts / layout.ep
    copies = max(layout.tp * layout.dp / layout.ep, 1.0)  # ranks that share the same experts
    state = 6 * (dense + experts)
    state += 12 * (1 - layout.offloaded) * (dense / layout.dp + experts / copies)
    in_flight = layout.pp - index
    kept = 2 * tokens * h * layers * in_flight / layout.tp
    visited = shape.experts_per_token * shape.expert_width
    live = 2 * tokens * (4 * h + 2 * d * (active.num_heads + active.num_kv_heads) + 4 * visited) / layout.tp
    logits = 3 * 4 * tokens * active.vocab_size / layout.tp if index == layout.pp - 1 else 0.0
    return state + kept + live + logits


def even_split(layers: int, pp: int, last: int | None) -> tuple[int, ...]:
    """Layers of every stage: `last` on the last one, the rest spread evenly over the others, remainder
    first.
    """
    if last is None or pp == 1:
        base, extra = divmod(layers, pp)
        return tuple(base + (index < extra) for index in range(pp))
    return (*even_split(layers - last, pp - 1, None), last)


def _mixture(
    *,
    hidden: int,
    layers: int,
    heads: Sequence[int],
    vocab: int,
    experts: Sequence[int],
    shared_width: int = 0,
    dense_layers: int = 0,
) -> ExpertShape:
    number, visited, width = experts
    return ExpertShape(
        active=DecoderConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=128,
            intermediate_size=visited * width + shared_width,
        ),
        num_experts=number,
        experts_per_token=visited,
        expert_width=width,
        num_dense_layers=dense_layers,
    )


MIXTURES = {
    "Qwen3-30B-A3B": _mixture(hidden=2048, layers=48, heads=(32, 4), vocab=151936, experts=(128, 8, 768)),
    "Qwen3-235B-A22B": _mixture(hidden=4096, layers=94, heads=(64, 4), vocab=151936, experts=(128, 8, 1536)),
    # Latent attention has no such heads: 100 + 2 heads of 128 have its weights and its cache bytes.
    "DeepSeek-V3": _mixture(
        hidden=7168,
        layers=61,
        heads=(100, 2),
        vocab=129280,
        experts=(256, 8, 2048),
        shared_width=2048,
        dense_layers=3,
    ),
}
