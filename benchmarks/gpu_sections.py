"""Sections of the GPU suite that time kernels, the machine, and ranks that share one GPU.

Letters: m tokens, h hidden, v vocabulary, b rows, t positions.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from benchmarks.gpu_ranks import shared_rank
from nereus.emu.arena import ShardState, training_kinds
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engines.torch.optimizer import AdamW, step
from nereus.emu.engines.torch.token_logprobs import token_logprobs
from nereus.emu.layout import Layout, shard
from nereus.emu.probes.timing import seconds_of
from nereus.kernels.dispatch import VARIABLE
from nereus.kernels.regions import copy_regions
from nereus.kernels.scan import gae_scan
from nereus.kernels.whiten import masked_whiten
from nereus.tasks.calibrate import FULL_GPU, QUICK, Effort, calibrate_machine
from nereus.tasks.device import kind_of_device


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line. `value` against `target` says whether a claim holds; without a target nothing is claimed."""

    section: str
    what: str
    value: float | None = None
    unit: str = ""
    target: str = ""
    ok: bool | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the sections are. `claims`: whether targets are judged."""

    claims: bool
    tokens: int
    hidden: int
    vocab: int
    rows: int
    positions: int
    matrix: int
    layers: int
    ranks: tuple[int, ...]
    message: int
    effort: Effort
    compile_backend: str


FULL = Size(
    claims=True, tokens=4096, hidden=4096, vocab=128_256, rows=512, positions=4096, matrix=16_384, layers=16,
    ranks=(2, 4), message=1 << 26, effort=FULL_GPU, compile_backend="inductor",
)  # fmt: skip
TINY = Size(
    claims=False, tokens=5, hidden=16, vocab=67, rows=3, positions=40, matrix=64, layers=1, ranks=(2,),
    message=1 << 12, effort=QUICK, compile_backend="eager",
)  # fmt: skip


def table_of(rows: Sequence[Row], title: str) -> Table:
    """All rows."""
    table = Table(title=title, box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("section", "what", "value", "target", "", "note"):
        table.add_column(name, justify="right" if name == "value" else "left", overflow="fold")
    for row in rows:
        value = "" if row.value is None else f"{row.value:.4g} {row.unit}"
        verdict = "" if row.ok is None else "[green]ok[/green]" if row.ok else "[red]no[/red]"
        table.add_row(row.section, row.what, value, row.target, verdict, row.note)
    return table


def logprob_rows(device: torch.device, size: Size) -> list[Row]:
    """Log-probability and entropy, forward and backward, against the compiled plain form."""
    dtype = torch.bfloat16 if size.claims else torch.float32
    make = torch.Generator(device).manual_seed(0)
    x_mh = torch.randn(size.tokens, size.hidden, device=device, dtype=dtype, generator=make) * 0.1
    weight_vh = torch.randn(size.vocab, size.hidden, device=device, dtype=dtype, generator=make) * 0.1
    targets_m = torch.randint(size.vocab, (size.tokens,), device=device, generator=make)

    def plain(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        l_mv = (x @ w.t()).float().log_softmax(-1)
        return l_mv.gather(1, targets_m[:, None])[:, 0], -(l_mv.exp() * l_mv).sum(-1)

    compiled = torch.compile(plain, backend=size.compile_backend)

    def ours(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_m, entropy_m = token_logprobs(
            x, w, targets_m, vocab_start=0, temperature=1.0, entropy=True, group=None
        )
        assert entropy_m is not None, "it was asked for"
        return logprobs_m, entropy_m

    def both_ways(forward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        x, w = (one.detach().requires_grad_() for one in (x_mh, weight_vh))
        logprobs_m, entropy_m = forward(x, w)
        (logprobs_m.sum() + entropy_m.sum()).backward()  # type: ignore[no-untyped-call]
        return logprobs_m.detach()

    theirs_s, theirs_bytes, expected_m = _cost(lambda: both_ways(compiled), device)
    ours_s, ours_bytes, found_m = _cost(lambda: both_ways(ours), device)
    off = float((expected_m.float() - found_m).abs().max())
    speed, memory = theirs_s / ours_s, theirs_bytes / max(ours_bytes, 1)
    name = "log-probs"
    return [
        Row(section=name, what=f"m={size.tokens} v={size.vocab}: compiled", value=theirs_s * 1e3, unit="ms"),
        Row(section=name, what="fused", value=ours_s * 1e3, unit="ms", note=f"differ by {off:.2g} at most"),
        _claim(size, name, "compiled / fused, time", speed, 2.0),
        _claim(size, name, "compiled / fused, memory", memory, 10.0),
    ]


def region_rows(device: torch.device, size: Size) -> list[Row]:
    """Strided halves of matrices into a bucket and back, as share of a contiguous copy's bandwidth."""
    n = size.matrix
    sources = [torch.randn(n, n // 4, device=device, dtype=torch.bfloat16) for _ in range(4)]
    halves = [one[:, : n // 8] for one in sources]
    bucket = torch.empty(sum(half.numel() for half in halves), device=device, dtype=torch.bfloat16)
    slots = [part.view(half.shape) for part, half in zip(bucket.chunk(4), halves, strict=True)]
    other = torch.empty_like(bucket)
    copy_s = seconds_of(lambda: other.copy_(bucket), device)
    out = []
    for what, pairs in (("pack", list(zip(halves, slots, strict=True))),
                        ("unpack", list(zip(slots, halves, strict=True)))):  # fmt: skip
        with _form("triton"):
            took_s = seconds_of(lambda pairs=pairs: copy_regions(pairs), device)  # type: ignore[misc]
        out.append(_claim(size, "regions", f"{what}, share of copy bandwidth", copy_s / took_s, 0.85))
    return out


def scan_rows(device: torch.device, size: Size) -> list[Row]:
    """GAE over ragged rows, and whitening, against their plain forms."""
    rewards_bt, values_bt = torch.randn(2, size.rows, size.positions, device=device).unbind()
    set_bt = torch.rand(size.rows, size.positions, device=device) < 0.9
    calls: dict[str, Callable[[], Tensor]] = {
        "gae": lambda: gae_scan(rewards_bt, values_bt, set_bt, gamma=0.99, lam=0.95),
        "whitening": lambda: masked_whiten(rewards_bt, set_bt),
    }
    out = []
    for name, call in calls.items():
        with _form("torch"):
            plain_s = seconds_of(call, device)
        with _form("triton"):
            kernel_s = seconds_of(call, device)
        what = f"{size.rows} x {size.positions}: torch / kernel"
        row = _claim(size, name, what, plain_s / kernel_s, 10.0 if name == "gae" else None)
        out += [row, Row(section=name, what="kernel", value=kernel_s * 1e6, unit="us")]
    return out


def adamw_rows(device: torch.device, size: Size) -> list[Row]:
    """The optimizer's pass over arenas with a half-precision copy, against torch's fused form."""
    model = DecoderConfig(
        vocab_size=size.vocab, hidden_size=size.hidden, num_layers=size.layers // 4 or 1, num_heads=4,
        num_kv_heads=2, head_dim=size.hidden // 4, intermediate_size=2 * size.hidden, max_positions=64,
    )  # fmt: skip
    spec = decoder_spec(model)
    state = ShardState.empty(
        shard(spec, Layout.make(spec, tp=1, pp=1, ranks=(0,)), 0), training_kinds(torch.bfloat16), device
    )
    grad = torch.randn(state["theta"].flat.numel(), device=device)
    seconds = {}
    for form in ("torch", "triton"):
        with _form(form):
            seconds[form] = seconds_of(
                lambda: step(state, grad, AdamW(weight_decay=0.1), learning_rate=1e-4, step_count=3), device
            )
    moved = grad.numel() * (7 * 4 + 2)
    rate = moved / seconds["triton"] / 1e9
    return [
        _claim(
            size,
            "AdamW",
            f"{grad.numel():,}: torch fused / kernel",
            seconds["torch"] / seconds["triton"],
            None,
        ),
        Row(section="AdamW", what="kernel", value=rate, unit="GB/s"),
    ]


def calibration_rows(device: torch.device, size: Size) -> list[Row]:
    """This machine against the built-in rows of its kind."""
    with tempfile.TemporaryDirectory() as folder:
        kind = kind_of_device(device.type)
        found = calibrate_machine(
            Path(folder), device, kind, effort=size.effort, watch=lambda name, share: None
        )
    return [
        Row(
            section="calibration", what=f"{one.name}: measured / built-in {kind}", value=one.factor,
            note=f"spread {100 * one.spread:.0f} % over {one.num_rows} rows",
        )
        for one in found.deviations
    ]  # fmt: skip


def shared_gpu_rows(device: torch.device, size: Size) -> list[Row]:
    """Several ranks on this one GPU: gloo's collectives on its tensors."""
    out = []
    for ranks in size.ranks:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "seconds.pt")
            spawn(shared_rank, args=(ranks, port, device.type, size.message, file), nprocs=ranks)
            seconds: dict[str, float] = torch.load(file, weights_only=True)
        for name, took_s in seconds.items():
            what = f"{ranks} ranks, gloo {name} of {size.message >> 10} KiB"
            value = took_s * 1e3
            out.append(Row(section="shared GPU", what=what, value=value, unit="ms", note="sums are right"))
    return out


SECTIONS: dict[str, Callable[[torch.device, Size], list[Row]]] = {
    "log-probs": logprob_rows,
    "regions": region_rows,
    "scans": scan_rows,
    "adamw": adamw_rows,
    "calibration": calibration_rows,
    "shared": shared_gpu_rows,
}


def _claim(size: Size, section: str, what: str, value: float, least: float | None) -> Row:
    if least is None or not size.claims:
        return Row(section=section, what=what, value=value)
    return Row(section=section, what=what, value=value, target=f">= {least:g}", ok=value >= least)


def _cost(call: Callable[[], Tensor], device: torch.device) -> tuple[float, int, Tensor]:
    """Seconds, peak bytes beyond what was held before (0 on a CPU), and the result."""
    result = call()
    if device.type != "cuda":
        return seconds_of(call, device, budget_s=0.0), 0, result
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held
    return seconds_of(call, device, budget_s=1.0), peak, result


@contextmanager
def _form(form: str) -> Iterator[None]:
    """Take one form of the kernels."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = form
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
