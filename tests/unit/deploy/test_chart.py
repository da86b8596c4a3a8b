"""Helm renders the chart to what Kubernetes and its operators take, says no to what would not work, and drains.

Helm itself does it: the package `helm-python-sdk` is Helm's own library in a wheel, for Linux on x86. Nothing is
installed into a cluster. `kubernetes_schemas.json.gz` has the schemas by which each kind is checked, unknown fields
refused, without descriptions and `status`: those of Kubernetes 1.33 from the package kubernetes-validate 1.37.0,
`InferencePool` v1 (github.com/kubernetes-sigs/gateway-api-inference-extension, commit 84436a96b9e6), `HTTPRoute` v1
(github.com/kubernetes-sigs/gateway-api, commit 4564255ac2c3) and `ServiceMonitor` v1
(github.com/prometheus-operator/prometheus-operator, commit 6adcebc5076c); all Apache License 2.0.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from alignedserve.api.metrics.deployment_metrics import _GAUGES, _tiers
from alignedserve.cluster.ray_node import RAY_ENVIRONMENT
from alignedserve.config.environment import api_keys
from alignedserve.config.loading import load_config
from alignedserve.config.model_settings import load_models
from alignedserve.config.sections.gateway import GatewayConfig
from alignedserve.core.errors import ConfigError
from tests.gateway.monitoring.live_samples import BUSY_STATUS
from tests.unit.deploy.test_kuberay import CLUSTER, HEAD, closed

helm = pytest.importorskip("helm_python", reason="helm-python-sdk has wheels for Linux on x86 alone")

CHART = Path(__file__).parents[3] / "deploy/helm/alignedserve"
SECRETS: dict[str, Any] = {"auth": {"apiKeys": {"secret": "keys"}}}
RAY: dict[str, Any] = SECRETS | {"mode": "ray", "ray": {"tokenSecret": {"name": "token"}}}
EVERYTHING: dict[str, Any] = {
    "auth": {"keysFile": {"secret": "keys"}},
    "tls": {"secret": "certificate"},
    "gpus": 2,
    "model": "org/name@main",
    "config": {"batches": {"enabled": False}, "prefill": {"candidate_buffer_bytes": 81_920_000_000}},
    "replicas": 3,
    "image": {"repository": "registry.example/alignedserve", "digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "pull"}],
    "service": {"type": "LoadBalancer", "port": 443, "annotations": {"a": "b"}},
    "networkPolicy": {"egress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}]},
    "serviceMonitor": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "apiKey": {"secret": "prometheus", "key": "api-key"},
    },
    "podLabels": {"team": "a"},
    "podAnnotations": {"c": "d"},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "priorityClassName": "serving",
    "persistence": {"storageClass": "fast"},
    "extraEnv": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
}
POOL: dict[str, Any] = EVERYTHING | {
    "auth": {"allowAnonymous": True},
    "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
}
SHARED: dict[str, Any] = {
    **SECRETS,
    "autoscaling": {"enabled": True, "minReplicas": 2, "maxReplicas": 6},
    "redis": {"secret": "redis"},
    "persistence": {"shared": True, "storageClass": "files"},
    "config": {"batches": {"folder": "s3://bucket/prefix"}},
    "ingress": {"enabled": True, "className": "nginx", "host": "chat.example", "tlsSecret": "outside"},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "way-in", "namespace": "edge"}], "hostnames": ["a.example"]},
}
CASES = {
    "defaults": SECRETS,
    "everything": EVERYTHING,
    "no disk": SECRETS | {"persistence": {"enabled": False}, "networkPolicy": {"enabled": False}},
    "pool": POOL | {"httpRoute": SHARED["httpRoute"]},
    "shared": SHARED,
    "any host": SECRETS | {"ingress": {"enabled": True}, "httpRoute": SHARED["httpRoute"] | {"hostnames": []}},
    "ray": RAY,
    "ray with everything": EVERYTHING | RAY | {"auth": EVERYTHING["auth"], "replicas": 1},
}
ALERTS = CHART.parents[1] / "prometheus/alerts.yml"
RULE_FIELDS = {"alert", "expr", "for", "labels", "annotations"}  # of those that the operator takes
DOOR = {name: EVERYTHING[name] for name in ("auth", "tls")}
Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def chart() -> Any:
    with helm.Chart.load(CHART) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def validators() -> dict[str, Draft202012Validator]:
    own = Path(__file__).parent
    schemas = json.loads(gzip.decompress((own / "kubernetes_schemas.json.gz").read_bytes()))
    kinds: dict[str, Any] = {kind: closed(schema) for kind, schema in schemas["kinds"].items()}
    kinds["RayCluster"] = closed(json.loads(gzip.decompress((own / "raycluster_v1_schema.json.gz").read_bytes())))
    return {kind: Draft202012Validator(schema | {"$defs": schemas["$defs"]}) for kind, schema in kinds.items()}


def rendered(chart: Any, values: Manifest) -> dict[str, Manifest]:
    """Return the manifests by kind; the service of the pods' own names is `Service/pods`."""
    texts = chart.render(values, name="demo", namespace="prod")
    manifests = [one for name, text in texts.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text)]
    names = [one["kind"] + ("/pods" if one["metadata"]["name"].endswith("-pods") else "") for one in manifests if one]
    assert len(set(names)) == len(names)
    return dict(zip(names, filter(None, manifests), strict=True))


def pods_of(manifests: dict[str, Manifest]) -> list[Manifest]:
    if "StatefulSet" in manifests:
        return [manifests["StatefulSet"]["spec"]["template"]]
    spec = manifests["RayCluster"]["spec"]
    return [spec["headGroupSpec"]["template"], spec["workerGroupSpecs"][0]["template"]]


def containers_of(manifests: dict[str, Manifest]) -> list[Manifest]:
    return [pod["spec"]["containers"][0] for pod in pods_of(manifests)]


def settings_of(manifests: dict[str, Manifest]) -> Manifest:
    settings: Manifest = yaml.safe_load(manifests["ConfigMap"]["data"]["cluster.yaml"])
    return settings


def test_helm_has_nothing_against_the_chart() -> None:
    found = helm.lint(CHART, SECRETS, strict=True)
    worse = [message for message in found["messages"] if "icon" not in message["error"]]
    assert (worse, found["errors"]) == ([], [])


@pytest.mark.parametrize("case", CASES)
def test_kubernetes_takes_what_helm_makes(chart: Any, validators: dict[str, Draft202012Validator], case: str) -> None:
    for name, manifest in rendered(chart, CASES[case]).items():
        errors = [f"{error.json_path}: {error.message}" for error in validators[manifest["kind"]].iter_errors(manifest)]
        assert (name, errors) == (name, [])


@pytest.mark.parametrize(
    ("kind", "path"), [("StatefulSet", ("spec", "replica")), ("InferencePool", ("spec", "targetPort"))]
)
def test_the_schemas_refuse_mistakes(
    chart: Any, validators: dict[str, Draft202012Validator], kind: str, path: tuple[str, str]
) -> None:
    manifest = rendered(chart, POOL)[kind]
    manifest[path[0]][path[1]] = 1
    assert not validators[kind].is_valid(manifest)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "name a secret with keys"),
        ({"auth": {"keysFile": {"secret": "a"}, "apiKeys": {"secret": "b"}}}, "name one of the two"),
        (SECRETS | {"mode": "ray"}, "ray.tokenSecret.name"),
        (
            SECRETS | {"replicas": 2},
            r"share it \(redis.secret and persistence.shared\), set config.batches.enabled=false",
        ),
        (SECRETS | {"autoscaling": {"enabled": True}}, "persistence.shared"),
        (SECRETS | {"persistence": {"shared": True}}, "persistence.shared needs redis.secret"),
        (SHARED | {"persistence": {"shared": True, "enabled": False}}, "needs redis.secret and persistence.enabled"),
        (SHARED | {"persistence": {"existingClaim": "a"}}, "persistence.shared"),
        (SHARED | {"autoscaling": {"enabled": True, "minReplicas": 5}}, "minReplicas is above"),
        (SHARED | {"autoscaling": {"enabled": True, "waiting": 0, "running": 0, "late": 0}}, "must be above 0"),
        (RAY | {"autoscaling": {"enabled": True}}, "in mode ray it is ray.workers"),
        (RAY | {"persistence": {"shared": True}, "redis": {"secret": "a"}}, "persistence.shared is for mode pods"),
        (SECRETS | {"httpRoute": {"enabled": True}}, "httpRoute.parentRefs: name the Gateway"),
        (POOL | {"ingress": {"enabled": True}}, "would pass the endpoint picker by"),
        (SECRETS | {"config": {"gateway": {"port": 80}}}, "config.gateway.port is set by the chart: use port"),
        (SECRETS | {"config": {"gateway": {"count": 2}}}, "config.gateway.count: the service knows one port of a pod"),
        (RAY | {"config": {"gateway": {"count": 4}}}, "config.gateway.count: the service knows one port of a pod"),
        (RAY | {"config": {"gateway": {"count": 2}}}, "config.gateway.count: a pod without a gateway is never ready"),
        (SECRETS | {"config": {"model": {"path": "/models/a"}}}, "config.model.path is set by the chart: use model"),
        ({"auth": POOL["auth"], "inferencePool": {"enabled": True}}, "inferencePool.endpointPicker.name"),
        (SECRETS | {"inferencePool": POOL["inferencePool"]}, "the endpoint picker sends no key"),
        (SECRETS | {"serviceMonitor": {"enabled": True}}, "serviceMonitor.apiKey.secret"),
        (RAY | {"inferencePool": {"enabled": True}}, "inferencePool is for mode pods"),
        (RAY | {"replicas": 2}, "in mode ray it is ray.workers"),
        (SECRETS | {"mode": "swarm"}, "mode"),
        (SECRETS | {"replicas": -1}, "replicas"),
        (SECRETS | {"imagee": {}}, "imagee"),
        (SECRETS | {"model": "--set"}, "model"),
        (SECRETS | {"image": {"digest": "sha256:12"}}, "digest"),
    ],
)
def test_values_that_would_not_work_are_refused_by_name(chart: Any, values: Manifest, says: str) -> None:
    with pytest.raises(helm.HelmError, match=says):
        chart.render(values, name="demo")


@pytest.mark.parametrize(
    ("base", "gateway"),
    [(SECRETS, {"count": 4, "shared_port": True}), (RAY, {"count": 6, "shared_port": True}), (RAY, {"count": 3})],
)
def test_a_pod_may_have_several_gateways_of_one_port(chart: Any, base: Manifest, gateway: Manifest) -> None:
    settings = settings_of(rendered(chart, base | {"config": {"gateway": gateway}}))
    assert gateway.items() <= settings["gateway"].items()


@pytest.mark.parametrize("secret", ["", "one", "one, two"])
def test_an_empty_secret_lets_nobody_in(chart: Any, monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    for base in (SECRETS, RAY):
        for container in containers_of(rendered(chart, base)):
            names = [one["name"] for one in container["env"]]
            # Kubernetes puts the values of earlier variables in.
            assert names.index("SECRET_API_KEYS") < names.index("ALIGNEDSERVE_API_KEYS")
            (given,) = [one["value"] for one in container["env"] if one["name"] == "ALIGNEDSERVE_API_KEYS"]
            monkeypatch.setenv("ALIGNEDSERVE_API_KEYS", given.replace("$(SECRET_API_KEYS)", secret))
            if secret:
                assert api_keys() == tuple(secret.split(", "))
                continue
            with pytest.raises(ConfigError, match="holds no key"):
                api_keys()


@pytest.mark.parametrize("base", [SECRETS, RAY])
def test_several_models_are_those_of_the_configuration(chart: Any, base: Manifest, tmp_path: Path) -> None:
    models = [{"model": {"path": "/models/a"}}, {"model": {"path": "/models/b"}}]
    manifests = rendered(chart, base | {"config": {"models": models}})
    container = containers_of(manifests)[0]
    started = " ".join(container.get("args") or container["command"])
    assert "serve --" in started
    (tmp_path / "cluster.yaml").write_text(manifests["ConfigMap"]["data"]["cluster.yaml"])
    served = load_models(tmp_path / "cluster.yaml", (), ()).configs
    assert [config.model.path for config in served] == ["/models/a", "/models/b"]


@pytest.mark.parametrize("case", CASES)
def test_pods_write_into_their_volumes_alone_and_have_no_rights(chart: Any, case: str) -> None:
    for pod in pods_of(rendered(chart, CASES[case])):
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounted = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert mounted == {"/dev/shm", "/tmp", "/run/alignedserve", "/home/alignedserve", "/var/lib/alignedserve"}
        # A volume belongs to root, and is open to its group: folders that must be private are below it.
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert variables["ALIGNEDSERVE_RUN_DIR"] == "/run/alignedserve/own"
        assert variables["ALIGNEDSERVE_STATE_DIR"] == "/var/lib/alignedserve/state"
        assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_every_volume_that_is_mounted_is_there(chart: Any) -> None:
    for values in CASES.values():
        manifests = rendered(chart, values)
        claimed = [one["metadata"]["name"] for one in manifests.get("StatefulSet", {}).get("spec", {}).get(
            "volumeClaimTemplates", [])]  # fmt: skip
        if claim := manifests.get("PersistentVolumeClaim"):
            volumes = pods_of(manifests)[0]["spec"]["volumes"]
            assert {"claimName": claim["metadata"]["name"]} in [one.get("persistentVolumeClaim") for one in volumes]
        for pod in pods_of(manifests):
            there = {volume["name"] for volume in pod["spec"]["volumes"]} | set(claimed)
            assert {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]} == there


def test_the_page_of_draining_has_the_charts_time(chart: Any) -> None:
    (pod,) = pods_of(rendered(chart, SECRETS))
    page = (CHART.parents[2] / "docs/draining.md").read_text()
    assert f"`terminationGracePeriodSeconds: {pod['spec']['terminationGracePeriodSeconds']}`" in page


@pytest.mark.parametrize("base", [SECRETS, RAY], ids=["pods", "ray"])
def test_a_pod_has_the_time_to_drain_and_end(chart: Any, base: Manifest) -> None:
    manifests = rendered(chart, base | {"drainSeconds": 300})
    assert settings_of(manifests)["gateway"]["drain_s"] == 300
    for pod in pods_of(manifests):
        assert pod["spec"]["terminationGracePeriodSeconds"] > 300 + 30
        assert "preStop" in pod["spec"]["containers"][0]["lifecycle"]


@pytest.mark.parametrize("case", CASES)
def test_probes_ask_what_the_gateway_answers_where_it_listens(chart: Any, case: str) -> None:
    manifests = rendered(chart, CASES[case])
    settings = settings_of(manifests)["gateway"]
    for container in containers_of(manifests):
        assert container["readinessProbe"]["httpGet"] == {
            "path": "/ready",
            "port": "http",
            "scheme": "HTTPS" if "tls_key" in settings else "HTTP",
        }
        (port,) = [one["containerPort"] for one in container["ports"] if one["name"] == "http"]
        assert port == settings["port"] == GatewayConfig().port
    assert [one["targetPort"] for one in manifests["Service"]["spec"]["ports"]] == ["http"]


def test_services_budget_policy_and_pool_select_the_pods(chart: Any) -> None:
    for values in CASES.values():
        manifests = rendered(chart, values)
        selectors = [manifests["Service"]["spec"]["selector"]]
        for kind, field in (
            ("StatefulSet", "selector"),
            ("PodDisruptionBudget", "selector"),
            ("NetworkPolicy", "podSelector"),
            ("InferencePool", "selector"),
        ):
            if kind in manifests:
                selectors.append(manifests[kind]["spec"][field]["matchLabels"])
        for pod in pods_of(manifests):
            assert all(selector.items() <= pod["metadata"]["labels"].items() for selector in selectors)


def test_secrets_come_from_secrets(chart: Any) -> None:
    keys = containers_of(rendered(chart, SECRETS))[0]["env"]
    assert {"name": "SECRET_API_KEYS", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "api-keys"}}} in keys
    manifests = rendered(chart, EVERYTHING)
    settings = settings_of(manifests)["gateway"]
    mounts = {mount["mountPath"] for mount in containers_of(manifests)[0]["volumeMounts"]}
    for name in ("keys_file", "tls_certificate", "tls_key"):
        assert str(Path(settings[name]).parent) in mounts
    assert settings_of(manifests)["prefill"] == EVERYTHING["config"]["prefill"]  # no 8.192e+10


@pytest.mark.parametrize("case", ["defaults", "ray"])
def test_alignedserve_reads_the_settings(chart: Any, tmp_path: Path, case: str) -> None:
    values = CASES[case] | DOOR | {"config": {"scheduling": {"interference": 1.1}}}
    (tmp_path / "cluster.yaml").write_text(rendered(chart, values)["ConfigMap"]["data"]["cluster.yaml"])
    config = load_config(tmp_path / "cluster.yaml")
    assert (config.gateway.scheme, config.gateway.drain_s, config.scheduling.interference) == ("https", 60.0, 1.1)
    assert config.gateway.keys_file == "/etc/alignedserve/keys/keys.yaml"


def test_the_alerts_that_ship_are_rules_of_the_operator_where_they_are_wanted(chart: Any) -> None:
    assert "PrometheusRule" not in rendered(chart, EVERYTHING)
    wanted = SECRETS | {"prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}}
    rule = rendered(chart, wanted)["PrometheusRule"]
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())
    for group in rule["spec"]["groups"]:
        assert group.keys() == {"name", "rules"}
        assert all({"alert", "expr"} <= one.keys() <= RULE_FIELDS for one in group["rules"])


def test_several_pods_share_batches_by_a_redis_and_one_volume(chart: Any) -> None:
    manifests = rendered(chart, SHARED)
    (container,) = containers_of(manifests)
    reference = {"secretKeyRef": {"name": "redis", "key": "redis-url"}}
    assert {"name": "ALIGNEDSERVE_REDIS_URL", "valueFrom": reference} in container["env"]
    assert manifests["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert "volumeClaimTemplates" not in manifests["StatefulSet"]["spec"]
    assert rendered(chart, RAY)["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_pods_are_as_many_as_chat_needs_by_metrics_that_there_are(chart: Any) -> None:
    manifests = rendered(chart, SHARED)
    assert "replicas" not in manifests["StatefulSet"]["spec"]
    spec = manifests["HorizontalPodAutoscaler"]["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 6)
    assert spec["scaleTargetRef"]["name"] == manifests["StatefulSet"]["metadata"]["name"]
    assert spec["behavior"]["scaleDown"]["policies"][0]["periodSeconds"] > 60
    reported = {metric.name: metric.samples for metric in _tiers(BUSY_STATUS)} | {name: () for name, *_ in _GAUGES}
    for metric in (one["pods"]["metric"] for one in spec["metrics"]):
        labels = metric.get("selector", {}).get("matchLabels", {})
        assert not labels or labels in [sample.labels for sample in reported[metric["name"]]]
        assert metric["name"] in reported
    one_metric = SHARED | {"autoscaling": {"enabled": True, "waiting": 0, "running": 0, "late": 2}}
    (late,) = rendered(chart, one_metric)["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert late["pods"]["target"] == {"type": "AverageValue", "averageValue": "2"}


def test_ways_in_lead_to_the_service_or_to_the_pool(chart: Any) -> None:
    manifests = rendered(chart, SHARED)
    service = manifests["Service"]["metadata"]["name"]
    (rule,) = manifests["Ingress"]["spec"]["rules"]
    assert rule["host"] == "chat.example"
    assert rule["http"]["paths"][0]["backend"] == {"service": {"name": service, "port": {"name": "http"}}}
    assert manifests["HTTPRoute"]["spec"]["rules"][0]["backendRefs"] == [{"name": service, "port": 8000}]
    (pool,) = rendered(chart, CASES["pool"])["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    assert (pool["kind"], pool["name"]) == ("InferencePool", service)


@pytest.mark.parametrize(
    ("values", "said", "unsaid"),
    [
        (SECRETS, ["pods of the namespace prod alone"], ["ingress controller", "networkPolicy.egress"]),
        (SHARED, ["Name the ingress controller, the Gateway's pods there too"], ["Prometheus"]),
        (EVERYTHING, ["Prometheus", "addresses outside the cluster", "networkPolicy.egress"], ["the Redis"]),
        (SECRETS | {"networkPolicy": {"enabled": False}}, [], ["network policy"]),
        (
            SECRETS | {"networkPolicy": {"clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}},
            ["cidr: 10.0.0.0/8"],
            ["of the namespace prod alone"],
        ),
    ],
)
def test_the_notes_say_whom_the_network_policy_shuts_out(
    chart: Any, values: Manifest, said: list[str], unsaid: list[str]
) -> None:
    texts = chart.render(values, name="demo", namespace="prod")
    (notes,) = [text for name, text in texts.items() if name.endswith("NOTES.txt")]
    assert [words for words in said if words not in notes] == []
    assert [words for words in unsaid if words in notes] == []


def test_gpus_are_asked_for_and_used(chart: Any) -> None:
    manifests = rendered(chart, EVERYTHING)
    assert containers_of(manifests)[0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert settings_of(manifests)["engine"] == {"device": "cuda"}
    tagged = SECRETS | {"gpus": 1}
    assert containers_of(rendered(chart, tagged))[0]["image"] == "alignedserve:cuda-0.1.0"
    assert containers_of(rendered(chart, SECRETS))[0]["image"] == "alignedserve:cpu-0.1.0"


def test_a_cluster_by_the_operator_is_that_of_the_example(chart: Any) -> None:
    manifests = rendered(chart, RAY | {"ray": {"tokenSecret": {"name": "token"}, "workers": 4}})
    spec = manifests["RayCluster"]["spec"]
    assert spec["upgradeStrategy"] == CLUSTER["upgradeStrategy"] == {"type": "Recreate"}  # else old pods stay
    workers = spec["workerGroupSpecs"][0]
    assert workers["rayStartParams"] == spec["headGroupSpec"]["rayStartParams"] == HEAD["rayStartParams"]
    head, worker = containers_of(manifests)
    assert "--nodes 5 --config" in head["command"][-1]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 4
    assert 'alignedserve drain "$POD_IP" --within 60' in worker["lifecycle"]["preStop"]["exec"]["command"][-1]
    for container in (head, worker):
        assert RAY_ENVIRONMENT.items() <= {one["name"]: one.get("value") for one in container["env"]}.items()
    assert manifests["NetworkPolicy"]["spec"]["ingress"][1]["from"] == [
        {"podSelector": {"matchLabels": manifests["Service"]["spec"]["selector"]}}
    ]


def test_the_charts_versions_are_the_products() -> None:
    described = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (CHART.parents[2] / "pyproject.toml").read_text()
    assert f'version = "{described["appVersion"]}"' in project
    pins = (CHART.parents[2] / "constraints.txt").read_text().splitlines()
    assert f"ray=={yaml.safe_load((CHART / 'values.yaml').read_text())['ray']['version']}" in pins
