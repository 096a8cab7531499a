"""Kernel times obey what any machine obeys, and tables survive a trip to disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.errors import ConfigError
from nereus.planner.kernel_file import table_of, write_table
from nereus.planner.kernel_fit import fit_gemm
from nereus.planner.kernel_time import (
    KernelModel,
    context_attention_s,
    decode_attention_s,
    gemm_s,
    kernel_table,
)
from nereus.planner.profile import builtin_gpus, gpu_profile

H100 = gpu_profile("H100")


@pytest.mark.parametrize("kind", sorted(builtin_gpus()))
def test_no_product_beats_the_roofline(kind: str) -> None:
    gpu = gpu_profile(kind)
    m, n, k = (
        axis.ravel() for axis in np.meshgrid([1, 16, 256, 4096], [1024, 8192, 28672], [1024, 4096, 14336])
    )
    time = gemm_s(gpu, m, n, k)
    compute = 2 * m * n * k / gpu.peak_flops
    memory = 2 * (m * k + n * k + m * n) / gpu.memory_bandwidth_Bps
    # Weights of small products stay in the cache between the runs of a benchmark: only large ones bind.
    large = memory > 2e-5
    assert (time >= compute).all()
    assert (time[large] >= 0.95 * memory[large]).all()
    assert (time < 40 * (compute + memory) + 1e-3).all()


@given(st.sampled_from([512, 2048, 8192]), st.sampled_from([1024, 4096, 16384]))
@settings(max_examples=20)
def test_eight_times_the_rows_never_cost_less(n: int, k: int) -> None:
    rows = np.array([1, 8, 64, 512, 4096, 32768])
    time = gemm_s(H100, rows, n, k)
    # 10 %: the library switches kernels between sizes; one row is slower than eight as measured, too.
    assert (np.diff(time) > -0.1 * time[:-1]).all()


def test_attention_grows_with_the_square_of_the_prompt_and_linearly_with_the_cache() -> None:
    short, long = context_attention_s(H100, 4, np.array([8192.0, 16384.0]), 32, 8, 128)
    assert 3.3 < long / short < 4.7
    few, many = decode_attention_s(H100, 64, np.array([8192.0, 16384.0]), 32, 8, 128)
    assert 1.7 < many / few < 2.3


def test_unmeasured_hardware_gets_the_conservative_table() -> None:
    assert kernel_table(gpu_profile("MI300X").kernels) == kernel_table("never heard of")
    assert kernel_table("never heard of").gemm.compute < kernel_table("H100").gemm.compute


def test_correction_weight_interpolates_between_constants_and_table() -> None:
    full, none = gemm_s(H100, 64, 4096, 4096), gemm_s(H100, 64, 4096, 4096, weight=0)
    half = gemm_s(H100, 64, 4096, 4096, weight=0.5)
    assert half == pytest.approx(np.sqrt(full * none))


def test_fit_recovers_the_machine_that_made_the_rows() -> None:
    truth = KernelModel(compute=0.7, memory=0.85, launch_s=4e-6, norm=2.5, waves=0.4)
    generator = np.random.default_rng(1)
    m, n, k = (2.0 ** generator.uniform(low, high, 3000) for low, high in ((0, 14), (7, 15), (7, 15)))
    noise = np.exp(generator.normal(0, 0.02, 3000))
    fitted = fit_gemm(H100, m, n, k, gemm_s(H100, m, n, k, model=truth) * noise)
    # 2 % noise on 3,000 rows; the grid may take up a little of the constants.
    assert fitted.compute == pytest.approx(truth.compute, rel=0.05)
    assert fitted.memory == pytest.approx(truth.memory, rel=0.05)
    assert fitted.launch_s == pytest.approx(truth.launch_s, rel=0.1)
    error = np.abs(gemm_s(H100, m, n, k, model=fitted) / gemm_s(H100, m, n, k, model=truth) - 1)
    assert error.mean() < 0.02


def test_tables_survive_a_trip_to_disk(tmp_path: Path) -> None:
    table = kernel_table("H100")
    path = tmp_path / "mine.json"
    write_table(path, table_of(table.gemm, table.context_attention, table.decode_attention))
    gpu = replace(H100, kernels=str(path))
    sizes = np.array([1.0, 100.0, 5000.0])
    # Constants keep four digits, residuals three decimals.
    assert gemm_s(gpu, sizes, 4096, 4096) == pytest.approx(gemm_s(H100, sizes, 4096, 4096), rel=2e-3)


def test_unreadable_table_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="kernel table"):
        kernel_table(str(path))
