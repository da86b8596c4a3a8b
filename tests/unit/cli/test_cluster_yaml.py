"""cluster.yaml is what `ray up` takes, and starts Ray as `alignedserve serve` does."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError  # type: ignore[import-untyped]
from ray.autoscaler._private.util import prepare_config, validate_config

from alignedserve.cli.commands.up import expected_nodes
from alignedserve.cluster.ray_node import RAY_ENVIRONMENT

FILE = Path(__file__).parents[3] / "cluster.yaml"


@pytest.fixture
def cluster() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return loaded


def validate(cluster: dict[str, Any]) -> None:
    validate_config(prepare_config(copy.deepcopy(cluster)))  # it writes into what it is given


def test_ray_takes_it(cluster: dict[str, Any]) -> None:
    validate(cluster)


@pytest.mark.parametrize(
    ("section", "key"), [(None, "setup_comands"), (None, "head_start_ray_command"), ("auth", "ssh_usr")]
)
def test_a_misspelt_key_is_caught(cluster: dict[str, Any], section: str | None, key: str) -> None:
    (cluster if section is None else cluster[section])[key] = "x"
    with pytest.raises(ValidationError, match=key):
        validate(cluster)


def test_ray_starts_as_on_one_machine(cluster: dict[str, Any]) -> None:
    for kind in ("head", "worker"):
        stop, start = cluster[f"{kind}_start_ray_commands"][:2]
        variables, _, command = start.partition("&&")
        found = dict(re.findall(r"(\w+)=(\S+)", variables))
        assert stop == "ray stop"
        no_pages = {"AUTOSCALER_METRIC_PORT": "-1", "DASHBOARD_METRIC_PORT": "-1"} if kind == "head" else {}
        assert found == RAY_ENVIRONMENT | {"RAY_AUTH_MODE": "token", "RAY_enable_autoscaler_v2": "0"} | no_pages
        assert "--object-store-memory=83886080" in command
        assert "--include-log-monitor=false" in command
    command = cluster["head_start_ray_commands"][1]
    assert "--include-dashboard=false" in command
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in command


def test_it_serves_when_ray_is_up(cluster: dict[str, Any]) -> None:
    assert "alignedserve up" in cluster["head_start_ray_commands"][-1]
    assert cluster["min_workers"] == cluster["max_workers"] == len(cluster["provider"]["worker_ips"])


def test_up_waits_for_the_nodes_that_ray_up_was_given(cluster: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "ray_bootstrap_config.yaml"
    assert expected_nodes(path) == 1
    path.write_text(FILE.read_text(encoding="utf-8"), encoding="utf-8")
    assert expected_nodes(path) == 3
    path.write_text("available_node_types: {head: {}, gpu: {min_workers: 4}, cpu: {min_workers: 1}}", encoding="utf-8")
    assert expected_nodes(path) == 6
    path.write_text("[nonsense", encoding="utf-8")
    assert expected_nodes(path) == 1


def test_setup_may_be_repeated(cluster: dict[str, Any]) -> None:
    appending = [line for line in cluster["setup_commands"] if ">>" in line]
    assert appending
    assert all("grep -qsxF" in line for line in appending)
