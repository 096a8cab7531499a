"""What was learned about one machine, engine and model: factors on the cost model's terms, and host
seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors by which measured times exceed predicted ones; the defaults mean "trust the tables".

    Operation classes: `gemm`, `context_attention`, `decode_attention`, `elementwise`, `optimizer`. Link
    classes: `scale_up`, `scale_out`, `host`. Three scalars of one (system, engine, model) for generation:
    `decode` and `prefill` are factors on those phases, `decode_step_s` is host seconds of every decode step.
    For scoring and training: `inference` and `training` are factors on whole stages, `layer_s` is host
    seconds to launch one layer's forward pass over one micro-batch (eager engines are bound by it on small
    models; a backward pass launches twice as much), `hop_s` is seconds that handing a micro-batch to the next
    pipeline stage takes beyond the wire. `correction` in [0, 1] weighs the tables' shape-by-shape residuals:
    1 for the library that was measured, 0 keeps the constants only, which carry over to other libraries and
    labs better.
    """

    gemm: float = 1.0
    context_attention: float = 1.0
    decode_attention: float = 1.0
    elementwise: float = 1.0
    optimizer: float = 1.0
    scale_up: float = 1.0
    scale_out: float = 1.0
    host: float = 1.0
    decode: float = 1.0
    prefill: float = 1.0
    decode_step_s: float = 1e-3
    inference: float = 1.0
    training: float = 1.0
    layer_s: float = 0.0
    hop_s: float = 0.0
    correction: float = 1.0

    def with_compute(self, gain: float) -> Calibration:
        """The same with one factor on everything that runs on the GPU or inside its node."""
        return replace(
            self,
            gemm=gain,
            context_attention=gain,
            decode_attention=gain,
            elementwise=gain,
            optimizer=gain,
            scale_up=gain,
        )


NEUTRAL = Calibration()
