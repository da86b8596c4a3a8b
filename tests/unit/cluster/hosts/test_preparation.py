"""One more deployment is planned: what is refused beside those that serve."""

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cluster.deployments.orders import AddModel, ReplaceModel
from alignedserve.cluster.deployments.preparing import (
    Asleep,
    DeploymentSettings,
    HostedPlan,
    HostedPreparing,
    Surroundings,
)
from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.nodes.admission import NodeReport, Surveyor, apart, clocks_apart, open_port, unreached
from alignedserve.cluster.nodes.ray_nodes import RayNode
from alignedserve.cluster.preflight import check_machine
from alignedserve.config.model_settings import load_models
from alignedserve.config.sections import MIB, ModelSectionConfig
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.core.errors import AddressInUse, ConfigError, NotEnoughMemory, ResourceError
from alignedserve.core.request import LoraAdapter
from alignedserve.runtime.lora.loaded_adapters import loaded_file, with_loaded, write_changes
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.served_model import resolve_model
from tests.support.marks import each
from tests.support.models.lora_folders import write_adapter
from tests.support.models.tiny_llama import TINY_LLAMA
from tests.unit.cluster.driven_cluster import NODES, POCKET, joined

TOO_SMALL = Machine(MIB, MIB, 2, has_bfloat16=False)  # refuses what the names do not

Prepare = Callable[..., HostedPlan]


class Examined:
    """An examination that finds this machine, and the model there."""

    def __enter__(self) -> "Examined":
        return self

    def __exit__(self, *ended: object) -> None:
        pass

    def reports_that_come(self, device: str, models: Sequence[Path]) -> dict[RayNode, NodeReport]:
        return {NODES[0]: NodeReport("v", TOO_SMALL, digests=("digest",))}


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    settings = load_models(None, ["model.random_weights=true", "a.lora.adapters.terse=/terse"], ("a=/a", "b=/b"))
    serving = dict(zip(("", "2"), settings.own, strict=True))
    known = DeploymentSettings(settings, serving, tmp_path)
    joining, members = joined(tmp_path, {})
    around = Surroundings(tuple(members[:1]), joining.models, {"node-0": TOO_SMALL}, "cpu")
    examined: Any = Examined()
    preparing = HostedPreparing(known, lambda nodes: examined)
    return lambda deployment_id, order, replaced, *asleep: preparing.prepare(
        deployment_id, order, replaced, replace(around, asleep=Asleep(asleep))
    )


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    return str(tmp_path)


def test_a_model_is_not_called_as_an_adapter_of_another(prepare: Prepare, path: str) -> None:
    with pytest.raises(ConfigError, match="the adapter terse of a is called as another model"):
        prepare("3", AddModel(path=path, name="terse"), None)
    with pytest.raises(NotEnoughMemory):
        prepare("3", AddModel(path=path, name="c"), None)


def test_a_replacement_keeps_the_names_of_the_adapters(prepare: Prepare, path: str, tmp_path: Path) -> None:
    write_adapter(tmp_path / "terse", read_config(tmp_path))
    order = ReplaceModel(name="a", path=path, settings=(f"lora.adapters.terse={tmp_path / 'terse'}",))
    with pytest.raises(NotEnoughMemory):
        prepare("3", order, "")
    with pytest.raises(ConfigError, match="the adapter terse of b is called as another"):
        prepare("3", ReplaceModel(name="b", path=path, settings=order.settings), "2")


def test_a_model_is_not_called_as_an_adapter_that_was_loaded(prepare: Prepare, path: str, tmp_path: Path) -> None:
    write_changes(loaded_file(tmp_path, "2"), with_loaded({}, LoraAdapter("taken", "/taken", b"d" * 16)))
    with pytest.raises(ConfigError, match="taken is the name of an adapter that was loaded for b"):
        prepare("3", AddModel(path=path, name="taken"), None)


@each("name", ["docs", "small", "polite"])
def test_a_name_of_a_model_that_sleeps_is_taken(prepare: Prepare, path: str, name: str) -> None:
    docs = replace(POCKET, name="docs", aliases=("small",), adapters=(LoraAdapter("polite", "/polite", b"d" * 16),))
    by_name, by_alias = AddModel(path, name), AddModel(path, "c", (f"model.aliases=[{name}]",))
    for order in (by_name, by_alias):
        with pytest.raises(ConfigError, match=f"{name} is (a name of docs, )?a model on demand"):
            prepare("3", order, None, docs)
        with pytest.raises(NotEnoughMemory):
            prepare("3", order, None)


HEAD, SECOND, THIRD = (RayNode(f"id{n}", f"10.0.0.{n}", f"host{n}", is_head=n == 0) for n in range(3))
PLACES = {node: (node.address, 40_000 + number) for number, node in enumerate((HEAD, SECOND, THIRD))}
NOTHING: dict[RayNode, dict[str, str]] = {HEAD: {}, SECOND: {}, THIRD: {}}


def test_hosts_that_reach_each_other_are_all_used() -> None:
    assert apart(PLACES, NOTHING) == {}


@pytest.mark.parametrize(
    ("problems", "refused"),
    [
        ({HEAD: {"id1": "no answer"}}, "from host0 (10.0.0.0) to host1 (10.0.0.1), TCP port 40001 (no answer)"),
        ({SECOND: {"id0": "refused"}}, "from host1 (10.0.0.1) to host0 (10.0.0.0), TCP port 40000 (refused)"),
    ],
)
def test_a_host_that_the_head_is_apart_from_is_refused_with_where_from_and_where_to(
    problems: dict[RayNode, dict[str, str]], refused: str
) -> None:
    assert apart(PLACES, NOTHING | problems) == {SECOND: f"no connection {refused}"}


def test_of_two_that_are_apart_the_later_one_is_refused_and_none_for_a_refused_one() -> None:
    assert set(apart(PLACES, NOTHING | {THIRD: {"id1": "no answer"}})) == {THIRD}
    cut_off = {HEAD: {"id1": "x"}, SECOND: {"id0": "x", "id2": "x"}, THIRD: {"id1": "x"}}
    assert set(apart(PLACES, cut_off)) == {SECOND}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_listening_port_is_reached_and_a_closed_one_is_not(address: str) -> None:
    listener = open_port(address)
    place = listener.getsockname()[:2]
    assert unreached({"a": place, "b": place}) == {}
    listener.close()
    assert unreached({"a": place}) == {"a": "Connection refused"}
    assert unreached({}) == {}


def test_an_address_that_is_of_another_host_is_said_so() -> None:
    failure = Surveyor().open_port("192.0.2.1")
    assert isinstance(failure, ResourceError)
    assert "cannot listen at 192.0.2.1, the address that Ray gives it" in str(failure)


@pytest.mark.parametrize(
    ("clock", "ahead_s"), [(1000.0, None), (1009.0, None), (985.0, None), (1310.0, 300.0), (700.0, -300.0)]
)
def test_clocks_are_apart_beyond_what_asking_took(clock: float, ahead_s: float | None) -> None:
    report = NodeReport("v1", unix_s=clock)
    found = clocks_apart({HEAD: report, SECOND: replace(report, unix_s=None)}, 1000.0, 1010.0)
    assert found == ({} if ahead_s is None else {HEAD: ahead_s})


def test_a_port_that_is_taken_and_an_address_that_is_elsewhere_are_told_apart() -> None:
    served = resolve_model(ModelSectionConfig())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=rf"127.0.0.1:{port} .*is another server running there"):
            check_machine(from_mapping({"gateway": {"host": "127.0.0.1"}}), served, [port])
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(AddressInUse, match=r"no such address is on this host; gateway.host=node"):
            check_machine(from_mapping({"gateway": {"host": host}}), served, [port])
