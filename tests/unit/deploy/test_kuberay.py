"""The example for KubeRay is what its operator takes, says the same as cluster.yaml and Ray's environment, and drains.

`raycluster_v1_schema.json.gz` is the schema of `RayCluster` `v1` in KubeRay's own definition
(github.com/ray-project/kuberay, helm-chart/kuberay-operator/crds, commit feeaf72facab, Apache License 2.0), without
`status`.
"""

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

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


@pytest.fixture(scope="module")
def operator_schema() -> Draft202012Validator:
    packed = Path(__file__).with_name("raycluster_v1_schema.json.gz").read_bytes()
    return Draft202012Validator(closed(json.loads(gzip.decompress(packed))))


def closed(schema: Any) -> Any:
    """Return a schema of Kubernetes that refuses unknown fields, as `kubectl apply --validate=strict` does."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: closed(part) for name, part in schema.items()}
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields", False)
    if schema.get("type") == "object" and "properties" in schema and not is_open:
        parts["additionalProperties"] = False
    return parts


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (one,) = pod["containers"]
    found: dict[str, Any] = one
    return found


def test_the_operators_schema_takes_the_cluster(operator_schema: Draft202012Validator) -> None:
    assert [error.message for error in operator_schema.iter_errors(PARTS["RayCluster"])] == []


@pytest.mark.parametrize(
    ("group", "field", "value"), [("headGroupSpec", "replica", 1), ("headGroupSpec", "rayStartParams", ["a"])]
)
def test_the_operators_schema_refuses_mistakes(
    operator_schema: Draft202012Validator, group: str, field: str, value: object
) -> None:
    mistaken = copy.deepcopy(PARTS["RayCluster"])
    mistaken["spec"][group][field] = value
    assert [list(error.path)[:2] for error in operator_schema.iter_errors(mistaken)] == [["spec", group]]


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


def test_pods_have_no_rights_and_no_token_of_kubernetes() -> None:
    """As its standard `restricted` asks, which a namespace may hold pods to."""
    for pod in PODS:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        rights = container(pod)["securityContext"]
        assert rights == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
