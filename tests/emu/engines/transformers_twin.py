"""The same model in transformers: the reference for logits, gradients and optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.batch import Scores, TokenBatch, TrainBatch
from nereus.emu.decoder import VALUE_HEAD, DecoderConfig
from nereus.emu.engines.torch.optimizer import AdamW
from tests.emu.engines.torch_cases import Random, TokenLoss


class Twin:
    """A float32 transformers model with the weights of `Random(config)`, and our value head beside it."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        fields = config.with_head("lm").to_hf()
        self.model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.for_model(fields.pop("model_type"), **fields), attn_implementation="eager"
        ).float()
        weights = joined(Random(config).tensors)
        self.score = weights.pop(VALUE_HEAD, torch.zeros(1, config.hidden_size)).requires_grad_()
        lost = self.model.load_state_dict(weights, strict=False)
        assert not lost.unexpected_keys, lost
        assert set(lost.missing_keys) <= {"lm_head.weight"}, lost
        self.model.tie_weights()

    def logits(self, tokens_bs: Tensor) -> Tensor:
        """[b, s, v] with gradient."""
        return self.model(tokens_bs).logits  # type: ignore[no-any-return]

    def scores(self, batch: TokenBatch, temperature: float = 1.0) -> Scores:
        """What the engine must return, with gradient; rows are cut out one by one."""
        t = batch.max_response
        if self.config.head == "value":
            hidden_bsh = self.model.model(batch.tokens_bs).last_hidden_state
            each_bs = F.linear(hidden_bsh, self.score).squeeze(-1)
            return Scores(values_bt=self._cut(each_bs, batch, t, before=True))
        logprobs_bsv = (self.logits(batch.tokens_bs) / temperature).log_softmax(-1)
        following_bs = F.pad(batch.tokens_bs[:, 1:], (0, 1))
        chosen_bs = logprobs_bsv.gather(-1, following_bs[..., None]).squeeze(-1)
        entropy_bs = -(logprobs_bsv.exp() * logprobs_bsv).sum(-1)
        return Scores(
            logprobs_bt=self._cut(chosen_bs, batch, t, before=True),
            entropy_bt=self._cut(entropy_bs, batch, t, before=True),
        )

    def rewards(self, batch: TokenBatch) -> Tensor:
        """The value head at each row's last token; [b]."""
        each_bs = F.linear(self.model.model(batch.tokens_bs).last_hidden_state, self.score).squeeze(-1)
        last_b = batch.prompt_lens_b + batch.response_lens_b - 1
        return each_bs.gather(1, last_b[:, None]).squeeze(1)

    def _cut(self, each_bs: Tensor, batch: TokenBatch, width: int, *, before: bool) -> Tensor:
        rows = []
        for row, prompt, response in zip(
            each_bs, batch.prompt_lens_b.tolist(), batch.response_lens_b.tolist(), strict=True
        ):
            start = prompt - before
            rows.append(F.pad(row[start : start + response], (0, width - response)))
        return torch.stack(rows)

    def parameters(self) -> dict[str, Tensor]:
        """Trained tensors by transformers' name; a tied one once."""
        named = dict(self.model.named_parameters())
        if self.config.head == "value":
            named.pop("lm_head.weight", None)
            named[VALUE_HEAD] = self.score
        return named

    def train(
        self,
        batch: TrainBatch,
        loss: TokenLoss,
        counts: GlobalCounts,
        adam: AdamW,
        *,
        steps: int = 2,
        learning_rate: float = 1e-2,
    ) -> tuple[list[float], list[float], dict[str, Tensor]]:
        """Losses and gradient norms of torch.optim.AdamW steps, and the last step's clipped gradients."""
        parameters = list(self.parameters().values())
        optimizer = torch.optim.AdamW(
            parameters, lr=learning_rate, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay
        )
        losses, norms = [], []
        for _ in range(steps):
            optimizer.zero_grad()
            share, _ = loss(self.scores(batch.batch, loss.temperature), batch, counts)
            share.backward()  # type: ignore[no-untyped-call]
            limit = float("inf") if adam.max_gradient_norm is None else adam.max_gradient_norm
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, limit)))
            losses.append(float(share.detach()))
            optimizer.step()
        zero = {name: torch.zeros_like(p) for name, p in self.parameters().items()}
        grads = {n: zero[n] if p.grad is None else p.grad for n, p in self.parameters().items()}
        return losses, norms, parted(grads)

    def weights(self) -> dict[str, Tensor]:
        """Trained tensors by logical name."""
        return parted({name: p.detach() for name, p in self.parameters().items()})


def joined(logical: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as transformers holds them: gate and up of the experts of a layer are one."""
    out = dict(logical)
    for name in logical:
        if name.endswith("mlp.experts.gate_proj.weight"):
            at = name.removesuffix("gate_proj.weight")
            parts = [out.pop(at + part) for part in ("gate_proj.weight", "up_proj.weight")]
            out[at + "gate_up_proj"] = torch.cat(parts, dim=1)
            out[at + "down_proj"] = out.pop(at + "down_proj.weight")
    return out


def parted(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `joined`."""
    out = dict(held)
    for name in held:
        if name.endswith("mlp.experts.gate_up_proj"):
            at = name.removesuffix("gate_up_proj")
            out[at + "gate_proj.weight"], out[at + "up_proj.weight"] = out.pop(name).chunk(2, dim=1)
            out[at + "down_proj.weight"] = out.pop(at + "down_proj")
    return out


@lru_cache(maxsize=8)
def frozen_twin(config: DecoderConfig) -> Twin:
    """A twin that no test may train."""
    return Twin(config)
