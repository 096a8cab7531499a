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
    For scoring and training: `inference` and `training` are factors on whole stages; `score_compute` and
    `train_compute` on what these stages compute and exchange inside a node, `train_network` on what both send
    between nodes, none of which says anything of generation; `layer_s` is host seconds to launch one layer's
    forward pass over one micro-batch in training (eager engines are bound by it on small models; a backward
    pass launches twice as much), `score_layer_s` the same in scoring; `hop_s` is seconds that handing a
    micro-batch to the next pipeline stage takes beyond the wire. `correction` in [0, 1] weighs the tables'
    shape-by-shape residuals: 1 for the library that was measured, 0 keeps the constants only, which carry
    over to other libraries and labs better.
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
    train_compute: float = 1.0
    train_network: float = 1.0
    score_compute: float = 1.0
    layer_s: float = 0.0
    score_layer_s: float = 0.0
    hop_s: float = 0.0
    correction: float = 1.0

    def with_compute(self, gain: float) -> Calibration:
        """The same with one factor on everything that runs on the GPU or inside its node."""
        return replace(self, **dict.fromkeys(COMPUTE, gain))

    @property
    def in_training(self) -> Calibration:
        """What prices a training stage: its own factors laid on those of the classes."""
        return self._inside(self.train_compute, self.layer_s)

    @property
    def in_scoring(self) -> Calibration:
        """What prices a stage of forward passes."""
        return self._inside(self.score_compute, self.score_layer_s)

    @property
    def scores_while_training(self) -> Calibration:
        """What prices forward passes that the training engine makes inside its own stage."""
        return replace(self, score_compute=self.train_compute, score_layer_s=self.layer_s)

    def _inside(self, compute: float, layer_s: float) -> Calibration:
        gains = {name: getattr(self, name) * compute for name in COMPUTE}
        return replace(self, **gains, scale_out=self.scale_out * self.train_network, layer_s=layer_s)


COMPUTE = ("gemm", "context_attention", "decode_attention", "elementwise", "optimizer", "scale_up")
"""Classes that run on the GPU or inside its node."""
NEUTRAL = Calibration()
