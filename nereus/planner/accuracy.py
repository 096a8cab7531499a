"""How far the kernel and collective models are from measured rows that they were not fitted to.

Splits are by shape, never by row: a held-out GEMM has a weight shape (n, k) that no fitted row has, a
held-out attention a head configuration, a held-out message a size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nereus.planner.collective_time import CollectiveTable
from nereus.planner.kernel_fit import fit_context_attention, fit_decode_attention, fit_gemm
from nereus.planner.kernel_time import (
    context_attention_s,
    decode_attention_s,
    elementwise_s,
    gemm_s,
)
from nereus.planner.measured import (
    MEASURED_GPUS,
    all_reduce_table,
    read_all_reduce,
    read_attention,
    read_columns,
    read_gemm,
)
from nereus.planner.profile import GpuProfile, gpu_profile
from nereus.planner.scalars import fit_gain

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

_HELD_OUT = 4  # one shape in four
_TRANSFER_SAMPLE = 32  # measured layers that one scalar is learned from


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors in percent over rows that were held out."""

    mean: float
    median: float
    num_rows: int

    @classmethod
    def of(cls, predicted: Floats, measured: Floats) -> Errors:
        """Errors of equal-length arrays."""
        error = 100 * np.abs(predicted / measured - 1)
        return cls(mean=float(error.mean()), median=float(np.median(error)), num_rows=len(error))

    def __str__(self) -> str:
        return f"{self.mean:5.1f} % (median {self.median:4.1f} %, {self.num_rows} rows)"


def held_out(*columns: Floats, seed: int = 0) -> Mask:
    """True for the rows of one in four distinct tuples of `columns`, chosen by `seed`."""
    _, index = np.unique(np.stack(columns), axis=1, return_inverse=True)
    index = index.ravel()
    order = np.random.default_rng(seed).permutation(int(index.max()) + 1)
    return np.asarray(np.isin(index, order[: len(order) // _HELD_OUT]))


def gemm_errors(folder: Path, name: str, *, seed: int = 0) -> Mapping[str, Errors]:
    """Held-out errors of dense products: "table" is the model in use, "constants" is it without the
    residual grid, "roofline" one efficiency on compute and one on memory, "peak" one efficiency on
    FLOPs.
    """
    gpu = gpu_profile(MEASURED_GPUS[name].kind)
    rows = read_gemm(folder, MEASURED_GPUS[name])
    test = held_out(rows["n"], rows["k"], seed=seed)
    train = {column: values[~test] for column, values in rows.items()}
    rest = {column: values[test] for column, values in rows.items()}
    model = fit_gemm(gpu, train["m"], train["n"], train["k"], train["seconds"])
    plain = replace(model, correction=None)
    sizes = (rest["m"], rest["n"], rest["k"])
    return {
        "table": Errors.of(gemm_s(gpu, *sizes, model=model), rest["seconds"]),
        "constants": Errors.of(gemm_s(gpu, *sizes, model=plain), rest["seconds"]),
        **_simple_forms(gpu, train, rest),
    }


def _simple_forms(
    gpu: GpuProfile, train: Mapping[str, Floats], rest: Mapping[str, Floats]
) -> dict[str, Errors]:
    """The two usual closed forms, each with its best constants on the same training rows."""

    def parts(rows: Mapping[str, Floats]) -> tuple[Floats, Floats]:
        m, n, k = rows["m"], rows["n"], rows["k"]
        return 2 * m * n * k / gpu.peak_flops, 2 * (m * k + n * k + m * n) / gpu.memory_bandwidth_Bps

    compute, memory = parts(train)
    scale = float(np.exp(np.median(np.log(train["seconds"] / compute))))
    best, factors = np.inf, (1.0, 1.0)
    for first in np.geomspace(1, 4, 25):
        for second in np.geomspace(1, 4, 25):
            guess = np.maximum(compute * first, memory * second)
            error = float(np.abs(guess / train["seconds"] - 1).mean())
            if error < best:
                best, factors = error, (float(first), float(second))
    far, near = parts(rest)
    return {
        "roofline": Errors.of(np.maximum(far * factors[0], near * factors[1]), rest["seconds"]),
        "peak": Errors.of(far * scale, rest["seconds"]),
    }


def attention_errors(folder: Path, name: str, *, decode: bool, seed: int = 0) -> Errors:
    """Held-out error of attention over unseen (query heads, kv heads)."""
    gpu = gpu_profile(MEASURED_GPUS[name].kind)
    rows = read_attention(folder, MEASURED_GPUS[name], decode=decode)
    test = held_out(rows["heads"], rows["kv_heads"], seed=seed)
    fit = fit_decode_attention if decode else fit_context_attention
    price = decode_attention_s if decode else context_attention_s

    def sizes(mask: Mask) -> tuple[Floats, Floats, Floats, Floats]:
        return (
            rows["sequences"][mask],
            rows["tokens"][mask],
            rows["heads"][mask],
            rows["kv_heads"][mask],
        )

    model = fit(gpu, *sizes(~test), 128, rows["seconds"][~test])
    return Errors.of(price(gpu, *sizes(test), 128, model=model), rows["seconds"][test])


def all_reduce_errors(folder: Path, name: str, *, captured: bool = False) -> Mapping[str, Errors]:
    """Error on every second message size of a table made from the others; "formula" is the best alpha +
    beta size.
    """
    rows = read_all_reduce(folder, MEASURED_GPUS[name], captured=captured)
    full = all_reduce_table(rows)
    kept = np.arange(len(full.sizes_bytes)) % 2 == 0
    inner = ~kept
    inner[-1] = False  # the last size may lie beyond the kept ones
    table = CollectiveTable(
        ranks=full.ranks,
        sizes_bytes=tuple(np.asarray(full.sizes_bytes)[kept].tolist()),
        seconds=tuple(tuple(np.asarray(line)[kept].tolist()) for line in full.seconds),
    )
    sizes = np.asarray(full.sizes_bytes)
    test = np.isin(rows["bytes"], sizes[inner])
    guess = np.empty(len(rows["bytes"]))
    for count in full.ranks:
        mine = rows["ranks"] == count
        known = mine & np.isin(rows["bytes"], sizes[kept])
        design = np.stack((np.ones(known.sum()), rows["bytes"][known]), axis=1) / rows["seconds"][known, None]
        alpha, beta = np.linalg.lstsq(design, np.ones(known.sum()), rcond=None)[0]
        guess[mine] = alpha + beta * rows["bytes"][mine]
    measured = rows["seconds"][test]
    return {
        "table": Errors.of(table(rows["bytes"][test], rows["ranks"][test]), measured),
        "formula": Errors.of(guess[test], measured),
    }


def transfer_errors(folder: Path, name: str, *, correction: float | None = None) -> Mapping[str, Errors]:
    """Another laboratory's layer times, by model: the built-in tables with one scalar for the machine.

    The scalar and the weight of the tables' residuals come from 32 layers of all models together (`fit_gain`;
    a given `correction` keeps the weight); the error is over all others. `folder` holds the per-layer files
    (columns in ms).
    """
    gpu = gpu_profile(MEASURED_GPUS[name].kind)
    rows = {
        path.name.split("_")[1]: read_columns(path)
        for path in sorted(folder.glob(f"{name.lower()}_*_mlp.csv.gz"))
    }
    measured = np.concatenate([_measured_layer_s(columns) for columns in rows.values()])
    sample = np.random.default_rng(0).permutation(len(measured))[:_TRANSFER_SAMPLE]

    def predict(weight: float) -> Floats:
        return np.concatenate([_layer_s(gpu, columns, weight) for columns in rows.values()])

    if correction is None:
        scalar, weight = fit_gain(lambda share: predict(share)[sample], measured[sample])
    else:
        weight = correction
        scalar = float(np.exp(np.median(np.log(measured[sample] / predict(weight)[sample]))))
    rest = np.ones(len(measured), dtype=bool)
    rest[sample] = False
    found = {"all": Errors.of(scalar * predict(weight)[rest], measured[rest])}
    for model, columns in rows.items():
        found[model] = Errors.of(scalar * _layer_s(gpu, columns, weight), _measured_layer_s(columns))
    return found


def _layer_s(gpu: GpuProfile, rows: Mapping[str, Floats], weight: float) -> Floats:
    """Our price of one layer without attention over the context."""
    tp, m, h = rows["num_tensor_parallel_workers"], rows["num_tokens"], rows["n_embd"]
    d, f = h // rows["n_head"], rows["n_expanded_embd"] / tp
    query, kv = rows["n_head"] / tp, np.maximum(rows["n_kv_head"] / tp, 1)
    shapes = (((query + 2 * kv) * d, h), (h, query * d), (2 * f, h), (h, f))
    products = sum(gemm_s(gpu, m, n, k, weight=weight) for n, k in shapes)
    return np.asarray(products + elementwise_s(gpu, 2 * m * (8 * h + 2 * (query + 2 * kv) * d + 3 * f), 6))


def _measured_layer_s(rows: Mapping[str, Floats]) -> Floats:
    once = (
        "input_layernorm_ms",
        "attn_pre_proj_ms",
        "attn_rope_ms",
        "attn_post_proj_ms",
        "post_attention_layernorm_ms",
        "mlp_up_proj_ms",
        "mlp_act_ms",
        "mlp_down_proj_ms",
    )
    return np.asarray((sum(rows[name] for name in once) + 2 * rows["add_ms"]) * 1e-3)
