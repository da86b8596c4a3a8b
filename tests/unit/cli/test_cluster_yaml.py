"""cluster.yaml and the examples for clouds are what `ray up` takes, and start Ray as `alignedserve serve` does."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError  # type: ignore[import-untyped]
from ray.autoscaler._private.util import prepare_config, validate_config

from alignedserve.cli.commands.serving.serve import expected_nodes
from alignedserve.cluster.ray_node import RAY_ENVIRONMENT
from plugins.autoscaler.ray_autoscaler import read_autoscaler

ROOT = Path(__file__).parents[3]
FILE = ROOT / "cluster.yaml"
SEPARATE = ROOT / "cluster-disaggregated.yaml"
CLOUDS = sorted(ROOT.glob("examples/*.yaml"))


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(params=[FILE, SEPARATE, *CLOUDS], ids=lambda path: path.stem)
def any_cluster(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(request.param)


@pytest.fixture(params=CLOUDS, ids=lambda path: path.stem)
def cloud(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(request.param)


@pytest.fixture
def cluster() -> dict[str, Any]:
    return load(FILE)


def validate(cluster: dict[str, Any]) -> None:
    validate_config(prepare_config(copy.deepcopy(cluster)))  # it writes into what it is given


def test_ray_takes_it(any_cluster: dict[str, Any]) -> None:
    validate(any_cluster)


@pytest.mark.parametrize(
    ("section", "key"), [(None, "setup_comands"), (None, "head_start_ray_command"), ("auth", "ssh_usr")]
)
def test_a_misspelt_key_is_caught(any_cluster: dict[str, Any], section: str | None, key: str) -> None:
    (any_cluster if section is None else any_cluster[section])[key] = "x"
    with pytest.raises(ValidationError, match=key):
        validate(any_cluster)


def test_ray_starts_as_on_one_machine(any_cluster: dict[str, Any]) -> None:
    for kind in ("head", "worker"):
        stop, start = any_cluster[f"{kind}_start_ray_commands"][:2]
        variables, _, command = start.partition("&&")
        found = dict(re.findall(r"(\w+)=(\S+)", variables))
        assert stop == "ray stop"
        no_pages = {"AUTOSCALER_METRIC_PORT": "-1", "DASHBOARD_METRIC_PORT": "-1"} if kind == "head" else {}
        assert found == RAY_ENVIRONMENT | {"RAY_AUTH_MODE": "token", "RAY_enable_autoscaler_v2": "0"} | no_pages
        assert "--object-store-memory=83886080" in command
        assert "--include-log-monitor=false" in command
    command = any_cluster["head_start_ray_commands"][1]
    assert "--include-dashboard=false" in command
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in command


def test_it_serves_when_ray_is_up(cluster: dict[str, Any]) -> None:
    assert "alignedserve up" in cluster["head_start_ray_commands"][-1]
    assert cluster["min_workers"] == cluster["max_workers"] == len(cluster["provider"]["worker_ips"])


def test_separate_workers_differ_in_name_and_topology_alone(cluster: dict[str, Any]) -> None:
    separate = load(SEPARATE)
    assert separate.pop("cluster_name") != cluster.pop("cluster_name")
    up = separate["head_start_ray_commands"].pop()
    assert up == cluster["head_start_ray_commands"].pop() + " --set topology=disaggregated"
    assert separate == cluster


def test_up_waits_for_the_nodes_that_ray_up_was_given(cluster: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "ray_bootstrap_config.yaml"
    assert expected_nodes(path) == 1
    path.write_text(FILE.read_text(encoding="utf-8"), encoding="utf-8")
    assert expected_nodes(path) == 3
    path.write_text("available_node_types: {head: {}, gpu: {min_workers: 4}, cpu: {min_workers: 1}}", encoding="utf-8")
    assert expected_nodes(path) == 6
    path.write_text("[nonsense", encoding="utf-8")
    assert expected_nodes(path) == 1


def test_setup_may_be_repeated(any_cluster: dict[str, Any]) -> None:
    appending = [line for line in any_cluster["setup_commands"] if ">>" in line]
    assert appending
    assert all("grep -qsxF" in line for line in appending)


# --- clouds


def test_every_provider_has_an_example() -> None:
    assert [path.stem for path in CLOUDS] == ["aws", "gcp"]


def test_nodes_are_set_up_as_those_of_servers_one_owns(cloud: dict[str, Any], cluster: dict[str, Any]) -> None:
    for section in ("file_mounts", "rsync_exclude", "cluster_synced_files", "worker_start_ray_commands"):
        assert cloud[section] == cluster[section]
    assert cloud["head_start_ray_commands"][:-1] == cluster["head_start_ray_commands"][:-1]
    assert cloud["setup_commands"][2:] == cluster["setup_commands"]
    assert all(command.startswith("sudo apt-get ") for command in cloud["setup_commands"][:2])


def test_the_cluster_may_grow_to_what_ray_may_add(cloud: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "ray_bootstrap_config.yaml"
    path.write_text(yaml.safe_dump(cloud), encoding="utf-8")
    autoscaler = read_autoscaler(path)
    assert (autoscaler.max_workers, autoscaler.worker) == (4, {"CPU": 8.0})
    assert cloud["available_node_types"]["worker"]["max_workers"] == 4
    assert f"scaling.max_nodes={autoscaler.max_workers + 1}" in cloud["head_start_ray_commands"][-1]
    assert expected_nodes(path) == 2


def test_only_ssh_and_the_gateways_are_open_to_the_outside() -> None:
    (rule,) = load(ROOT / "examples" / "aws.yaml")["provider"]["security_group"]["IpPermissions"]  # besides Ray's own
    assert (rule["FromPort"], rule["ToPort"], rule["IpProtocol"]) == (8000, 8000, "tcp")
    assert rule["IpRanges"] == [{"CidrIp": "YOUR_CLIENTS_RANGE"}]  # a word that AWS refuses until it is filled in
    text = (ROOT / "examples" / "gcp.yaml").read_text(encoding="utf-8")
    assert "--allow tcp:8000 \\\n#     --source-ranges YOUR_CLIENTS_RANGE" in text


def test_no_head_starts_without_its_redis_where_the_storage_is_refused() -> None:
    """`eval` of nothing succeeds: what a refused address prints."""
    for path in (ROOT / "cluster.yaml", *(ROOT / "examples").glob("*.yaml"), ROOT / "docs/hosts.md"):
        text = path.read_text()
        asked = text.count("$(alignedserve ray-storage")
        assert asked == text.count('storage="$(alignedserve ray-storage') == text.count('&& eval "$storage"') > 0
