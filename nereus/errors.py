"""The error tree: one base, one class for each thing a caller may handle.

Every message says what was attempted, the values, the rule, and the remedy where we know it.
`explain` composes the four parts so that they read alike everywhere.
"""

from __future__ import annotations


def explain(attempt: str, *, values: str = "", rule: str = "", remedy: str = "") -> str:
    """Compose an error message: `attempt: values; rule. Remedy: remedy`."""
    text = attempt
    if values:
        text += f": {values}"
    if rule:
        text += f"; {rule}"
    if remedy:
        text += f". Remedy: {remedy}"
    return text


class NereusError(Exception):
    """Base of every error that Nereus raises on purpose."""


class ConfigError(NereusError):
    """The campaign's configuration is wrong; nothing was started."""


class DataError(NereusError):
    """A prompt file, tokenizer or reward definition cannot be used."""


class CheckpointError(NereusError):
    """A checkpoint is absent, incomplete, or does not fit the model."""


class ModelError(NereusError):
    """A model folder cannot be loaded: unknown architecture, missing or misshapen tensor."""


class InvalidLayout(NereusError):
    """A layout does not fit the model (heads, layers) or its ranks."""


class InvalidOperation(NereusError):
    """A Split, Merge, Extend or Destroy is not allowed in this cluster state."""


class NoSource(NereusError):
    """No live rank holds a needed part of a tensor, so the state cannot be moved from memory."""


class TransportError(NereusError):
    """A peer did not answer in time or its connection failed during an exchange."""


class TransitionAborted(NereusError):
    """A transition did not commit; the old layout still holds."""


class WorkerLost(NereusError):
    """A worker process died or its node went away."""


class StateLost(NereusError):
    """A transition that was decided broke off: workers that live have lost the state of some model-stages."""


class StageFailed(NereusError):
    """A stage of a step raised inside a worker."""


class Cancelled(NereusError):
    """The campaign was asked to stop; its last checkpoint is intact."""


class Infeasible(NereusError):
    """No plan fits the cluster; the message names the smallest change that would."""
