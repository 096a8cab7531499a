"""Bytes of each stage on its fullest GPU, by term: the formulas behind `memory`.

Notation: b sequences of s tokens in a micro-batch, h hidden, d head size, f feed-forward width, V vocabulary,
t = tp, p = pp. Rows of a micro-batch are dealt over ep, tokens of each row divided over cp; in generation all
ranks along ep have all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.emu.decoder import DecoderConfig
from nereus.emu.serving import Serving, cache_bytes
from nereus.planner.candidates import distinct
from nereus.planner.generation_time import PREFILL_TOKENS
from nereus.planner.shard_size import (
    adapter_parameters,
    heads_per_rank,
    held_parameters,
    kv_bytes_per_token,
    rank_parameters,
    trained_parameters,
)
from nereus.planner.workload import Pipeline, Recompute, Workload

Floats = NDArray[np.float64]
Terms = dict[str, Floats]
_Holds = bool | NDArray[np.bool_]

PERSISTENT = ("weights", "gradients", "master", "moments", "packed_weights", "engine_cache", "engine_graphs")
FIXED = ("context", "graphs", "engine_graphs", "communication")

_CONTEXT_BYTES = 3.5e9  # driver context, library workspaces, engine buffers (the figure of aiconfigurator)
_GROUP_BYTES = 0.35e9  # buffers of one set of communicators
_GRAPH_BYTES = 1.0e9  # captured decode graphs
_SAMPLED = 1024  # sequences whose logits an engine holds while it samples
_TAIL = 2.33  # standard deviations: the 99 % quantile of a sum
_MASTER_BYTES, _MOMENT_BYTES = 4, 8
_LOGIT_COPIES_SCORED, _LOGIT_COPIES_TRAINED = 2, 3  # logits and soft-max; and their gradient


def generation_bytes(
    shape: DecoderConfig,
    workload: Workload,
    tp: Floats,
    pp: Floats,
    dp: Floats,
    ep: Floats | float = 1.0,
) -> Terms:
    """Weights, cache of the sequences held at once, and an engine's working memory, shape [n].

    An engine that lives beside the other stages keeps weights of its own, cache and graphs all the while.
    """
    per_unit, serving = np.ceil(workload.num_generated / dp), workload.engines.serving
    resident = np.minimum(per_unit, np.inf if workload.most_resident is None else workload.most_resident)
    prefill = np.minimum(resident * workload.prompt_tokens, max(PREFILL_TOKENS, workload.prompt_tokens))
    one = np.ones_like(tp)
    if serving is not None:
        return _served_bytes(shape, workload, serving, tp, pp, resident, prefill)
    return {
        "weights": workload.dtype_bytes * rank_parameters(shape, tp, pp, ep),
        "kv_cache": kv_bytes_per_token(shape, tp, pp, workload.dtype_bytes)
        * resident_tokens(workload, resident),
        "activations": prefill * live_layer_bytes(shape, tp, workload),
        "logits": 4.0
        * _LOGIT_COPIES_SCORED
        * np.minimum(resident, _SAMPLED)
        * np.ceil(shape.vocab_size / tp),
        "graphs": one * _GRAPH_BYTES,
        "communication": _groups(tp, pp, one * 0, ep),
        "context": one * _CONTEXT_BYTES,
    }


def _served_bytes(
    shape: DecoderConfig,
    workload: Workload,
    serving: Serving,
    tp: Floats,
    pp: Floats,
    resident: Floats,
    prefill: Floats,
) -> Terms:
    """As `generation_bytes`, of an engine with a cache of fixed size (vLLM's).

    The arena in which weight syncs land stays beside the engine's packed weights. Its loader reads tensors of
    the whole shape, one at a time, of which a rank holds a part. It samples from whole logits on every rank.
    """
    assert serving.kv_cache_bytes is not None, "a plan needs a bound of the cache"
    one, weights = np.ones_like(tp), workload.dtype_bytes * rank_parameters(shape, tp, pp)
    (some_tp, some_pp), back = distinct(tp, pp)
    caches = [
        cache_bytes(
            shape,
            int(t),
            -(-shape.num_layers // int(p)),
            longest_tokens=serving.longest_tokens or shape.max_positions,
            rows=serving.rows,
            limit_bytes=serving.kv_cache_bytes,
        )
        for t, p in zip(some_tp, some_pp, strict=True)
    ]
    largest = max(shape.vocab_size, shape.intermediate_size) * shape.hidden_size
    return {
        "weights": weights,
        "packed_weights": weights.copy(),
        "engine_cache": np.array(caches, dtype=np.float64)[back],
        "engine_graphs": one * (0.0 if serving.eager or workload.engines.on_cpu else _GRAPH_BYTES),
        "loading": np.where(tp > 1, 1.0, 0.0) * workload.dtype_bytes * largest,
        "activations": prefill * live_layer_bytes(shape, tp, workload),
        "logits": 4.0 * _LOGIT_COPIES_SCORED * np.minimum(resident, _SAMPLED) * shape.vocab_size,
        "communication": _groups(tp, pp, one * 0),
        "context": one * _CONTEXT_BYTES,
    }


def resident_tokens(workload: Workload, resident: ArrayLike) -> Floats:
    """Tokens of cache that `resident` sequences need at their worst moment, at the 99 % quantile.

    Started together, n * S(u) * (prompt + u) peaks at some position u; an engine that is refilled holds
    prompt + age of each. The worse of the two counts, and never more than everybody at full length.
    """
    count = np.asarray(resident, dtype=np.float64)
    response, prompt = workload.response, workload.prompt_tokens
    grid = np.linspace(0.0, response.maximum, 257)
    together = float((response.survival(grid) * (prompt + grid)).max())
    age = response.mean_square / (2 * response.mean)
    spread = np.sqrt(max(response.mean_square - response.mean**2, 0.0))
    expected = count * max(together, prompt + age)
    return np.asarray(
        np.minimum(expected + _TAIL * np.sqrt(count) * spread, count * (prompt + response.maximum))
    )


def inference_bytes(
    shape: DecoderConfig,
    workload: Workload,
    tp: Floats,
    pp: Floats,
    dp: Floats,
    ep: Floats | float = 1.0,
    cp: Floats | float = 1.0,
) -> Terms:
    """Weights and one micro-batch's working memory, shape [n]."""
    one = np.ones_like(tp)
    sequences = np.ceil(np.minimum(workload.micro_batch, np.ceil(workload.num_sequences / dp)) / ep)
    tokens = sequences * workload.max_sequence_tokens / cp
    return {
        "weights": workload.dtype_bytes * rank_parameters(shape, tp, pp, ep),
        "activations": tokens * live_layer_bytes(shape, tp, workload)
        + _score_bytes(shape, workload, tp, sequences) / cp
        + _ring_bytes(shape, workload, tp, cp, tokens),
        "logits": _logits(shape, workload, tp, tokens, _LOGIT_COPIES_SCORED),
        "communication": _groups(tp, pp, one * 0, ep, cp),
        "context": one * _CONTEXT_BYTES,
    }


def training_bytes(
    shape: DecoderConfig,
    workload: Workload,
    tp: Floats,
    pp: Floats,
    dp: Floats,
    ep: Floats | float = 1.0,
    cp: Floats | float = 1.0,
    *,
    split: Sequence[int] | None = None,
    only: int | None = None,
) -> Terms:
    """Model state and the activations of the fullest pipeline stage, shape [n].

    1F1B keeps min(p - i, m) micro-batches alive in stage i, GPipe all m. With the even split the fullest
    stage is the first (most in flight, most layers, the embedding) or the last (the head and its logits);
    `split` gives the layers of every stage, and `only` picks one of them. Units that share the optimizer hold
    one of dp slices of it, and stage one slice of the gradients.
    """
    share = np.ceil(workload.num_sequences / workload.num_mini_batches / dp)
    sequences = np.minimum(workload.micro_batch, share)
    rounds = np.ceil(share / sequences)

    def stage(layers: Floats, after: Floats | int, first: _Holds, last: _Holds) -> Terms:
        in_flight = rounds if workload.pipeline is Pipeline.GPIPE else np.minimum(after, rounds)
        return _train_stage(shape, workload, tp, dp, ep, cp, sequences, layers, in_flight, first, last)

    if split is None:
        most, least = np.ceil(shape.num_layers / pp), np.floor(shape.num_layers / pp)
        stages = [stage(most, pp, True, pp == 1), stage(least, 1, pp == 1, True)]
    else:
        stages = [
            stage(np.full_like(pp, count), len(split) - index, index == 0, index == len(split) - 1)
            for index, count in enumerate(split)
            if only in (None, index)
        ]
    fullest = np.argmax(np.stack([np.asarray(sum(terms.values())) for terms in stages]), axis=0)
    terms = {name: np.asarray(np.choose(fullest, [part[name] for part in stages])) for name in stages[0]}
    terms["communication"] = _groups(tp, pp, np.where(dp > 1, 1.0, 0.0), ep, cp)
    terms["context"] = np.full_like(tp, _CONTEXT_BYTES)
    return terms


def _train_stage(
    shape: DecoderConfig,
    workload: Workload,
    tp: Floats,
    dp: Floats,
    ep: Floats | float,
    cp: Floats | float,
    sequences: Floats,
    layers: Floats,
    in_flight: Floats,
    embedding: _Holds,
    head: _Holds,
) -> Terms:
    """One pipeline stage; `embedding` and `head` say whether it holds them."""
    parameters = held_parameters(shape, tp, layers, embedding, head, ep)
    adapters = np.asarray(layers) * adapter_parameters(shape, tp)
    trained = trained_parameters(shape, tp, layers, embedding, head, ep)
    rows = np.ceil(sequences / ep)
    tokens = rows * workload.max_sequence_tokens / cp
    live = tokens * live_layer_bytes(shape, tp, workload) + _score_bytes(shape, workload, tp, rows) / cp
    if workload.recompute is Recompute.FULL:
        kept = tokens * workload.dtype_bytes * shape.hidden_size
    elif workload.recompute is Recompute.SELECTIVE:
        kept = tokens * live_layer_bytes(shape, tp, workload)
    else:
        kept = live
    # What is computed again lives for one layer at a time.
    again = live if workload.recompute is not Recompute.NONE else np.zeros_like(live)
    held = trained / dp if workload.zero1 else trained
    staged = held if workload.zero1 else np.zeros_like(trained)
    activations = kept * layers * in_flight + again + 3 * _ring_bytes(shape, workload, tp, cp, tokens)
    logits = np.where(head, _logits(shape, workload, tp, tokens, _LOGIT_COPIES_TRAINED), 0.0)
    terms = {
        "weights": workload.dtype_bytes * (parameters + adapters),
        "gradients": workload.grad_bytes * (trained + staged),
        "master": _MASTER_BYTES * held,
        "moments": _MOMENT_BYTES * held,
        "activations": activations,
        "logits": logits,
    }
    if shape.lora is not None and shape.head == "lm":
        # The weight sync sends a copy with the adapters added; activations and logits are gone by then.
        merged = workload.dtype_bytes * parameters
        terms["merged"] = np.maximum(0.0, merged - activations - logits)
    return terms


def live_layer_bytes(shape: DecoderConfig, tp: ArrayLike, workload: Workload) -> Floats:
    """Bytes a token of one layer's tensors while all live, without scores.

    Two norms' inputs and outputs are whole on every rank (no sequence parallelism): 4 h. Cut by t: q, k, v
    and the attention's output; gate, up, activated gate and product: 4 f. Of experts each of k visits has the
    latter, and its input and output twice, before and after the dispatch: 4 h.
    """
    query, kv = heads_per_rank(shape, tp)
    width = np.ceil(shape.intermediate_size / np.asarray(tp, dtype=np.float64))
    heads = (2 * query + 2 * kv) * shape.head_dim
    feed_forward = 4 * width
    if shape.experts is not None:
        feed_forward = shape.experts.per_token * (feed_forward + 4.0 * shape.hidden_size)
    return np.asarray(workload.dtype_bytes * (4.0 * shape.hidden_size + heads + feed_forward))


def _ring_bytes(
    shape: DecoderConfig, workload: Workload, tp: Floats, cp: Floats | float, tokens: Floats
) -> Floats:
    """Keys and values on their way, and those that come; and the float32 output that blocks are merged in."""
    query, kv = heads_per_rank(shape, tp)
    held = shape.head_dim * (2 * 2 * kv * workload.dtype_bytes + 4 * query)
    return np.asarray(np.where(np.asarray(cp) > 1, tokens * held, 0.0))


def _score_bytes(shape: DecoderConfig, workload: Workload, tp: Floats, sequences: Floats) -> Floats:
    """Bytes of one layer's score matrices: b * heads / t * s^2, nothing where attention is fused."""
    query, _ = heads_per_rank(shape, tp)
    return np.asarray(workload.attention.saved_bytes * sequences * query * workload.max_sequence_tokens**2)


def _logits(shape: DecoderConfig, workload: Workload, tp: Floats, tokens: Floats, copies: int) -> Floats:
    """fp32 logits of one chunk of tokens, `copies` of them alive at once."""
    if shape.head == "value":
        return np.zeros_like(tokens)
    chunk = np.inf if workload.logits_chunk_tokens is None else workload.logits_chunk_tokens
    return np.asarray(4.0 * copies * np.minimum(tokens, chunk) * np.ceil(shape.vocab_size / tp))


def _groups(
    tp: Floats, pp: Floats, more: Floats, ep: Floats | float = 1.0, cp: Floats | float = 1.0
) -> Floats:
    """Buffers of the unit's communicators, of those across units, and of the default one."""
    inside = sum((np.asarray(size) > 1) * 1.0 for size in (tp, pp, ep, cp))
    return np.asarray(_GROUP_BYTES * (1.0 + inside + more))
