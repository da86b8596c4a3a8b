"""The example for KubeRay says the same as cluster.yaml and Ray's environment here, and drains before it ends."""

from pathlib import Path
from typing import Any

import yaml

from alignedserve.cluster.ray_node import RAY_ENVIRONMENT
from alignedserve.config.sections.gateway import GatewayConfig

ROOT = Path(__file__).parents[3]
PARTS: dict[str, dict[str, Any]] = {
    part["kind"]: part for part in yaml.safe_load_all((ROOT / "deploy/kuberay/raycluster.yaml").read_text())
}
CLUSTER: dict[str, Any] = PARTS["RayCluster"]["spec"]
HEAD: dict[str, Any] = CLUSTER["headGroupSpec"]
WORKERS: dict[str, Any] = CLUSTER["workerGroupSpecs"][0]
PODS: list[dict[str, Any]] = [group["template"]["spec"] for group in (HEAD, WORKERS)]


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (one,) = pod["containers"]
    found: dict[str, Any] = one
    return found


def test_ray_has_the_environment_that_it_has_elsewhere() -> None:
    assert PARTS["ConfigMap"]["data"] == RAY_ENVIRONMENT
    name = PARTS["ConfigMap"]["metadata"]["name"]
    assert all(container(pod)["envFrom"] == [{"configMapRef": {"name": name}}] for pod in PODS)


def test_rays_ports_are_those_of_cluster_yaml() -> None:
    commands = yaml.safe_load((ROOT / "cluster.yaml").read_text())["worker_start_ray_commands"][-1]
    named = {name: value for name, value in HEAD["rayStartParams"].items() if name.endswith("-port")}
    assert [f"--{name}={port}" for name, port in named.items() if f"--{name}={port}" not in commands] == []
    assert WORKERS["rayStartParams"] == HEAD["rayStartParams"]


def test_rays_version_is_the_pinned_one() -> None:
    assert f"ray=={CLUSTER['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_serve_waits_for_the_nodes_that_are_there() -> None:
    command = container(PODS[0])["command"][-1]
    assert f"--nodes {1 + WORKERS['replicas']} " in command
    assert WORKERS["replicas"] == WORKERS["minReplicas"] == WORKERS["maxReplicas"]


def test_every_pod_has_shared_memory_and_the_time_to_drain() -> None:
    for pod in PODS:
        assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container(pod)["volumeMounts"]
        (memory,) = [volume for volume in pod["volumes"] if volume["name"] == "shared-memory"]
        assert memory["emptyDir"]["medium"] == "Memory"
        assert pod["terminationGracePeriodSeconds"] > GatewayConfig().drain_s + 30.0


def test_a_worker_drains_before_ray_ends_on_it() -> None:
    (*_, command) = container(PODS[1])["lifecycle"]["preStop"]["exec"]["command"]
    assert 'alignedserve drain "$POD_IP" --within' in command
    assert "POD_IP" in [variable["name"] for variable in container(PODS[1])["env"]]


def test_requests_come_to_the_gateways_that_are_ready() -> None:
    port = GatewayConfig().port
    (served,) = PARTS["Service"]["spec"]["ports"]
    assert served["targetPort"] == port
    for pod in PODS:
        assert container(pod)["readinessProbe"]["httpGet"] == {"path": "/ready", "port": port}
    assert PARTS["Service"]["spec"]["selector"] == {"ray.io/cluster": PARTS["RayCluster"]["metadata"]["name"]}
