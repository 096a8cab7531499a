"""A training step over rows of lognormal lengths, micro-batches by rows and by tokens, on this machine.

    .venv/bin/python -m benchmarks.micro_batches [--rows 64] [--longest 512] [--passes-of 2]

All ways may hold `--passes-of` rows of the longest in one pass: so many rows, or as many tokens. "padded" is
the way by tokens with each row's attention padded to the longest row of its micro-batch. Times are CPU
seconds of one forward and backward pass over all rows and the optimizer, medians of `--repeats`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

from benchmarks.generation import SMALL
from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.batch import TokenBatch, TrainBatch
from nereus.emu.decoder import decoder_spec
from nereus.emu.engines.torch import attention
from nereus.emu.engines.torch.engine import TorchEngine
from nereus.emu.layout import Layout
from nereus.emu.source import fill
from nereus.emu.unit_groups import UnitGroups
from nereus.tasks.micro_batches import Limit, cut_batch, deal_rows
from tests.emu.engines.torch_cases import ADAM, Random, TokenLoss

PROMPT_TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--median", type=float, default=64.0)
    parser.add_argument("--spread", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--passes-of", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    layout = Layout.make(decoder_spec(SMALL), tp=1, pp=1, ranks=(0,))
    engine = TorchEngine(SMALL, layout, UnitGroups.alone(layout), optimizer=ADAM)
    fill(engine.state, Random(SMALL), {"theta": "theta"})
    batch = rows_of(options)
    lengths = (batch.batch.prompt_lens_b + batch.batch.response_lens_b).tolist()
    counts = GlobalCounts.from_mask(batch.mask_bt, max_tokens=options.longest)
    most = options.passes_of * (PROMPT_TOKENS + options.longest)
    by_tokens = Limit(rows=1, tokens=most)
    usual = attention.BLOCK_ABOVE
    print(f"{len(lengths)} rows, {sum(lengths)} tokens, {max(lengths)} in the longest\n")
    print("way       | passes | CPU seconds | tokens a CPU second")
    print("----------|-------:|------------:|--------------------:")
    for name, limit, block in (
        ("by rows", Limit(rows=options.passes_of), usual),
        ("padded", by_tokens, 0.0),
        ("by tokens", by_tokens, usual),
    ):
        attention.BLOCK_ABOVE = block
        (share,) = deal_rows(lengths, num_units=1, limit=limit)
        parts = [cut_batch(batch, micro) for micro in share]
        took = []
        for repeat in range(options.repeats + 1):
            start = time.process_time()
            engine.train_step(parts, TokenLoss(), counts, learning_rate=1e-4)
            if repeat:
                took.append(time.process_time() - start)
        middle = statistics.median(took)
        print(f"{name:9} | {len(parts):6} | {middle:11.2f} | {sum(lengths) / middle:19.0f}")
    load = os.getloadavg()
    print(f"\nload {load[0]:.1f} {load[1]:.1f} {load[2]:.1f} on {os.cpu_count()} CPUs")


def rows_of(options: argparse.Namespace) -> TrainBatch:
    """Rows with responses of lognormal length."""
    draw = torch.Generator().manual_seed(0)
    noise_b = options.spread * torch.randn(options.rows, generator=draw)
    response_b = (options.median * noise_b.exp()).long().clamp(1, options.longest)
    prompt_b = torch.full_like(response_b, PROMPT_TOKENS)
    width = int((prompt_b + response_b).max())
    batch = TokenBatch(
        tokens_bs=torch.randint(3, SMALL.vocab_size, (options.rows, width), generator=draw),
        prompt_lens_b=prompt_b,
        response_lens_b=response_b,
    )
    mask_bt = batch.response_mask().float()
    return TrainBatch(batch=batch, mask_bt=mask_bt, advantages_bt=torch.randn(mask_bt.shape, generator=draw))


if __name__ == "__main__":
    main()
