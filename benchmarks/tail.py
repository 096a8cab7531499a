"""When units of generation end, with rows dealt beforehand and with rows taken as there is room.

    .venv/bin/python benchmarks/tail.py [--units 4] [--slots 16] [--prompts 64] [--samples 4] [--out FILE]

Response lengths are lognormal: prompts differ (`--between`), and so do the samples of a prompt (`--within`).
Lengths are planned, so that every way answers the same rows: what is drawn is replaced by a stop token at a
row's planned length, and by another token before. All else is the engine's own work.

Every unit is a real generator in this process, and its clock is the CPU time of its own calls: units would
run at the same time on devices of their own, and a busy machine does not move the numbers. A unit's next call
begins when its last one is over, or in rounds when that of the slowest unit is.

rounds      rows dealt in turn, as many at once as there are slots; the next round begins when all have ended
all at once rows dealt in turn, no limit of slots
as room     a waiting row enters where a row has ended (`nereus.tasks.feeding.Pool`)
longest     the same, rows first that were long in the pass before (`nereus.tasks.length_history`)
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.generation import SMALL
from nereus.emu.batch import PromptBatch, Rollouts, Sampling, join_rows
from nereus.emu.decoder import decoder_spec
from nereus.emu.engines.torch import decode
from nereus.emu.engines.torch.decode_forward import DecodeForward
from nereus.emu.engines.torch.draw import Draw
from nereus.emu.engines.torch.generate import TorchGenerator
from nereus.emu.layout import Layout
from nereus.emu.source import fill
from nereus.emu.unit_groups import UnitGroups
from nereus.tasks.dealing import rounds
from nereus.tasks.feeding import Pool
from nereus.tasks.length_history import LengthHistory
from tests.emu.engines.torch_cases import Random

STOP, OTHER = 2, 3
PROMPT_TOKENS = 16
planned_b = torch.zeros(0, dtype=torch.long)
"""The length of every row, by sample id."""


class PlannedDraw(Draw):
    """Tokens as drawn, but a stop at a row's planned length and none before."""

    def first(self, logits_nv: Tensor, slots_n: Tensor) -> tuple[Tensor, Tensor]:
        tokens_n, logprobs_n = super().first(logits_nv, slots_n)
        return self._stopped(tokens_n, self._ids_r[slots_n], torch.zeros(len(slots_n))), logprobs_n

    def next(self, logits_rv: Tensor, positions_r: Tensor) -> tuple[Tensor, Tensor]:
        tokens_r, logprobs_r = super().next(logits_rv, positions_r)
        return self._stopped(tokens_r, self._ids_r, positions_r), logprobs_r

    def _stopped(self, tokens_r: Tensor, ids_r: Tensor, positions_r: Tensor) -> Tensor:
        tokens_r = tokens_r.masked_fill(tokens_r == STOP, OTHER)
        return tokens_r.masked_fill(positions_r + 1 >= planned_b[ids_r], STOP)


@dataclass(kw_only=True)
class Units:
    """Generators with a clock each."""

    generators: list[TorchGenerator]
    clock_s: list[float] = field(init=False)
    busy_s: list[float] = field(init=False)
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        self.clock_s, self.busy_s = [0.0] * len(self.generators), [0.0] * len(self.generators)

    def worked(self, unit: int, took_s: float) -> None:
        """A unit's call took so long."""
        self.clock_s[unit] += took_s
        self.busy_s[unit] += took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--units", type=int, default=4)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--median", type=float, default=48.0)
    parser.add_argument("--between", type=float, default=0.8)
    parser.add_argument("--within", type=float, default=0.6)
    parser.add_argument("--limit", type=int, default=1024)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    setattr(decode, "Draw", PlannedDraw)  # noqa: B010  # the class that the loop makes
    generators = [make_generator() for _ in range(options.units)]
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        for name, numbers in one_seed(generators, options, seed).items():
            found.setdefault(name, []).append(numbers)
    conclude(found, table, options)


def conclude(
    found: Mapping[str, Sequence[Mapping[str, float]]],
    table: Callable[[Mapping[str, Mapping[str, float]]], str],
    options: argparse.Namespace,
) -> None:
    """Print the table of the medians over the seeds, and write all numbers to `options.out`."""
    middle = {
        name: {key: statistics.median(each[key] for each in seeds) for key in seeds[0]}
        for name, seeds in found.items()
    }
    print(table(middle))
    load = os.getloadavg()
    print(f"load {load[0]:.1f} {load[1]:.1f} {load[2]:.1f} on {os.cpu_count()} CPUs; times are CPU seconds")
    if options.out is not None:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        text = json.dumps({"settings": settings, "load": load, "median": middle, "seeds": found}, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")


def one_seed(
    generators: list[TorchGenerator], options: argparse.Namespace, seed: int
) -> dict[str, dict[str, float]]:
    """Every way once, over the same rows."""
    global planned_b
    before_b, planned_b = planned_lengths(options, seed)
    prompts = prompt_rows(options.prompts, options.samples, seed)
    sampling = Sampling(max_new_tokens=options.limit, stop_token_ids=(STOP,), seed=seed)
    history = LengthHistory()
    history.add(prompts, before_b)
    in_turn = list(range(prompts.num_rows))
    out = {}
    for name, slots, order in (
        ("rounds", options.slots, None),
        ("all at once", None, None),
        ("as room", options.slots, in_turn),
        ("longest", options.slots, history.longest_first(prompts)),
    ):
        units = Units(generators=generators)
        with watched_cache(units):
            if order is None:
                rollouts = dealt(units, prompts, sampling, slots)
            else:
                rollouts = fed(units, prompts, sampling, order, slots)
        assert torch.equal(rollouts.batch.response_lens_b, planned_b), name
        out[name] = numbers_of(units, int(planned_b.sum()))
    return out


def planned_lengths(options: argparse.Namespace, seed: int) -> tuple[Tensor, Tensor]:
    """The length of every row in the pass before, and in this one."""
    draw = torch.Generator().manual_seed(seed)
    middle_p = options.between * torch.randn(options.prompts, generator=draw)
    before_b, now_b = (
        (options.median * (middle_p[:, None] + options.within * noise_pn).exp()).flatten().long()
        for noise_pn in torch.randn(2, options.prompts, options.samples, generator=draw)
    )
    return before_b.clamp(1, options.limit), now_b.clamp(1, options.limit)


def dealt(units: Units, prompts: PromptBatch, sampling: Sampling, slots: int | None) -> Rollouts:
    """Rows in turn, in rounds that wait for all units."""
    num, parts, rows = len(units.generators), [], []
    for rows_b in rounds(torch.arange(prompts.num_rows), num, slots):
        begin_s = max(units.clock_s)
        units.clock_s = [begin_s] * num
        for unit, generator in enumerate(units.generators):
            start = time.process_time()
            parts.append(generator.generate(prompts.select(rows_b[unit::num]), sampling, 0))
            units.worked(unit, time.process_time() - start)
            rows.append(rows_b[unit::num])
    return join_rows(parts, torch.argsort(torch.cat(rows)))


def fed(
    units: Units, prompts: PromptBatch, sampling: Sampling, order: Sequence[int], slots: int | None
) -> Rollouts:
    """Rows as there is room: always the unit goes on whose clock is first, as it would report first."""
    pool = Pool(order, len(units.generators), slots)
    parts: list[Rollouts] = []
    rows: list[int] = []
    reports = [(0.0, unit, 0) for unit in range(len(units.generators))]
    while reports:
        at_s, unit, num_whole = heapq.heappop(reports)
        fresh = pool.take(unit, num_whole) if at_s else pool.given(unit)
        more = pool.has_more
        start = time.process_time()
        answered = units.generators[unit].feed(prompts.select(fresh), sampling, 0, begin=not at_s, more=more)
        units.worked(unit, time.process_time() - start)
        if answered.rollouts is not None:
            rows += [pool.given(unit)[row] for row in answered.rows_n.tolist()]
            parts.append(answered.rollouts)
        if more:
            heapq.heappush(reports, (units.clock_s[unit], unit, len(answered.rows_n)))
    return join_rows(parts, torch.argsort(torch.tensor(rows)))


@contextmanager
def watched_cache(units: Units) -> Iterator[None]:
    """Keep the largest cache of a unit in `units.cache_bytes`."""
    step = DecodeForward.step

    def watched(forward: DecodeForward, tokens_b: Tensor) -> Tensor | None:
        units.cache_bytes = max(units.cache_bytes, 2 * forward.cache.keys_lbkcd.nbytes)
        return step(forward, tokens_b)

    DecodeForward.step = watched  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        DecodeForward.step = step  # type: ignore[method-assign]


def numbers_of(units: Units, tokens: int) -> dict[str, float]:
    end_s, busy_s = max(units.clock_s), sum(units.busy_s)
    return {
        "end_s": end_s,
        "idle": 1 - busy_s / (end_s * len(units.busy_s)),
        "first_s": min(units.clock_s),
        "tokens_per_s": tokens / end_s,
        "busy_s": busy_s,
        "cache_mb": units.cache_bytes / 1e6,
    }


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """The medians, one way a row."""
    base = found["rounds"]["end_s"]
    lines = [
        "way          | ends after | against rounds | idle | tokens/s | busy in all | largest cache",
        "-------------|-----------:|---------------:|-----:|---------:|------------:|-------------:",
    ]
    for name, it in found.items():
        lines.append(
            f"{name:12} | {it['end_s']:8.2f} s | {base / it['end_s']:12.2f} x | {it['idle']:4.0%} | "
            f"{it['tokens_per_s']:8.0f} | {it['busy_s']:9.2f} s | {it['cache_mb']:9.1f} MB"
        )
    return "\n".join(lines)


def make_generator() -> TorchGenerator:
    layout = Layout.make(decoder_spec(SMALL), tp=1, pp=1, ranks=(0,))
    generator = TorchGenerator(SMALL, layout, UnitGroups.alone(layout))
    fill(generator.state, Random(SMALL), {"theta": "theta"})
    return generator


def prompt_rows(prompts: int, samples: int, seed: int) -> PromptBatch:
    """Each prompt so many times."""
    draw = torch.Generator().manual_seed(seed)
    tokens_ps = torch.randint(4, SMALL.vocab_size, (prompts, PROMPT_TOKENS), generator=draw)
    num = prompts * samples
    return PromptBatch(
        tokens_bs=tokens_ps.repeat_interleave(samples, dim=0),
        lens_b=torch.full((num,), PROMPT_TOKENS),
        sample_ids_b=torch.arange(num),
        greedy_b=torch.zeros(num, dtype=torch.bool),
    )


if __name__ == "__main__":
    main()
