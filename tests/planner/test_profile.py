"""Clusters are read from the short form and from files, and mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.errors import ConfigError
from nereus.planner.profile import ClusterProfile, LinkClass, builtin_gpus, builtin_links, gpu_profile


def test_short_form_names_nodes_gpus_and_kind() -> None:
    cluster = ClusterProfile.parse("4x8xH200")
    assert cluster.num_gpus == 32
    assert cluster.gpu_kinds == ("H200",)
    assert cluster.pool("H200").gpus_per_node == 8
    assert cluster.link("H200", LinkClass.SCALE_UP).bandwidth_Bps == 450e9


def test_two_kinds_share_the_slower_network() -> None:
    cluster = ClusterProfile.parse("2x8xH100 + 4x8xA100-80")
    assert cluster.num_gpus == 48
    assert cluster.scale_out.bandwidth_Bps == gpu_network("A100-80")
    assert gpu_network("A100-80") < gpu_network("H100")


def gpu_network(kind: str) -> float:
    return builtin_links()[gpu_profile(kind).network].bandwidth_Bps


def test_gpu_count_fills_whole_nodes() -> None:
    assert ClusterProfile.parse("16xH100").pool("H100").num_nodes == 2
    assert ClusterProfile.parse("4xH100").pool("H100").gpus_per_node == 4
    with pytest.raises(ConfigError, match="whole nodes"):
        ClusterProfile.parse("12xH100")


@pytest.mark.parametrize("text", ["H100", "0x8xH100", "2x8x1xH100", "4x8xV9", "", "2x8xH100+2x8xH100"])
def test_wrong_short_forms_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        ClusterProfile.parse(text)


@pytest.mark.parametrize(
    "kind", ["A100-40", "A100-80", "H100", "H200", "B200", "L40S", "MI250X", "MI300X", "h100"]
)
def test_known_kinds_have_plausible_numbers(kind: str) -> None:
    gpu = gpu_profile(kind)
    assert 1e14 < gpu.peak_flops < 1e16
    assert 3e10 < gpu.memory_bytes < 3e11
    assert gpu.link in builtin_links()
    assert gpu.network in builtin_links()
    assert gpu.host_link in builtin_links()


def test_laptop_cores_serve_as_logical_gpus() -> None:
    cluster = ClusterProfile.parse("1x4xCPU")
    assert cluster.num_gpus == 4
    assert cluster.pool("CPU").gpu.peak_flops < 1e12


def test_every_measured_kind_is_nameable() -> None:
    assert all(gpu.name == name for name, gpu in builtin_gpus().items())


def test_file_defines_its_own_gpus_and_links(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(
        "pools:\n"
        "  - {nodes: 2, gpus_per_node: 4, gpu: Mine, link: wire}\n"
        "  - {nodes: 1, gpu: H100}\n"
        "network: ethernet-100\n"
        "gpus:\n"
        "  Mine: {peak_tflops: 100, memory_gb: 24, memory_gbps: 900, compute_units: 80, kernels: none,"
        " link: wire, network: ib-200, host_link: pcie4}\n"
        "links:\n"
        "  wire: {gbps: 12, latency_us: 5, efficiency: 0.5}\n"
    )
    cluster = ClusterProfile.load(str(path))
    assert cluster.num_gpus == 16
    assert cluster.link("Mine", LinkClass.SCALE_UP).name == "wire"
    assert cluster.scale_out.name == "ethernet-100"


@pytest.mark.parametrize(
    "text",
    [
        "pools: []",
        "pools: [{nodes: 1, gpu: H100}]\nspeed: 3",
        "pools: [{gpu: H100}]",
        "pools: [{nodes: 1, gpu: Nothing}]",
        "- a list",
        "pools: [",
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        ClusterProfile.from_yaml(path)


def test_stranger_kind_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no GPU of kind B200"):
        ClusterProfile.parse("1x8xH100").pool("B200")
