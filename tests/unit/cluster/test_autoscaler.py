"""Reading and asking Ray's autoscaler, and clusters that cannot scale. Without Ray."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignedserve.cluster.launch import launch_cluster
from alignedserve.cluster.nodes.ray_nodes import RayNode
from alignedserve.config.model_settings import ModelSettings
from alignedserve.config.sections import ScalingConfig
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.core.errors import ConfigError, PeerLost
from plugins.autoscaler.logic import ScaledNode
from plugins.autoscaler.ray_autoscaler import Autoscaler, find_autoscaler, most_nodes, read_autoscaler
from plugins.autoscaler.scaler import NodeScaler, scaling_of

HEAD = RayNode("h", "10.0.0.1", "head", is_head=True, num_cpus=4.0)
SMALL = RayNode("s", "10.0.0.2", "small", is_head=False, num_cpus=8.0)
LARGE = RayNode("l", "10.0.0.3", "large", is_head=False, num_cpus=2.0, num_gpus=1.0)
SCALING = {"scaling": {"max_nodes": 3}}


def written(folder: Path, **changes: Any) -> Path:
    types = {
        "head": {"resources": {"CPU": 64}, "max_workers": 0},
        "small": {"resources": {"CPU": 8, "memory": 1}, "max_workers": 2},
        "large": {"resources": {"CPU": 4, "GPU": 1}, "max_workers": 1},
    }
    given = {"max_workers": 3, "head_node_type": "head", "available_node_types": types} | changes
    path = folder / "scaling.yaml"
    path.write_text(yaml.safe_dump(given), encoding="utf-8")
    return path


# --- the file


def test_a_node_that_is_added_is_the_strongest_that_ray_may_add(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert read_autoscaler(path) == Autoscaler(path, 3, {"CPU": 4.0, "GPU": 1.0})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_workers": 0}, "has none"),
        ({"available_node_types": {"head": {}}}, "has none"),
        ({"available_node_types": {"head": {}, "w": {"max_workers": 0}}}, "has none"),
        ({"available_node_types": ["w"]}, "is no file of Ray's autoscaler"),
        ({"available_node_types": {"w": {"resources": {"CPU": "many"}}}}, "is no file of Ray's autoscaler"),
        ({"available_node_types": {"w": {"resources": {"CPU": float("inf")}}}}, "is no file of Ray's autoscaler"),
        ({"max_workers": None}, "is no file of Ray's autoscaler"),
    ],
)
def test_a_file_that_adds_no_nodes_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_autoscaler(written(tmp_path, **changes))


def test_no_file_and_no_yaml_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "scaling.yaml"
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        read_autoscaler(path)
    path.write_text("[nonsense", encoding="utf-8")
    with pytest.raises(ConfigError, match="no file of Ray's autoscaler"):
        read_autoscaler(path)


# --- what is asked for


def test_a_bundle_of_each_node_is_all_that_it_has(tmp_path: Path) -> None:
    autoscaler = Autoscaler(tmp_path, 3, {"CPU": 8.0})
    assert autoscaler.request(3, HEAD, []) == [{"CPU": 4.0}, {"CPU": 8.0}, {"CPU": 8.0}]
    assert autoscaler.request(1, HEAD, [SMALL]) == [{"CPU": 4.0}]
    assert autoscaler.request(2, HEAD._replace(num_cpus=0.0), []) == [{"CPU": 8.0}]


def test_where_the_file_does_not_say_new_nodes_are_as_those_that_there_are(tmp_path: Path) -> None:
    autoscaler = Autoscaler(tmp_path, 3, {})
    assert autoscaler.request(2, HEAD, [SMALL, LARGE])[1] == {"CPU": 2.0, "GPU": 1.0}
    assert autoscaler.request(2, HEAD, []) == [{"CPU": 4.0}, {"CPU": 4.0}]


# --- where it runs


def test_the_autoscaler_is_that_of_the_ray_that_is_asked(tmp_path: Path) -> None:
    path = written(tmp_path)
    options = ["--gcs-address=10.9.9.9:1", f"--autoscaling-config={path}"]
    with subprocess.Popen([sys.executable, "-c", "input()", *options], stdin=subprocess.PIPE) as monitor:
        try:
            assert find_autoscaler("10.9.9.9:1").path == path
            with pytest.raises(ConfigError, match=r"scaling\.max_nodes needs Ray's autoscaler"):
                find_autoscaler("10.9.9.9:12")
        finally:
            monitor.kill()


def test_more_nodes_than_ray_may_add_are_refused(tmp_path: Path) -> None:
    autoscaler = Autoscaler(tmp_path, 2, {})
    assert most_nodes(ScalingConfig(max_nodes=3), autoscaler) == 3
    with pytest.raises(ConfigError, match=r"max_nodes is 4, and with max_workers 2 .* 3 nodes at most"):
        most_nodes(ScalingConfig(max_nodes=4), autoscaler)


@pytest.mark.parametrize("section", ["prefill", "decode"])
def test_workers_that_do_not_follow_the_nodes_are_refused(section: str) -> None:
    with pytest.raises(ConfigError, match=r"leave prefill\.count and decode\.count out"):
        scaling_of([from_mapping({**SCALING, section: {"count": 2}})], "10.9.9.9:1")


def test_one_host_without_ray_elsewhere_does_not_scale() -> None:
    with pytest.raises(ConfigError, match=r"scaling\.max_nodes is for a cluster of several hosts"):
        launch_cluster(ModelSettings(SCALING, ({},)), None)  # type: ignore[arg-type]


def test_what_did_not_reach_ray_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ask_for(bundles: list[dict[str, float]]) -> None:
        asked.append(len(bundles))
        if len(asked) == 1:
            raise PeerLost("Ray's head does not answer")

    monkeypatch.setattr(f"{NodeScaler.__module__}.ask_for", ask_for)
    made = NodeScaler(ScalingConfig(max_nodes=2), read_autoscaler(written(tmp_path)))
    seen = [ScaledNode(HEAD.node_id, is_head=True)]
    with pytest.raises(PeerLost):
        made.check([], seen, {HEAD.node_id: HEAD}.__getitem__)
    for _ in range(2):
        assert made.check([], seen, {HEAD.node_id: HEAD}.__getitem__) == []
    assert asked == [1, 1]
