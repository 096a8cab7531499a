"""The time to generate responses: prefill, then decoding integrated over the survival of their lengths."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nereus.planner.candidates import distinct
from nereus.planner.decode_time import DecodeTable, decode_table, hop_s, prefill_layer_s
from nereus.planner.layer_time import Place
from nereus.planner.lengths import LengthNodes
from nereus.planner.workload import Workload

Floats = NDArray[np.float64]

PREFILL_TOKENS = 8192  # tokens an engine takes into one prefill step


def generation_terms(
    place: Place, workload: Workload, tp: Floats, pp: Floats, dp: Floats, ep: Floats | float = 1.0
) -> dict[str, Floats]:
    """Seconds by term for candidates of shape [n].

    Only (tp, pp, ep, sequences of a unit) decide, so equal ones are priced once.
    """
    ep = np.broadcast_to(ep, tp.shape)
    (tp, pp, ep, per_unit), back = distinct(tp, pp, ep, np.ceil(workload.num_generated / dp))
    limit = np.inf if workload.most_resident is None else float(workload.most_resident)
    resident = np.minimum(per_unit, limit)
    decode = _decode(place, workload, tp, pp, ep, per_unit, resident)
    terms = {
        "prefill": _prefill(place, workload, tp, pp, ep, per_unit) * place.calibration.prefill,
        **{name: term * place.calibration.decode for name, term in decode.items() if name != "host"},
        "host": decode["host"],
    }
    return {name: term[back] for name, term in terms.items()}


def _decode(
    place: Place,
    workload: Workload,
    tp: Floats,
    pp: Floats,
    ep: Floats,
    per_unit: Floats,
    resident: Floats,
) -> dict[str, Floats]:
    """Seconds of all decode steps.

    While more sequences wait than are held, the batch stays full. Then it drains: `sum over cells of width *
    P(any alive) * step(E[alive | any], context)`. A drain that starts with fresh sequences follows the
    survival curve S; one that ends a continuously filled batch follows the residual survival. The share
    `queued` blends the two; it is 0 when all fit at once.
    """
    response, prompt = workload.response, workload.prompt_tokens
    nodes = response.nodes()
    age = response.mean_square / (2 * response.mean)  # mean age of a response met at a random moment
    queued = np.minimum(1.0, (per_unit - resident) / resident)
    everywhere = resident * workload.num_generated / per_unit  # sequences held at once in all units
    steps, alive = _drain(nodes, queued, resident, everywhere)
    steps = np.concatenate((steps, ((per_unit - resident) * response.mean / resident)[None, :]))
    alive = np.concatenate((alive, resident[None, :]))
    # One context for every row of `steps`, with and without the age that a queued batch starts from.
    fresh = prompt + np.concatenate((nodes.positions, [age]))
    aged = prompt + np.concatenate((nodes.positions, [0.0])) + age
    (sizes, experts), row = distinct(tp, ep)
    table = decode_table(place, sizes, float(resident.max()), np.concatenate((fresh, aged)), experts)
    return _add_steps(place, table, row, tp * ep, pp, steps, alive, queued)


def _drain(nodes: LengthNodes, queued: Floats, resident: Floats, everywhere: Floats) -> tuple[Floats, Floats]:
    """(expected steps, expected sequences alive in a unit that has any), both [cell, n].

    The stage ends with the last of all units, so a step counts while any sequence of the job is alive.
    """
    fresh, residual = nodes.survival[:, None], nodes.residual[:, None]
    survival = (1 - queued) * fresh + queued * np.minimum(residual, 1.0)
    dead = np.log1p(-np.minimum(survival, 1 - 1e-12))
    here, anywhere = -np.expm1(resident * dead), -np.expm1(everywhere * dead)  # 1 - (1 - S)^n
    return nodes.widths[:, None] * anywhere, np.maximum(resident * survival / np.maximum(here, 1e-12), 1.0)


def _add_steps(
    place: Place,
    table: DecodeTable,
    row: NDArray[np.intp],
    tp: Floats,
    pp: Floats,
    steps: Floats,
    alive: Floats,
    queued: Floats,
) -> dict[str, Floats]:
    """Sum `steps` [cell, n] of batches `alive` [cell, n]: pp groups pass through the stages, each stage
    once a group.
    """
    group = np.maximum(alive / pp, 1.0)
    low, share = table.at(group)
    cells = np.arange(len(steps))[:, None]

    def over(part: Floats) -> Floats:
        return np.asarray((steps * (part[row, low] * (1 - share) + part[row, low + 1] * share)).sum(0))

    def attention(first: int) -> Floats:
        part = table.attention
        low_s, high_s = part[first + cells, row, low], part[first + cells, row, low + 1]
        return np.asarray(low_s * (1 - share) + high_s * share)

    # A token of every sequence takes pp groups through 1/pp of the layers: all layers at a group's size.
    seconds = (
        attention(0) if not queued.any() else (1 - queued) * attention(0) + queued * attention(len(steps))
    )
    return {
        "weights": over(table.layer),
        "tensor_parallel": over(table.tensor_parallel),
        "expert_parallel": over(table.expert_parallel),
        "attention": np.asarray((steps * seconds).sum(0)),
        "head": over(table.head),
        "pipeline": np.asarray((steps * pp * hop_s(place, tp, pp, group)).sum(0)),
        "host": steps.sum(0) * place.calibration.decode_step_s,
    }


def _prefill(
    place: Place, workload: Workload, tp: Floats, pp: Floats, ep: Floats, per_unit: Floats
) -> Floats:
    """Prompts in chunks of at most 8,192 tokens, pipelined over the stages."""
    prompt = workload.prompt_tokens
    tokens = per_unit * prompt
    (size, experts, chunk), back = distinct(tp, ep, np.minimum(tokens, max(PREFILL_TOKENS, prompt)))
    layer = prefill_layer_s(place, chunk / prompt, prompt, size, experts)[back]
    chunk = chunk[back]
    stage = np.ceil(place.shape.num_layers / pp) * layer + hop_s(place, tp * ep, pp, chunk)
    return np.asarray((np.ceil(tokens / chunk) + pp - 1) * stage)
