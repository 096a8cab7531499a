"""The files under deployments/: campaigns obey the configuration's rules, manifests hold together."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
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


def test_compose_obeys_the_published_schema_of_compose() -> None:
    pytest.importorskip("check_jsonschema", reason="needs the dev extra")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*command, str(FOLDER / "compose.yaml")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["cpu.Dockerfile", "cuda.Dockerfile"])
def test_an_image_passes_hadolint(name: str) -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs hadolint: the dev extra has it")
    done = subprocess.run(
        [program, str(FOLDER / "docker" / name)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["cpu.Dockerfile", "cuda.Dockerfile"])
def test_an_image_copies_what_exists_and_does_not_run_as_root(name: str) -> None:
    lines = (FOLDER / "docker" / name).read_text().splitlines()
    for line in lines:
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
    (user,) = (line.split()[1] for line in lines if line.startswith("USER "))
    assert any(f"useradd --uid {user} " in line for line in lines), "a number, which every host can check"


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


def test_the_kubernetes_manifests_pods_obey_the_schema_of_kubernetes() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs the dev extra")
    cluster = tree("ray/kuberay.yaml")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for number, group in enumerate(groups):
        name = f"{cluster['metadata']['name']}-{number}"
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, **group["template"]}
        kubernetes.validate(pod, kubernetes.latest_version(), strict=True)


def test_the_ray_cluster_obeys_the_schema_of_rays_launcher() -> None:
    schema = json.loads(Path(ray.autoscaler.__file__).with_name("ray-schema.json").read_text())
    jsonschema.validate(tree("ray/cluster.yaml"), schema)


def test_the_ray_cluster_starts_its_head_from_a_type_it_defines() -> None:
    cluster = tree("ray/cluster.yaml")
    assert cluster["head_node_type"] in cluster["available_node_types"]
    assert sum(kind.get("min_workers", 0) for kind in cluster["available_node_types"].values()) <= 8
