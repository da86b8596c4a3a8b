"""Several models on several nodes: their plans, their parts of a node, and orders about them. Without Ray."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from alignedserve.cluster import serving_cluster
from alignedserve.cluster.deployments import preparing
from alignedserve.cluster.deployments.logic import Deployment, DeploymentsLogic, DeploymentStage, SeenModels, View
from alignedserve.cluster.deployments.orders import (
    AddModel,
    AdminRequest,
    Answer,
    Models,
    OrderDone,
    OrderRefused,
    Remark,
    RemoveModel,
    ShowModels,
)
from alignedserve.cluster.deployments.planning import (
    PlannedModel,
    holding_of,
    models_for_node,
    plan_models,
    plan_one_more,
    planned_again,
)
from alignedserve.cluster.desired import FIRST_PAUSE_S, Health, ProcessState
from alignedserve.cluster.hosts import orders, ray_directory, succession
from alignedserve.cluster.hosts.orders import StoredOrders, give_order
from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.nodes.joining import Joining, needed_first
from alignedserve.cluster.nodes.members import HostedModel, Member
from alignedserve.cluster.nodes.plan import ClusterPlan, NodeResources
from alignedserve.cluster.nodes.ray_nodes import RayNode
from alignedserve.cluster.placement import NodeCapacity, NodeShare
from alignedserve.cluster.serving_cluster import ServingCluster
from alignedserve.config.sections import MIB
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.core.errors import NotEnoughMemory, PeerLost
from alignedserve.messages.handshake import Role
from alignedserve.scheduling.factory import resolve_policy
from tests.unit.cluster.driven_cluster import POCKET, started

GIB = 1024 * MIB


def node(index: int, available: int = 16 * GIB, gpus: tuple[str, ...] = ()) -> NodeResources:
    capacity = NodeCapacity(f"node-{index}", f"10.0.0.{index}", 4, gpus)
    return NodeResources(capacity, Machine(available, available // 2, 4, False, gpu_bytes=(8 * GIB,) * len(gpus)))


def model(deployment_id: str, nodes: Sequence[NodeResources], **decode: int) -> PlannedModel:
    config = resolve_policy(from_mapping({"decode": decode}))
    return PlannedModel(deployment_id, config, POCKET, frozenset(one.capacity.name for one in nodes))


def workers(plan: ClusterPlan) -> list[tuple[str, ...]]:
    return [share.workers for share in plan.shares]


def test_models_that_fit_share_every_node_with_names_of_their_own() -> None:
    nodes = [node(0), node(1)]
    plans = plan_models([model("", nodes), model("2", nodes)], nodes)
    assert workers(plans[""]) == [("worker-0",), ("worker-1",)]
    assert workers(plans["2"]) == [("worker-0.2",), ("worker-1.2",)]
    assert plans[""].gateways == ("gateway-0", "gateway-1")
    assert plans["2"].gateways == ()
    for one in nodes:
        held = [holding_of(plan.choices[one.capacity.name].config, plan.served, ()) for plan in plans.values()]
        assert sum(holding.host_bytes for holding in held) <= one.machine.available_bytes


def test_models_that_do_not_fit_together_have_nodes_of_their_own() -> None:
    nodes = [node(0, 4 * GIB), node(1, 4 * GIB)]
    large = {"kv_cache_bytes": 1200 * MIB, "swap_space_bytes": 0}
    plans = plan_models([model("", nodes, **large), model("2", nodes, **large)], nodes)
    assert [workers(plan) for plan in plans.values()] == [[("worker-0",), ()], [(), ("worker-0.2",)]]


def test_models_of_one_worker_each_are_on_different_nodes() -> None:
    nodes = [node(0), node(1)]
    plans = plan_models([model("", nodes, count=1), model("2", nodes, count=1)], nodes)
    assert [workers(plan) for plan in plans.values()] == [[("worker-0",), ()], [(), ("worker-0.2",)]]


def test_a_model_is_where_its_copies_are() -> None:
    nodes = [node(0), node(1)]
    plans = plan_models([model("", nodes), model("2", nodes[:1])], nodes)
    assert [workers(plan) for plan in plans.values()] == [[("worker-0",), ("worker-1",)], [("worker-0.2",), ()]]


def test_gpus_of_a_node_are_divided() -> None:
    nodes = [node(0, gpus=("cuda:0", "cuda:1"))]
    config = resolve_policy(from_mapping({"engine": {"device": "cuda"}}))
    models = [PlannedModel(one, config, POCKET, frozenset(["node-0"])) for one in ("", "2")]
    plans = plan_models(models, nodes)
    assert [plan.capacities[0].gpus for plan in plans.values()] == [("cuda:0",), ("cuda:1",)]


def test_a_model_for_which_no_node_has_room_is_named() -> None:
    nodes = [node(0, 4 * GIB), node(1, 4 * GIB)]
    with pytest.raises(NotEnoughMemory, match=r"no node has room for pocket beside the other models; alone node-0: "):
        plan_models([model("", nodes), model("2", nodes, kv_cache_bytes=8 * GIB)], nodes)


def test_one_more_model_gets_what_is_left() -> None:
    nodes, large = [node(0), node(1)], {"kv_cache_bytes": 8 * GIB, "swap_space_bytes": 0}
    wholes = {one.capacity.name: one.machine for one in nodes}
    first = plan_models([model("", nodes, count=1, **large)], nodes)[""]
    holdings = {"node-0": [holding_of(first.choices["node-0"].config, first.served, ())]}
    more = plan_one_more(model("2", nodes, **large), nodes, holdings, {"node-0": 1}, wholes)
    assert workers(more) == [(), ("worker-0.2",)]
    holdings["node-1"] = [holding_of(more.choices["node-1"].config, more.served, ())]
    with pytest.raises(NotEnoughMemory, match=r"node-0: .*; node-1: .* beside the models that are served"):
        plan_one_more(model("3", nodes, **large), nodes, holdings, {}, wholes)
    small = plan_one_more(model("3", nodes, kv_cache_bytes=64 * MIB), nodes, holdings, {}, wholes)
    assert workers(small) == [("worker-0.3",), ("worker-1.3",)]


def test_a_node_that_joins_works_first_for_the_model_with_the_fewest_nodes() -> None:
    nodes, large = [node(0, 4 * GIB), node(1, 4 * GIB), node(2, 4 * GIB)], {"kv_cache_bytes": 1200 * MIB}
    plans = plan_models([model("", nodes, **large), model("2", nodes, **large)], nodes)
    assert [sum(map(len, workers(plan))) for plan in plans.values()] == [2, 1]
    hosted = {one: HostedModel(plan, {}, None) for one, plan in plans.items()}
    prepared = [_part(plan, index) for plan in plans.values() for index in range(3)]
    members = [Member(None, one, None) for one in prepared]  # type: ignore[arg-type]
    assert list(needed_first(hosted, members)) == ["2", ""]
    planned = [planned_again(one, hosted[one].plan, ["node-3"]) for one in needed_first(hosted, members)]
    assert [one.deployment_id for one in models_for_node(planned, node(3, 4 * GIB))] == ["2"]
    assert [one.deployment_id for one in models_for_node(planned, node(3))] == ["2", ""]


def _part(plan: ClusterPlan, index: int) -> Any:
    share = plan.shares[index]

    class Part:
        pass

    part: Any = Part()
    part.share = share
    return part


def test_a_node_keeps_its_gateway_when_its_first_model_has_gone() -> None:
    share = NodeShare("node-0", "pool-0", decode=("worker-0",), gateways=(("gateway-0", 8000),), is_head=True)
    left = share.without_model()
    assert (left.workers, left.gateways, left.is_head, left.has_model) == ((), (("gateway-0", 8000),), True, False)


# --- orders


def test_an_order_is_answered_once_with_all_that_was_said(
    store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    said, channel = list[str](), StoredOrders("c")

    def answer(seconds: float) -> None:
        ((name, order),) = channel.take()
        assert order == RemoveModel("a")
        for text in ("one", "two"):
            channel.answer(name, Remark(text))
        assert channel.take() == []
        channel.answer(name, OrderDone("gone"))

    monkeypatch.setattr(orders, "time", type("Time", (), {"sleep": answer, "monotonic": lambda: 0.0}))
    assert give_order("c", RemoveModel("a"), said.append) == OrderDone("gone")
    assert said == ["one", "two"]
    assert store == {}


def test_what_a_driver_answers_to_orders_about_models(answered: Callable[[AdminRequest], Answer | None]) -> None:
    assert answered(RemoveModel("b")) == OrderRefused("no model is served as b; there are pocket")
    refused = answered(AddModel("/m", settings=("a=b",) * 65))
    assert isinstance(refused, OrderRefused)
    assert "too many settings" in refused.reason
    shown = answered(ShowModels())
    assert isinstance(shown, Models)
    assert [(one.name, one.phase) for one in shown.deployments] == [("pocket", "serving")]


def test_workers_that_do_not_start_are_told_to_users_and_gateways(
    cluster: ServingCluster, answered: Callable[[AdminRequest], Answer | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def state() -> str:
        shown = answered(ShowModels())
        assert isinstance(shown, Models)
        (pocket,) = shown.deployments
        return pocket.state

    assert state() == "serving"
    names = [name for member in cluster._members.values() for name in member.prepared.share.workers]
    healths = dict.fromkeys(names, Health(ProcessState.UP))
    monkeypatch.setattr(cluster, "healths", lambda: healths)
    monkeypatch.setattr(succession, "answers_so_far", lambda calls: {})
    monkeypatch.setattr(cluster, "_start_again", lambda name: None)
    clock = [0.0]
    monkeypatch.setattr(serving_cluster, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    healths[names[0]] = Health(ProcessState.FAILED, "no room for its cache")
    assert state().startswith(f"degraded: {len(names) - 1} of {len(names)} workers serve; {names[0]}: 1 failed start")
    healths.update(dict.fromkeys(names, healths[names[0]]))
    assert state().startswith(f"not serving: 0 of {len(names)} workers serve; {names[0]}: 1 failed start")
    assert not cluster._models.announced[0].is_failing  # the next start may succeed
    clock[0] = FIRST_PAUSE_S
    assert "starts again" in state()
    assert "2 failed starts" in state()
    assert cluster._models.announced[0].is_failing
    healths.update(dict.fromkeys(names, Health(ProcessState.UP)))
    assert state() == "serving"
    assert not cluster._models.announced[0].is_failing


@pytest.mark.usefixtures("announced")
def test_the_next_driver_goes_on_with_an_order_that_the_last_one_had_begun(
    store: dict[str, bytes], tmp_path: Path
) -> None:
    left = [Deployment("", "a"), Deployment("2", "b", DeploymentStage.DRAINING, "x")]
    following = started(tmp_path, {}, DeploymentsLogic(left, 2))
    store["c/order/x"] = msgspec.json.encode(RemoveModel("b"))
    assert following.check()
    assert ("c/order/x" in store, "c/answer/x" in store) == (True, False)
    following.stop()


def test_an_answer_that_ray_s_head_did_not_take_is_given_later(
    store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(key: str, value: bytes) -> None:
        raise PeerLost("away")

    store["c/order/x"] = msgspec.json.encode(RemoveModel("b"))
    channel = StoredOrders("c")
    channel.take()
    with monkeypatch.context() as away:
        away.setattr(ray_directory, "put", fail)
        channel.answer("x", OrderDone("gone"))
        with pytest.raises(PeerLost):
            channel.take()
    assert "c/answer/x" not in store
    assert channel.take() == []
    assert "c/answer/x" in store


# --- nodes that join


def test_a_node_that_joins_begins_nothing_for_a_model_that_is_about_to_end(
    cluster: ServingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining = cluster._joining
    joining.logic = DeploymentsLogic.of_start({"": "pocket", "2": "other"})
    joining.models["2"] = joining.models[""]
    member = cluster._members.pop("id-1")
    share = replace(member.prepared.share, deployment_id="2", decode=("worker-1.2",), gateways=())
    member.set_part(replace(member.prepared, share=share))
    joining.logic.order("x", RemoveModel("other"), 0.0)
    joining.logic.reconcile(SeenModels(views={"2": View(None, 0)}), 1.0)
    assert [row.phase for row in joining.logic.rows] == [DeploymentStage.SERVING, DeploymentStage.ENDING]
    monkeypatch.setattr(cluster, "add_node", lambda node: cluster._actors.setdefault(node.share.node, {}))
    cluster._admit(member)
    assert list(member.models) == [""]


def joining_of(nodes: Sequence[NodeResources], *deployment_ids: str) -> Joining:
    plans = plan_models([model(one, nodes) for one in deployment_ids], nodes)
    models = {one: HostedModel(plan, {}, "digest") for one, plan in plans.items()}
    return Joining(next(iter(plans.values())), models, "c", len(nodes))


def shares_of(joining: Joining, index: int, resources: NodeResources, *able: str) -> list[NodeShare]:
    """Return the shares of a node of this host that joins, with copies of these models."""
    host = RayNode(f"id-{index}", f"10.0.0.{index}", f"host-{index}", is_head=False)
    hosted = {one: joining.models[one] for one in able}
    return list(joining._take_shares(host, resources, hosted)[1])


def test_a_node_that_joins_has_a_gateway_and_workers_of_all_models_that_it_has() -> None:
    nodes = [node(0), node(1)]
    shares = shares_of(joining_of(nodes, "", "2"), 2, node(2), "", "2")
    assert [share.workers for share in shares] == [("worker-2",), ("worker-2.2",)]
    assert shares[0].gateways == (("gateway-2", 8000),)
    (first,) = shares_of(joining_of(nodes, "", "2"), 2, node(2), "")
    assert first.workers == ("worker-2",)
    bare, other = shares_of(joining_of(nodes, "", "2"), 2, node(2), "2")
    assert (bare.has_model, bare.workers, len(bare.gateways)) == (False, (), 1)
    assert other.workers == ("worker-2.2",)


def test_a_host_that_comes_back_has_what_it_had_of_the_models_that_are_left() -> None:
    nodes = [node(0), node(1)]
    joining = joining_of(nodes, "", "2", "3")
    former = tuple(one.plan.shares[1] for one in joining.models.values())
    joining.vacant["host-1", "10.0.0.1"] = [former]
    del joining.models[""], joining.models["3"]
    bare, other = shares_of(joining, 1, node(1), "2")
    assert (bare.node, bare.gateways, bare.workers) == ("node-1", (("gateway-1", 8000),), ())
    assert other == former[1]


def test_workers_of_a_model_that_is_added_load_without_disturbing_others(cluster: ServingCluster) -> None:
    members = {member.ray_node: member for member in cluster._members.values()}
    nodes = [node(index) for index in range(len(members))]
    plan = plan_models([model("", nodes), model("2", nodes)], nodes)["2"]
    parts = preparing._parts(plan, dict(zip(members, nodes, strict=True)), members)
    for part in (*parts.values(), *(member.prepared for member in members.values())):
        specs = [cluster._factory._spec(part, Role.DECODE_WORKER, name) for name in part.share.workers]
        assert {spec.joins_others for spec in specs} == {part.share.deployment_id == "2"}
