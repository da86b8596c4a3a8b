"""cluster.yaml is what `ray up` takes, and starts Ray as `alignedserve serve` does."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError  # type: ignore[import-untyped]
from ray.autoscaler._private.util import prepare_config, validate_config

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
    start = cluster["head_start_ray_commands"][-1]
    variables, _, command = start.partition("&&")
    found = dict(re.findall(r"(\w+)=(\S+)", variables))
    assert found == RAY_ENVIRONMENT | {"RAY_AUTH_MODE": "token", "RAY_enable_autoscaler_v2": "0"}
    assert "--dashboard-host=127.0.0.1" in command
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in command


def test_setup_may_be_repeated(cluster: dict[str, Any]) -> None:
    appending = [line for line in cluster["setup_commands"] if ">>" in line]
    assert appending
    assert all("grep -qsxF" in line for line in appending)
