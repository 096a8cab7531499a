"""The files under deployments/: campaigns obey the configuration's rules, manifests hold together."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow

from nereus.config import CampaignConfig
from nereus.flows.deployments import POOL, common

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deployments"


def tree(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.parametrize("path", sorted((FOLDER / "campaigns").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_campaign_to_copy_obeys_every_rule(path: Path) -> None:
    config = CampaignConfig.model_validate(yaml.safe_load(path.read_text()))
    assert config.name == path.stem
    assert config.adaptation is not None


def test_prefects_own_form_names_the_flows_that_deploy_makes() -> None:
    deployments = tree("prefect.yaml")["deployments"]
    found = {}
    for deployment in deployments:
        module, _, attribute = deployment["entrypoint"].partition(":")
        flow = vars(import_module(module))[attribute]
        assert isinstance(flow, Flow)
        assert deployment["work_pool"]["name"] == POOL
        found[f"{flow.name}/{deployment['name']}"] = deployment["description"]
    assert found == {each.full_name: each.description for each in common()}


def test_compose_services_depend_on_services_that_exist_and_publish_on_loopback_only() -> None:
    services = tree("compose.yaml")["services"]
    for name, service in services.items():
        depends = service.get("depends_on", {})
        assert set(depends) <= set(services), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        dockerfile = service.get("build", {}).get("dockerfile")
        assert dockerfile is None or (ROOT / dockerfile).is_file()
    assert "?choose a password" in services["postgres"]["environment"]["POSTGRES_PASSWORD"]


@pytest.mark.parametrize("name", ["cpu.Dockerfile", "cuda.Dockerfile"])
def test_an_image_copies_what_exists_and_does_not_run_as_root(name: str) -> None:
    lines = (FOLDER / "docker" / name).read_text().splitlines()
    for line in lines:
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["nereus"]


def test_the_kubernetes_manifest_mounts_only_volumes_it_has() -> None:
    spec = tree("ray/kuberay.yaml")["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    limits = groups[1]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert "nvidia.com/gpu" in limits


def test_the_ray_cluster_starts_its_head_from_a_type_it_defines() -> None:
    cluster = tree("ray/cluster.yaml")
    assert cluster["head_node_type"] in cluster["available_node_types"]
    assert sum(kind.get("min_workers", 0) for kind in cluster["available_node_types"].values()) <= 8
