"""The time to generate responses: prefill, then decoding integrated over the survival of their lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nereus.emu.decoder import DecoderConfig
from nereus.planner.calibration import Calibration
from nereus.planner.collective_time import point_to_point_s
from nereus.planner.kernel_time import context_attention_s, decode_attention_s, kernel_table
from nereus.planner.layer_time import head_forward, layer_forward
from nereus.planner.profile import ClusterProfile, LinkClass
from nereus.planner.shard_size import heads_per_rank
from nereus.planner.workload import ModelStage, Workload

Floats = NDArray[np.float64]

_PREFILL_TOKENS = 8192  # tokens an engine takes into one prefill step
_POINTS_PER_OCTAVE = 6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _DecodeTable:
    """Times of one decode step for every tp, on a logarithmic grid of batch sizes: [tp, batch]."""

    log_batch: Floats
    layer: Floats
    head: Floats

    def lookup(self, table: Floats, row: NDArray[np.intp], batch: Floats) -> Floats:
        """Interpolate `table` at `batch` sequences, linear in the logarithm of the batch."""
        at = np.log2(np.maximum(batch, 1.0)) * _POINTS_PER_OCTAVE
        low = np.minimum(at.astype(np.intp), len(self.log_batch) - 2)
        share = at - low
        return np.asarray(table[row, low] * (1 - share) + table[row, low + 1] * share)


def generation_terms(
    model_stage: ModelStage,
    tp: Floats,
    pp: Floats,
    dp: Floats,
    *,
    workload: Workload,
    cluster: ClusterProfile,
    gpu_kind: str,
    calibration: Calibration,
) -> dict[str, Floats]:
    """Seconds by term for candidates of shape [n].

    Only (tp, pp, sequences of a unit) decide, so equal triples are priced once.
    """
    per_unit = np.ceil(workload.num_generated / dp)
    keys, inverse = np.unique(np.stack((tp, pp, per_unit)), axis=1, return_inverse=True)
    model = _Generation(workload.shape(model_stage), workload, cluster, gpu_kind, calibration)
    terms = model.terms(*keys)
    return {name: term[inverse.ravel()] for name, term in terms.items()}


@dataclass(frozen=True, slots=True)
class _Generation:
    shape: DecoderConfig
    workload: Workload
    cluster: ClusterProfile
    gpu_kind: str
    calibration: Calibration

    def terms(self, tp: Floats, pp: Floats, per_unit: Floats) -> dict[str, Floats]:
        limit = np.inf if self.workload.max_resident is None else float(self.workload.max_resident)
        resident = np.minimum(per_unit, limit)
        sizes, row = np.unique(tp, return_inverse=True)
        table = self._decode_table(sizes, float(resident.max()))
        decode = self._decode(table, row.ravel(), tp, pp, per_unit, resident)
        gain = self.calibration.decode
        return {
            "prefill": self._prefill(tp, pp, per_unit) * self.calibration.prefill,
            **{name: term * gain for name, term in decode.items() if name != "host"},
            "host": decode["host"],
        }

    def _decode_table(self, sizes: Floats, largest: float) -> _DecodeTable:
        count = int(np.ceil(np.log2(max(largest, 2.0)) * _POINTS_PER_OCTAVE)) + 2
        batch = 2.0 ** (np.arange(count) / _POINTS_PER_OCTAVE)
        grid = (batch[None, :], sizes[:, None])
        layer = layer_forward(
            self.shape, *grid, cluster=self.cluster, gpu_kind=self.gpu_kind, calibration=self.calibration
        )
        head = head_forward(
            self.shape, *grid, cluster=self.cluster, gpu_kind=self.gpu_kind, calibration=self.calibration
        )
        return _DecodeTable(log_batch=np.log2(batch), layer=layer.total, head=head)

    def _decode(
        self,
        table: _DecodeTable,
        row: NDArray[np.intp],
        tp: Floats,
        pp: Floats,
        per_unit: Floats,
        resident: Floats,
    ) -> dict[str, Floats]:
        """Sum over cells of width * P(any alive) * step(alive, context), after the full phase."""
        response, prompt = self.workload.response, self.workload.prompt_tokens
        nodes = response.nodes()
        age = response.mean_square / (2 * response.mean)  # mean age of a response met at a random moment
        # Share of responses that start after another has ended: 0 when all fit at once, then the drain is
        # not fresh.
        queued = np.minimum(1.0, (per_unit - resident) / resident)
        total = {name: np.zeros_like(tp) for name in ("weights", "attention", "head", "pipeline", "host")}

        def add(steps: Floats, alive: Floats, context: Floats | float) -> None:
            for name, seconds in self._step(table, row, tp, pp, alive, context).items():
                total[name] = total[name] + steps * seconds

        add(np.maximum(per_unit - resident, 0.0) * response.mean / resident, resident, prompt + age)
        for position, width, fresh, residual in zip(
            nodes.positions, nodes.widths, nodes.survival, nodes.residual, strict=True
        ):
            survival = (1 - queued) * fresh + queued * residual
            some = 1.0 - (1.0 - np.minimum(survival, 1.0)) ** resident
            alive = np.maximum(resident * survival / np.maximum(some, 1e-12), 1.0)
            add(width * some, alive, prompt + position + queued * age)
        return total

    def _step(
        self,
        table: _DecodeTable,
        row: NDArray[np.intp],
        tp: Floats,
        pp: Floats,
        alive: Floats,
        context: Floats | float,
    ) -> dict[str, Floats]:
        """One token for every living sequence: pp groups pass through pp stages, each stage once a group."""
        group = np.maximum(alive / pp, 1.0)
        _, kv = heads_per_rank(self.shape, tp)
        gpu = self.cluster.pool(self.gpu_kind).gpu
        kv_bytes = 2 * self.workload.dtype_bytes * kv * self.shape.head_dim * group * context
        layers = float(self.shape.num_layers)
        attention = decode_attention_s(gpu, kv_bytes) * self.calibration.decode_attention
        hop = self._hop(tp, pp, group)
        return {
            "weights": layers * table.lookup(table.layer, row, group),
            "attention": layers * attention,
            "head": table.lookup(table.head, row, group),
            "pipeline": np.where(pp > 1, pp * hop, 0.0),
            "host": np.full_like(tp, kernel_table(gpu).decode_step_s + self.calibration.host_s),
        }

    def _hop(self, tp: Floats, pp: Floats, tokens: Floats) -> Floats:
        """Seconds to hand `tokens` hidden states on; across nodes once the unit leaves its node."""
        size = self.workload.dtype_bytes * tokens * self.shape.hidden_size
        per_node = self.cluster.pool(self.gpu_kind).gpus_per_node
        near = (
            point_to_point_s(self.cluster, self.gpu_kind, size, LinkClass.SCALE_UP)
            * self.calibration.scale_up
        )
        far = (
            point_to_point_s(self.cluster, self.gpu_kind, size, LinkClass.SCALE_OUT)
            * self.calibration.scale_out
        )
        return np.asarray(np.where(tp * pp <= per_node, near, far))

    def _prefill(self, tp: Floats, pp: Floats, per_unit: Floats) -> Floats:
        """Prompts in chunks of at most 8,192 tokens, pipelined over the stages."""
        tokens = per_unit * self.workload.prompt_tokens
        chunk = np.minimum(tokens, max(_PREFILL_TOKENS, self.workload.prompt_tokens))
        layer = layer_forward(
            self.shape, chunk, tp, cluster=self.cluster, gpu_kind=self.gpu_kind, calibration=self.calibration
        ).total
        query, _ = heads_per_rank(self.shape, tp)
        gpu = self.cluster.pool(self.gpu_kind).gpu
        layer = layer + self.calibration.context_attention * context_attention_s(
            gpu, chunk * self.workload.prompt_tokens, query, self.shape.head_dim
        )
        stage = np.ceil(self.shape.num_layers / pp) * layer + np.where(pp > 1, self._hop(tp, pp, chunk), 0.0)
        return np.asarray((np.ceil(tokens / chunk) + pp - 1) * stage)
