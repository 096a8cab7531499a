"""The decoding loop: draw a token for every running row; rows that are done leave, and waiting rows enter.

Letters: r slots of the cache, n slots chosen, v vocabulary.

Rows end at different times, and a slot whose row is done costs as much as one that works. So a waiting row
takes its place as soon as an eighth of the slots are free, which makes of the prompts that enter one forward
pass. When nobody waits any more, the cache is compacted whenever a quarter of it is done: the tail costs what
its own rows cost.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from nereus.emu.batch import Sampling
from nereus.emu.engines.torch.decode_forward import DecodeForward
from nereus.emu.engines.torch.draw import Draw
from nereus.emu.engines.torch.transcript import Transcript
from nereus.emu.engines.torch.waiting import Waiting

COMPACT_BELOW = 0.75  # share of the slots whose rows run
REFILL_FROM = 0.125  # share of the slots that are free
TRIM_FROM = 0.25  # share of the cache's length that no running row reaches
GROWTH = 128  # slots of tokens added at once, or an eighth of the length: copying costs a step 2 % or less


class _Run:
    """One set of rows in a cache."""

    def __init__(
        self, forward: DecodeForward, sampling: Sampling, device: torch.device, num_slots: int
    ) -> None:
        self.forward = forward
        self._sampling, self._device = sampling, device
        self._draw = Draw(sampling, num_slots, forward.vocab_size, device)
        self._transcript = Transcript(num_slots, sampling.max_new_tokens, device)
        self._is_stop_v = _stop_table(sampling.stop_token_ids, forward.vocab_size, device)
        self._prompt_lens_r = torch.zeros(num_slots, dtype=torch.long)
        self._limits_r = torch.zeros(num_slots, dtype=torch.long)
        self._alive_r = torch.zeros(num_slots, dtype=torch.bool)
        self._tokens_r = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._is_filled = False
        self.num_alive = 0

    @property
    def num_free(self) -> int:
        """Slots whose rows are done."""
        return len(self._alive_r) - self.num_alive

    @property
    def wants_rows(self) -> bool:
        """Whether enough slots are free to let rows enter."""
        return self.num_free >= max(1.0, REFILL_FROM * len(self._alive_r))

    def enter(self, waiting: Waiting) -> Generator[None, None, None]:
        """Let rows enter the free slots."""
        self.evict(waiting)
        free_n = (~self._alive_r).nonzero()[:, 0]
        slots_n = free_n[: len(waiting)]
        rows_n, prompts = waiting.take(len(slots_n))
        if self._is_filled:
            logits_nv = self.forward.enter(prompts.tokens_bs, prompts.lens_b, slots_n)
        else:
            assert len(slots_n) == len(self._alive_r), "a set begins with a row in every slot"
            width = int(prompts.lens_b.max())
            room = min(GROWTH, self._sampling.max_new_tokens)
            logits_nv = self.forward.prompts(prompts.tokens_bs, prompts.lens_b, width + room)
            self._is_filled = True
        self._draw.put(slots_n, prompts)
        yield
        tokens_n, logprobs_n = self._agreed(
            len(slots_n), None if logits_nv is None else self._draw.first(logits_nv, slots_n)
        )
        self._transcript.put(slots_n, rows_n, tokens_n, logprobs_n)
        self._tokens_r[slots_n.to(self._device)] = tokens_n
        self._prompt_lens_r[slots_n] = prompts.lens_b
        self._limits_r[slots_n] = prompts.limits_b(self._sampling)
        self._alive_r[slots_n] = True
        self._mark_done()

    def step(self, waiting: Waiting) -> Generator[None, None, None]:
        """One more token of every row."""
        self._make_room(is_last=not waiting.is_open and not len(waiting))
        logits_rv = self.forward.step(self._tokens_r)
        yield
        drawn = None if logits_rv is None else self._draw.next(logits_rv, self._transcript.drawn_r)
        self._tokens_r, logprobs_r = self._agreed(len(self._alive_r), drawn)
        self._transcript.add(self._tokens_r, logprobs_r)
        self._mark_done()

    def compact(self, waiting: Waiting) -> None:
        """Drop the slots whose rows are done, if they are many."""
        if self.num_alive > COMPACT_BELOW * len(self._alive_r):
            return
        self.evict(waiting)
        slots_r = self._alive_r.nonzero()[:, 0]
        at_r = slots_r.to(self._device)
        self._prompt_lens_r, self._alive_r = self._prompt_lens_r[slots_r], self._alive_r[slots_r]
        self._limits_r = self._limits_r[slots_r]
        self._transcript.keep(slots_r)
        self._draw.keep(slots_r)
        self._tokens_r = self._tokens_r[at_r]
        self._move_cache(at_r, is_last=True)

    def evict(self, waiting: Waiting) -> None:
        """Hand over the responses that are whole."""
        done_n = (~self._alive_r & (self._transcript.rows_r >= 0)).nonzero()[:, 0]
        if len(done_n):
            taken = self._transcript.take(done_n, self._limits_r[done_n], self._sampling.stop_token_ids)
            waiting.finish(taken)

    def _agreed(self, num: int, drawn: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """The last stage's tokens, and its log-probabilities, or zeros on other stages."""
        if drawn is None:
            empty = torch.empty(num, dtype=torch.long, device=self._device)
            return self.forward.agree(empty), torch.zeros(num, device=self._device)
        return self.forward.agree(drawn[0]), drawn[1]

    def _mark_done(self) -> None:
        """Rows that stopped or reached the limit run no more."""
        if self._is_stop_v is not None:
            self._alive_r &= ~self._is_stop_v[self._tokens_r].cpu()
        self._alive_r &= self._transcript.drawn_r < self._limits_r
        self.num_alive = int(self._alive_r.sum())

    def _longest(self) -> int:
        """Tokens in the cache of the longest row that runs; its newest token is not there yet."""
        return int((self._prompt_lens_r + self._transcript.drawn_r - 1)[self._alive_r].max())

    def _make_room(self, *, is_last: bool) -> None:
        """Have a free slot, and few leading slots that no running row reaches. `is_last`: nobody enters any
        more.
        """
        cache = self.forward.cache
        lead = cache.length - self._longest()
        if cache.capacity == cache.length or lead > TRIM_FROM * cache.length:
            self._move_cache(None, is_last=is_last)

    def _move_cache(self, rows_r: Tensor | None, *, is_last: bool) -> None:
        """So the cache has no more than the longest row, a third of it, and `GROWTH` slots."""
        cache, longest = self.forward.cache, self._longest()
        drawn = 1 if not is_last else int(self._transcript.drawn_r[self._alive_r].min())
        left = self._sampling.max_new_tokens - drawn
        room = max(1, min(left, max(GROWTH, longest // 8)))
        cache.keep(rows_r, longest + room, lead=cache.length - longest)


def decode(
    forward: DecodeForward, waiting: Waiting, sampling: Sampling, device: torch.device, *, num_slots: int
) -> Generator[None, None, None]:
    """Answer waiting rows, at most `num_slots` at once; it ends when the queue is closed and empty.

    Collective over the unit, and equal on all of its ranks but for log-probabilities. It pauses wherever the
    next stage has work, so that a stage which runs several of these by turns is not idle meanwhile; and where
    it has free slots that an open queue cannot fill.
    """
    run = _Run(forward, sampling, device, num_slots)
    while True:
        if run.wants_rows and len(waiting):
            yield from run.enter(waiting)
        elif run.wants_rows and waiting.is_open and not waiting.may_go_on():
            run.evict(waiting)
            waiting.is_wanted = True
            yield
        elif run.num_alive == 0 and not waiting.is_open:
            break
        elif run.num_alive == 0:
            yield  # the rows of another set run on
        else:
            if not waiting.is_open and not len(waiting):
                run.compact(waiting)
            yield from run.step(waiting)
    run.evict(waiting)
    forward.finish()


Runs = Sequence[Generator[None, None, None]]


def by_turns(runs: Runs, waiting: Waiting) -> Runs:
    """Advance all runs in turn until each has ended or one wants rows; returns those that have not ended."""
    going = list(runs)
    while going and not waiting.is_wanted:
        going = [run for run in going if _goes_on(run)]
    return going


def _goes_on(run: Generator[None, None, None]) -> bool:
    try:
        next(run)
    except StopIteration:
        return False
    return True


def _stop_table(stop_ids: Sequence[int], vocab_size: int, device: torch.device) -> Tensor | None:
    """Bool [v]: which tokens stop a row; None when none does."""
    known = [token for token in stop_ids if 0 <= token < vocab_size]
    if not known:
        return None
    table_v = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    table_v[known] = True
    return table_v
