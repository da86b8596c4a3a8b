"""cluster.yaml is what `ray up` takes: checked by Ray's own schema, without a cluster."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

CLUSTER_YAML = Path(__file__).parents[2] / "cluster.yaml"


@pytest.fixture
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(CLUSTER_YAML.read_text())
    return loaded


def test_ray_accepts_it(config: dict[str, Any]) -> None:
    validate_config(prepare_config(copy.deepcopy(config)))


def test_a_misspelt_key_is_caught(config: dict[str, Any]) -> None:
    config["setup_comands"] = config.pop("setup_commands")
    with pytest.raises(Exception, match="setup_comands"):
        validate_config(prepare_config(copy.deepcopy(config)))


def test_ray_starts_guarded(config: dict[str, Any]) -> None:
    start = config["head_start_ray_commands"][-1]
    for setting in ("RAY_AUTH_MODE=token", "RAY_enable_autoscaler_v2=0", "--dashboard-host=127.0.0.1"):
        assert setting in start
