"""What a worker asks of an engine: one shard of one unit of one model-stage.

An engine owns its state (`ShardState`) and the process groups it was given; it holds no global state, so
several engines of different layouts live in one process. `torch`, `vllm`, `megatron` and `deepspeed`
implement this and run one conformance suite; the torch engine is the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.arena import ShardState
from nereus.emu.batch import PromptBatch, Rollouts, Sampling, Scores, TokenBatch, TrainBatch, TrainMetrics
from nereus.emu.loss import Loss

TORN = -1


class ScoreEngine(Protocol):
    """Forward passes over given tokens."""

    @property
    def state(self) -> ShardState:
        """The shard's arenas; the transaction layer moves state from and into them."""
        ...

    def score(
        self,
        batch: TokenBatch,
        *,
        micro_batch_rows: int,
        micro_batch_tokens: int | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> Scores:
        """Log-probabilities (or values, for a value head) of the response tokens; rows in order.

        A forward pass is over `micro_batch_rows` rows, or over as many as have `micro_batch_tokens` tokens.
        Collective over the unit; every rank gets the same batch and every rank returns the full result.
        """
        ...

    def rewards(
        self, batch: TokenBatch, *, micro_batch_rows: int, micro_batch_tokens: int | None = None
    ) -> Tensor:
        """A reward model's judgement of each row, read at its last token; float32 [b]. Collective."""
        ...

    def close(self) -> None:
        """Free what the engine holds beside its state. Not collective: peers may be gone. The last call."""
        ...


class TrainEngine(ScoreEngine, Protocol):
    """Forward, backward and optimizer."""

    step_count: int
    """Adam's t, part of the logical state: whoever moves the moments sets it too. TORN after an update that
    did not end: the state is then neither that of before nor that of after."""

    def train_step(
        self,
        micro_batches: Sequence[TrainBatch],
        loss: Loss,
        counts: GlobalCounts,
        *,
        learning_rate: float,
        loss_scale: float = 1.0,
    ) -> TrainMetrics:
        """One optimizer step over this unit's rows; gradients are summed over micro-batches and over units.

        Collective over all units of the model-stage. Each unit brings the same number of micro-batches. The
        loss is multiplied by `loss_scale`, a power of two, for the backward pass alone. A gradient that is
        not finite changes no weights; with a scale above 1 the step then counts as not taken.
        """
        ...


@runtime_checkable
class AdapterEngine(Protocol):
    """A `TrainEngine` that trains adapters, and can do without them."""

    def score_frozen(
        self,
        batch: TokenBatch,
        *,
        micro_batch_rows: int,
        micro_batch_tokens: int | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> Scores:
        """As `score`, by the frozen weights alone. Collective over the unit."""
        ...


class GenerateEngine(Protocol):
    """Decoding with a KV cache."""

    @property
    def state(self) -> ShardState:
        """The shard's weights; a weight sync writes into them between calls."""
        ...

    def generate(self, prompts: PromptBatch, sampling: Sampling, version: int) -> Rollouts:
        """Answer every prompt; rows in order. Collective over the unit; every rank returns the full
        result.
        """
        ...

    def refresh(self) -> None:
        """Take the weights in `state` into use; called after every weight sync. Collective over the unit."""
        ...

    def close(self) -> None:
        """Free what the engine holds beside its state. Not collective: peers may be gone. The last call."""
        ...
