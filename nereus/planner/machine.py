"""From what was measured on a machine to a cluster file that the planner loads, and how far the built-in is.

rows by class ─▶ fitted kernel table, link, collectives ─▶ profile.yaml, kernels.json, collectives.json
             └─▶ the built-in profile's predictions of the same calls ─▶ one line a class: factor, spread
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from nereus.planner.collective_time import CollectiveTable, group_all_reduce_s, tree_of
from nereus.planner.kernel_file import write_table
from nereus.planner.kernel_fit import fit_context_attention, fit_decode_attention, fit_gemm
from nereus.planner.kernel_time import (
    KernelTable,
    context_attention_s,
    decode_attention_s,
    elementwise_s,
    gemm_s,
    kernel_table,
)
from nereus.planner.measured import all_reduce_table
from nereus.planner.profile import GpuProfile, LinkProfile, link_profile

Floats = NDArray[np.float64]
Columns = Mapping[str, Sequence[float]]
Measured = Mapping[str, Columns]

PROFILE_FILE, KERNELS_FILE, COLLECTIVES_FILE = "profile.yaml", "kernels.json", "collectives.json"
ALL_REDUCE, POINT_TO_POINT = 0, 2  # positions in emu.probes.links.OPERATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """How far the built-in profile is from one class of measured calls.

    `factor` is the median of measured over predicted seconds; `spread` the median relative deviation that is
    left once predictions are multiplied by it.
    """

    name: str
    factor: float
    spread: float
    num_rows: int

    @classmethod
    def of(cls, name: str, measured_s: Floats, predicted_s: Floats) -> Deviation:
        """Compare equal-length arrays of positive seconds."""
        ratio = np.log(measured_s / predicted_s)
        middle = float(np.median(ratio))
        return cls(
            name=name,
            factor=float(np.exp(middle)),
            spread=float(np.expm1(np.median(np.abs(ratio - middle)))),
            num_rows=len(measured_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What the products and the cache were measured in, as `kernel_time.gemm_s` takes it."""

    element_bytes: float
    speed: float


def precision_of(device: str) -> Precision:
    """float32 on CPUs, which runs at half the 16-bit peak by convention; 16 bits on GPUs."""
    return Precision(element_bytes=4, speed=0.5) if device == "cpu" else Precision(element_bytes=2, speed=1)


def fitted_table(gpu: GpuProfile, measured: Measured, precision: Precision, head_dim: int) -> KernelTable:
    """The kernel table of the measured device, related to the peaks of `gpu`."""
    gemm = _arrays(measured["gemm"])
    context, decode = (_arrays(measured[name]) for name in ("context_attention", "decode_attention"))
    memory = _arrays(measured["memory"])
    here = memory["to_host"] == 0
    copied = 2 * memory["bytes"][here] / memory["seconds"][here]  # read and written
    return KernelTable(
        gemm=fit_gemm(
            gpu,
            gemm["m"],
            gemm["n"],
            gemm["k"],
            gemm["seconds"],
            element_bytes=precision.element_bytes,
            speed=precision.speed,
        ),
        context_attention=fit_context_attention(gpu, *_attention(context), head_dim, context["seconds"]),
        decode_attention=fit_decode_attention(
            gpu,
            *_attention(decode),
            head_dim,
            decode["seconds"],
            element_bytes=precision.element_bytes,
        ),
        elementwise_memory=float(copied.max()) / gpu.memory_bandwidth_Bps,
        elementwise_launch_s=float(np.median(_arrays(measured["launch"])["seconds"])),
    )


def fitted_link(link: LinkProfile, measured: Columns) -> tuple[LinkProfile, CollectiveTable] | None:
    """The link inside this machine, and its table of all-reduces; None where no link was measured."""
    rows = _arrays(measured)
    if not len(rows["seconds"]):
        return None
    one_way = rows["operation"] == POINT_TO_POINT
    sizes, seconds = rows["bytes"][one_way], rows["seconds"][one_way] / 2  # there and back
    latency_s = float(seconds[sizes == sizes.min()].min())
    largest = sizes == sizes.max()
    rate = float((sizes[largest] / np.maximum(seconds[largest] - latency_s, 1e-9)).max())
    reduced = rows["operation"] == ALL_REDUCE
    table = all_reduce_table({name: rows[name][reduced] for name in ("ranks", "bytes", "seconds")})
    return replace(link, latency_s=latency_s, bandwidth_Bps=rate, efficiency=1.0), table


def deviations(
    gpu: GpuProfile, link: LinkProfile, measured: Measured, precision: Precision, head_dim: int
) -> tuple[Deviation, ...]:
    """A line a class: the profile's predictions of the measured calls against what they took."""
    out: list[Deviation] = []
    rows = _arrays(measured["gemm"])
    predicted = gemm_s(
        gpu, rows["m"], rows["n"], rows["k"], element_bytes=precision.element_bytes, speed=precision.speed
    )
    out.append(Deviation.of("gemm", rows["seconds"], predicted))
    for name in ("context_attention", "decode_attention"):
        rows = _arrays(measured[name])
        sizes = _attention(rows)
        if name == "context_attention":
            predicted = context_attention_s(gpu, *sizes, head_dim)
        else:
            predicted = decode_attention_s(gpu, *sizes, head_dim, element_bytes=precision.element_bytes)
        out.append(Deviation.of(name, rows["seconds"], predicted))
    rows = _arrays(measured["memory"])
    here = rows["to_host"] == 0
    predicted = elementwise_s(gpu, 2 * rows["bytes"][here], 1)
    out.append(Deviation.of("memory copy", rows["seconds"][here], predicted))
    rows = _arrays(measured["launch"])
    launch_s = kernel_table(gpu.kernels).elementwise_launch_s
    out.append(Deviation.of("kernel launch", rows["seconds"], np.full_like(rows["seconds"], launch_s)))
    return (*out, *_link_deviations(link, _arrays(measured["links"])))


def _link_deviations(link: LinkProfile, rows: Mapping[str, Floats]) -> list[Deviation]:
    if not len(rows["seconds"]):
        return []
    reduced, one_way = rows["operation"] == ALL_REDUCE, rows["operation"] == POINT_TO_POINT
    gathered = ~reduced & ~one_way
    all_reduce = group_all_reduce_s(link, rows["bytes"], rows["ranks"])
    sent = link.latency_s + rows["bytes"] / (link.bandwidth_Bps * link.efficiency)
    # An all-gather is the second half of a ring's all-reduce.
    return [
        Deviation.of("all-reduce", rows["seconds"][reduced], all_reduce[reduced]),
        Deviation.of("all-gather", rows["seconds"][gathered], all_reduce[gathered] / 2),
        Deviation.of("point to point", rows["seconds"][one_way] / 2, sent[one_way]),
    ]


def write_profile(
    folder: Path,
    gpu: GpuProfile,
    num_gpus: int,
    table: KernelTable,
    link: tuple[LinkProfile, CollectiveTable] | None,
) -> Path:
    """Write the cluster file of this machine with its tables beside it; returns its path.

    What was not measured (the network, and the link where one GPU stands alone) keeps its built-in row.
    """
    write_table(folder / KERNELS_FILE, table)
    tree: dict[str, object] = {
        "name": f"{num_gpus}x{gpu.name} measured",
        "pools": [{"nodes": 1, "gpus_per_node": num_gpus, "gpu": gpu.name}],
        "gpus": {
            gpu.name: {
                "peak_tflops": gpu.peak_flops / 1e12,
                "memory_gb": gpu.memory_bytes / 1e9,
                "memory_gbps": gpu.memory_bandwidth_Bps / 1e9,
                "compute_units": gpu.compute_units,
                "kernels": KERNELS_FILE,
                "link": gpu.link if link is None else "measured",
                "network": gpu.network,
                "host_link": gpu.host_link,
                "gpus_per_node": gpu.gpus_per_node,
                "fixed_share": gpu.fixed_share,
            }
        },
    }
    if link is not None:
        profile, collectives = link
        text = json.dumps({"measured": {kind: tree_of(collectives) for kind in ("launched", "captured")}})
        (folder / COLLECTIVES_FILE).write_text(text + "\n")
        tree["links"] = {
            "measured": {
                "gbps": profile.bandwidth_Bps / 1e9,
                "latency_us": profile.latency_s * 1e6,
                "efficiency": profile.efficiency,
                "collectives": COLLECTIVES_FILE,
            }
        }
    path = folder / PROFILE_FILE
    path.write_text("# What `nereus calibrate` measured here.\n" + yaml.safe_dump(tree, sort_keys=False))
    return path


def builtin_link(gpu: GpuProfile) -> LinkProfile:
    """The link that the built-in profile gives this GPU kind."""
    return link_profile(gpu.link)


def _arrays(columns: Columns) -> dict[str, Floats]:
    return {name: np.asarray(values, dtype=np.float64) for name, values in columns.items()}


def _attention(rows: Mapping[str, Floats]) -> tuple[Floats, Floats, Floats, Floats]:
    return rows["sequences"], rows["tokens"], rows["heads"], rows["kv_heads"]
