"""Hosts that do not reach each other, clocks that are apart, and ports that are taken, before anything starts."""

import socket
from dataclasses import replace

import pytest

from alignedserve.cluster.nodes.admission import NodeReport, Surveyor, apart, clocks_apart, open_port, unreached
from alignedserve.cluster.nodes.ray_nodes import RayNode
from alignedserve.cluster.preflight import check_machine
from alignedserve.config.sections import ModelSectionConfig
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.core.errors import AddressInUse, ResourceError
from alignedserve.runtime.model.served_model import resolve_model

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
