"""What was learned about one machine: gains by operation class and link class, three scalars a system."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors by which measured times exceed predicted ones; 1 everywhere means "trust the tables".

    `gemm` ... `optimizer` scale operation classes, `scale_up`, `scale_out`, `host` scale link classes,
    `decode`, `prefill` and `host_s` are the three scalars of one (system, engine, model): a factor on
    decode steps, one on prefill, and seconds of host work for every decode step. `inference` and
    `training` scale whole stages.
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
    host_s: float = 0.0
    inference: float = 1.0
    training: float = 1.0


NEUTRAL = Calibration()
