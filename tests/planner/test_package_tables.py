"""Tables are fitted from a package folder, and a missing package names the remedy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nereus.errors import DataError
from nereus.planner.kernel_time import KernelModel, context_attention_s, decode_attention_s, gemm_s
from nereus.planner.package_tables import (
    package_all_reduce,
    package_folder,
    package_kernels,
    package_systems,
)
from nereus.planner.profile import gpu_profile

H100 = gpu_profile("H100")
TRUTH = KernelModel(compute=0.7, memory=0.8, launch_s=5e-6, norm=2.0, waves=0.2)


def write(path: Path, **columns: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One system with rows of a machine that follows `TRUTH`; an older version holds nonsense."""
    generator = np.random.default_rng(0)
    m, n, k = (2.0 ** generator.integers(low, 14, 400) for low in (0, 7, 7))
    root = tmp_path / "box"
    time = np.concatenate((gemm_s(H100, m, n, k, model=TRUTH) * 1e3, np.full(400, 9.0)))
    write(
        root / "gemm/vllm/0.24.0/gemm_perf.parquet",
        gemm_dtype=["bfloat16"] * 400 + ["fp8"] * 400,
        m=np.tile(m, 2),
        n=np.tile(n, 2),
        k=np.tile(k, 2),
        latency=time,
    )
    write(
        root / "gemm/vllm/0.5.6/gemm_perf.parquet",
        gemm_dtype=["bfloat16"],
        m=[1.0],
        n=[1.0],
        k=[1.0],
        latency=[1e9],
    )
    b, heads = 2.0 ** generator.integers(0, 8, 300), 2.0 ** generator.integers(3, 7, 300)
    tokens = 2.0 ** generator.integers(5, 13, 300)
    common = {"batch_size": b, "num_heads": heads, "num_key_value_heads": heads / 4, "head_dim": [128] * 300}
    kinds = {"kv_cache_dtype": ["bfloat16"] * 300, "attn_dtype": ["bfloat16"] * 300, "window_size": [0] * 300}
    write(
        root / "attention/vllm/0.24.0/context_attention_perf.parquet",
        isl=tokens,
        latency=context_attention_s(H100, b, tokens, heads, heads / 4, 128, model=TRUTH) * 1e3,
        **common,
        **kinds,
    )
    write(
        root / "attention/vllm/0.24.0/generation_attention_perf.parquet",
        step=tokens - 1,
        latency=decode_attention_s(H100, b, tokens, heads, heads / 4, 128, model=TRUTH) * 1e3,
        **common,
        **kinds,
    )
    write(
        root / "comm/nccl/2.27.3/nccl_perf.parquet",
        op_name=["all_reduce"] * 4 + ["all_gather"],
        nccl_dtype=["half"] * 5,
        num_gpus=[2, 2, 4, 4, 2],
        message_size=[512, 1024, 512, 1024, 512],
        latency=[0.01, 0.02, 0.03, 0.04, 9.0],
    )
    return tmp_path


def test_newest_rows_of_the_right_kind_are_fitted(folder: Path) -> None:
    table = package_kernels("box", H100, folder=folder)
    m, n, k = np.array([1.0, 64.0, 4096.0]), np.full(3, 4096.0), np.full(3, 8192.0)
    # Exact rows of the same form; the smooth grid costs a percent.
    assert gemm_s(H100, m, n, k, model=table.gemm) == pytest.approx(
        gemm_s(H100, m, n, k, model=TRUTH), rel=0.05
    )


def test_message_sizes_are_elements_of_two_bytes(folder: Path) -> None:
    table = package_all_reduce("box", folder=folder)
    assert table.ranks == (2, 4)
    assert table.sizes_bytes == (1024.0, 2048.0)
    assert table(np.array([1024.0]), np.array([2.0]))[0] == pytest.approx(1e-5)


def test_systems_are_listed_and_strangers_refused(folder: Path) -> None:
    assert package_systems(folder) == ("box",)
    with pytest.raises(DataError, match="absent"):
        package_kernels("other", H100, folder=folder)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nereus.planner.package_tables.find_spec", lambda name: None)
    with pytest.raises(DataError, match="profiles"):
        package_folder()
