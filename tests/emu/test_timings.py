"""What calls of a worker take: collectives by spans, kernel classes by profiles within their budget."""

from __future__ import annotations

import time

import pytest
import torch

from nereus.emu.engines.torch.clock import span
from nereus.emu.kernel_times import KernelTimes, class_of
from nereus.emu.timings import TOTAL, Timings

CPU = torch.device("cpu")


def _work(rounds: int) -> None:
    x = torch.ones(96, 96, requires_grad=True)
    for _ in range(rounds):
        (x @ x).exp().sum().backward()


def test_a_span_counts_for_the_call_that_runs_and_for_no_other() -> None:
    timings = Timings(device=CPU)
    with span("tensor_parallel"):
        time.sleep(0.01)
    with timings.of("actor.training/train"), span("tensor_parallel"):
        time.sleep(0.02)
    with timings.of("actor.training/score"):
        pass
    taken = timings.take()
    assert 0.02 <= taken["actor.training/train"]["tensor_parallel"] <= taken["actor.training/train"][TOTAL]
    assert "tensor_parallel" not in taken["actor.training/score"]
    assert timings.take() == {}


def test_a_span_inside_one_of_the_same_name_counts_once() -> None:
    timings = Timings(device=CPU)
    began = time.perf_counter()
    with timings.of("a"), span("tensor_parallel"), span("tensor_parallel"):
        time.sleep(0.02)
    took_s = time.perf_counter() - began
    assert 0.02 <= timings.take()["a"]["tensor_parallel"] <= took_s


def test_a_call_that_raises_is_not_counted() -> None:
    timings = Timings(device=CPU)
    with pytest.raises(ValueError, match="no"), timings.of("a"):
        raise ValueError("no")
    with span("tensor_parallel"):
        pass
    assert timings.take() == {}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "gemm"),
        ("mkldnn::_linear_pointwise", "gemm"),
        ("sm90_xmma_gemm_bf16bf16", "gemm"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("void flash_fwd_kernel<traits>", "attention"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "collective"),
        ("gloo:all_reduce", "collective"),
        ("aten::exp", "elementwise"),
        ("aten::comma", "elementwise"),
    ],
)
def test_operations_and_kernels_are_known_by_name(name: str, kind: str) -> None:
    assert class_of(name) == kind


def test_a_profile_tells_the_classes_of_forward_and_backward() -> None:
    kernels = KernelTimes(device=CPU, share=1.0, watched_s=10.0)
    with kernels.around("train"):
        _work(rounds=20)
    shares = kernels.shares["train"]
    assert shares["gemm"] > 0
    assert shares["elementwise"] > 0
    assert sum(shares.values()) == pytest.approx(1.0)


def test_terms_add_up_to_the_call() -> None:
    timings = Timings(device=CPU)
    timings.kernels = KernelTimes(device=CPU, share=1.0, watched_s=10.0)
    with timings.of("train"):
        _work(rounds=20)
    terms = timings.take()["train"]
    assert terms["gemm"] + terms["attention"] + terms["elementwise"] == pytest.approx(terms[TOTAL])


def test_profiles_cost_at_most_their_share_of_the_calls() -> None:
    kernels = KernelTimes(device=CPU, share=0.05, _cost_s=0.01)
    profiled = 0
    for _ in range(200):
        before = kernels.spent_s
        with kernels.around("train"):
            time.sleep(0.005)
        profiled += kernels.spent_s > before
    assert profiled >= 1
    # The last profile may cost more than was expected of it, once.
    assert kernels.spent_s - kernels._cost_s <= 0.05 * kernels.watched_s


def test_spans_cost_less_than_a_percent_of_a_small_collective() -> None:
    timings, num = Timings(device=CPU), 2000
    with timings.of("train"):
        start = time.process_time()
        for _ in range(num):
            with span("tensor_parallel"):
                pass
        each_s = (time.process_time() - start) / num
    assert each_s < 2e-5  # an all-reduce on loopback takes 300 us and more; a span took 1.4 us of CPU time
