"""Draining nodes: when one is moved and ended, which may be drained, and what orders are refused. Without Ray."""

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray.exceptions import RayError

from alignedserve.cluster.deployments.orders import (
    AdminRequest,
    DrainNode,
    NodeOrder,
    OrderDone,
    OrderRefused,
    ScaleWorkers,
    UndoDrain,
)
from alignedserve.cluster.desired import MOVING_S, ProcessDrain, WantedCluster
from alignedserve.cluster.drain_watch import DrainWatch
from alignedserve.cluster.hosts.orders import StoredOrders, give_order
from alignedserve.cluster.hosts.record import DRAINED, NodeRecord
from alignedserve.cluster.hosts.resizing import (
    Resize,
    RunningNode,
    node_called,
    parse_counts,
    plan_resize,
    require_drainable,
)
from alignedserve.cluster.placement import NodeCapacity, NodeShare
from alignedserve.core.errors import ConfigError, PeerLost, ResourceError
from tests.support.marks import each

NODE = ProcessDrain(("prefill-1", "decode-1", "pool-1"), ("gateway-1",), moves_s=60.0)
NOTHING = dict.fromkeys(NODE.names, 0)


def drains() -> WantedCluster:
    return WantedCluster({"node-1": NODE})


def test_a_drain_ends_when_nothing_is_left() -> None:
    going_on = drains()
    assert (going_on.workers, going_on.gateways) == (NODE.workers, NODE.gateways)
    assert going_on.finished(1.0, NOTHING | {"gateway-1": 2}) == []
    assert going_on.finished(1.0, NOTHING) == ["node-1"]
    del going_on.drains["node-1"]
    assert not going_on.workers
    assert not going_on.gateways


def test_what_has_not_answered_may_hold_something() -> None:
    assert drains().finished(1.0, {}) == []
    assert drains().finished(1.0, {name: 0 for name in NODE.names if name != "pool-1"}) == []


def test_what_is_left_in_the_end_is_moved_and_then_not_waited_for() -> None:
    going_on, busy = drains(), dict.fromkeys(NODE.names, 3)
    assert going_on.due_to_move(59.9) == ()
    assert going_on.due_to_move(60.0) == NODE.workers
    assert going_on.finished(60.0, busy) == []
    assert going_on.finished(60.0 + MOVING_S, busy) == ["node-1"]
    assert going_on.finished(60.0 + MOVING_S, {}) == ["node-1"]


def test_a_drain_can_be_given_another_time() -> None:
    going_on = drains()
    going_on.drains["node-1"] = ProcessDrain(NODE.workers, NODE.gateways, moves_s=5.0)
    assert going_on.due_to_move(5.0) == NODE.workers


def test_a_drain_goes_on_with_the_time_that_it_had_left_on_a_host_that_was_started_anew() -> None:
    going_on = drains()
    assert going_on.finished(50.0, {}) == []
    going_on.seen_s = 50.0
    for now in (5.0, 7.0):  # the second time on the same host
        going_on.resume(now)
    assert going_on.due_to_move(14.9) == ()
    assert going_on.due_to_move(15.0) == NODE.workers


RECORDS = (
    NodeRecord("node-0", "a", "10.0.0.1", "head"),
    NodeRecord("node-1", "b", "10.0.0.2", "twin"),
    NodeRecord("node-2", "c", "10.0.0.3", "twin", drain=DRAINED),
    NodeRecord("", "d", "10.0.0.4", "odd", problem="it has another Python"),
)


@pytest.mark.parametrize(("name", "node_id"), [("node-1", "b"), ("head", "a"), ("10.0.0.3", "c"), ("odd", "d")])
def test_a_node_is_called_by_name_host_or_address(name: str, node_id: str) -> None:
    assert node_called(RECORDS, name).node_id == node_id


@pytest.mark.parametrize(
    ("name", "problem"), [("twin", "more than one node is called twin"), ("x", "there is no node x")]
)
def test_an_unknown_or_ambiguous_name_is_refused_with_those_that_there_are(name: str, problem: str) -> None:
    with pytest.raises(ResourceError, match=rf"{problem}; there are node-0 \(head, 10.0.0.1\), node-1"):
        node_called(RECORDS, name)


HEAD = NodeShare("node-0", "pool-0", ("prefill-0",), ("decode-0",), is_head=True)
SHARE = NodeShare("node-1", "pool-1", ("prefill-1",), ("decode-1",))
BARE = NodeShare("node-2", "pool-2", gateways=(("gateway-2", 8000),))


@pytest.mark.parametrize(
    ("record", "share", "others", "problem"),
    [
        (RECORDS[0], HEAD, [SHARE], "node-0 is the head: the router"),
        (RECORDS[1], SHARE, [BARE], "node-1 has the last decode workers"),
        (RECORDS[1], SHARE, [NodeShare("node-3", "pool-3", decode=("decode-3",))], "the last prefill workers"),
        (RECORDS[2], None, [], "node-2 has drained already"),
        (RECORDS[3], None, [], "odd is not used: it has another Python"),
    ],
)
def test_what_may_not_be_drained_is_refused_by_name(
    record: NodeRecord, share: NodeShare | None, others: list[NodeShare], problem: str
) -> None:
    with pytest.raises(ResourceError, match=problem):
        require_drainable(record, None if share is None else [share], [[other] for other in others], is_forced=False)


def test_the_last_workers_are_drained_by_force_and_the_head_never() -> None:
    require_drainable(RECORDS[1], [SHARE], [[BARE]], is_forced=True)
    require_drainable(RECORDS[1], [SHARE], [[HEAD]], is_forced=False)
    require_drainable(RECORDS[1], [BARE], [], is_forced=False)
    with pytest.raises(ResourceError, match="is the head"):
        require_drainable(RECORDS[0], [HEAD], [[SHARE]], is_forced=True)


def test_workers_of_another_model_are_no_others() -> None:
    second = NodeShare("node-1", "pool-1.2", decode=("decode-1.2",), deployment_id="2")
    require_drainable(RECORDS[1], [SHARE, second], [[HEAD, replace(second, node="node-0")]], is_forced=False)
    with pytest.raises(ResourceError, match=r"the last decode workers \(decode-1\.2\)"):
        require_drainable(RECORDS[1], [SHARE, second], [[HEAD]], is_forced=False)


@pytest.mark.parametrize("order", [DrainNode("node-1", 60.0), UndoDrain("node-1"), ScaleWorkers({"decode": 2})])
def test_an_order_is_taken_and_answered_once(
    store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, order: NodeOrder
) -> None:
    seen, channel = list[AdminRequest](), StoredOrders("c")

    def drive(_: float) -> None:
        for name, taken in channel.take():
            seen.append(taken)
            channel.answer(name, OrderDone("done"))

    monkeypatch.setattr("alignedserve.cluster.hosts.orders.time.sleep", drive)
    assert give_order("c", order) == OrderDone("done")
    assert seen == [order]
    assert store == {}


def test_a_refused_order_raises_its_reason(store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    channel = StoredOrders("c")

    def drive(_: float) -> None:
        for name, _order in channel.take():
            channel.answer(name, OrderRefused("it is the head"))

    monkeypatch.setattr("alignedserve.cluster.hosts.orders.time.sleep", drive)
    with pytest.raises(ResourceError, match="it is the head"):
        give_order("c", UndoDrain("node-0"))


def test_an_order_without_an_answer_is_withdrawn(store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.cluster.hosts.orders._ANSWER_S", -1.0)
    with pytest.raises(PeerLost, match="driver of the cluster has not answered"):
        give_order("c", UndoDrain("node-0"))
    assert store == {}


@pytest.mark.parametrize("hostile", [b"", b"\xff", b"{}", b'{"type":"os.system"}', b'{"type":"DrainNode","node":7}'])
def test_an_order_that_cannot_be_read_is_refused_and_gone(store: dict[str, bytes], hostile: bytes) -> None:
    store["c/order/x"] = hostile
    assert StoredOrders("c").take() == []
    assert list(store) == ["c/answer/x"]
    assert "cannot be read" in msgspec.json.decode(store["c/answer/x"], type=OrderRefused).reason


class Calls:
    """An actor in this process: its calls are answered at once, or fail while it is down."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.is_down = False
        self.calls: list[tuple[object, ...]] = []
        self._answer = answer
        self.drain = SimpleNamespace(remote=self._call)

    def _call(self, *arguments: object) -> Any:
        if self.is_down:
            return RayError("it is restarted")
        self.calls.append(arguments)
        return self._answer(*arguments)


class Watched:
    """A watch, and what it watches."""

    def __init__(self) -> None:
        self.wanted = WantedCluster()
        self._watch = DrainWatch(self.wanted)

    def look(self, actors: dict[str, Any]) -> list[str]:
        """Return the drains that are over."""
        self._watch.look(actors)
        return self.wanted.finished(0.0, self._watch.left)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watched:
    def get(reference: Any) -> Any:
        if isinstance(reference, RayError):
            raise reference
        return reference

    monkeypatch.setattr("alignedserve.cluster.ray_node.ray.wait", lambda asked, timeout, num_returns=1: (asked, []))
    monkeypatch.setattr("alignedserve.cluster.ray_node.ray.get", get)
    return Watched()


def test_router_and_gateways_are_told_until_nothing_drains(watch: Watched) -> None:
    left = {"decode-1": 2}
    router = Calls(lambda draining, moved: {name: left.get(name, 0) for name in draining})
    gateway = Calls(lambda is_draining: 0)
    actors = {"router": router, "gateway-0": Calls(lambda is_draining: 9), "gateway-1": gateway}
    assert watch.look(actors) == []
    assert router.calls == gateway.calls == []
    watch.wanted.drains["node-1"] = ProcessDrain(("decode-1",), ("gateway-1",), moves_s=float("inf"))
    for _ in range(3):
        assert watch.look(actors) == []
    assert router.calls == [(("decode-1",), ())] * 3
    assert gateway.calls == [(True,)] * 3
    router.is_down = True
    left["decode-1"] = 0
    assert watch.look(actors) == []
    assert watch.look(actors) == []
    router.is_down = False
    assert watch.look(actors) == []
    assert watch.look(actors) == ["node-1"]
    del watch.wanted.drains["node-1"]
    for _ in range(3):
        assert watch.look(actors) == []
    assert router.calls[-1] == ((), ())
    assert gateway.calls[-1] == (False,)
    assert router.calls.count(((), ())) == gateway.calls.count((False,)) == 1


def test_a_gateway_that_is_gone_is_not_told(watch: Watched) -> None:
    router = Calls(lambda draining, moved: dict.fromkeys(draining, 0))
    gateway = Calls(lambda is_draining: 0)
    watch.wanted.drains["node-1"] = ProcessDrain(("decode-1",), ("gateway-1",), moves_s=float("inf"))
    watch.look({"router": router, "gateway-1": gateway})
    assert watch.look({"router": router, "gateway-1": gateway}) == ["node-1"]
    del watch.wanted.drains["node-1"]
    assert watch.look({"router": router}) == []
    assert gateway.calls == [(True,), (True,)]


def node(index: int, prefill: int = 1, decode: int = 1, cores: int = 4, gpus: int = 0) -> RunningNode:
    prefillers = tuple(f"prefill-{index}{number}" for number in range(prefill))
    decoders = tuple(f"decode-{index}{number}" for number in range(decode))
    capacity = NodeCapacity(f"node-{index}", f"10.0.0.{index}", cores, tuple(f"cuda:{one}" for one in range(gpus)))
    return RunningNode(NodeShare(f"node-{index}", f"pool-{index}", prefillers, decoders), capacity)


def test_workers_are_added_where_each_has_the_most() -> None:
    nodes = [node(0, cores=4), node(1, cores=12), node(2, 0, 0)]
    planned = plan_resize(nodes, {"decode": 4, "prefill": 3}, is_separate=True)
    assert planned == Resize((("decode", "node-1"), ("decode", "node-1"), ("prefill", "node-1")))


def test_workers_leave_where_each_has_the_least_and_a_node_keeps_one() -> None:
    nodes = [node(0, decode=3, cores=4), node(1, decode=3, cores=12)]
    planned = plan_resize(nodes, {"decode": 3}, is_separate=True)
    assert planned == Resize(removed=(("decode", "node-0"), ("decode", "node-0"), ("decode", "node-1")))
    with pytest.raises(ResourceError, match=r"2 nodes keep one decode worker each \(node-0, node-1\), so decode=1"):
        plan_resize(nodes, {"decode": 1}, is_separate=True)


def test_what_is_there_already_needs_nothing() -> None:
    assert plan_resize([node(0), node(1)], {"decode": 2, "prefill": 2}, is_separate=True) == Resize()


def test_a_gpu_has_one_worker() -> None:
    assert plan_resize([node(0, gpus=3)], {"decode": 2}, is_separate=True) == Resize((("decode", "node-0"),))
    for wanted in ({"decode": 3}, {"prefill": 2}):
        with pytest.raises(ResourceError, match="every GPU of the nodes"):
            plan_resize([node(0, gpus=3)], wanted, is_separate=True)


@pytest.mark.parametrize("wanted", [{"prefill": 1}, {"gateway": 2}, {"decode": -1}, {"decode": 10_001}])
def test_what_a_colocated_cluster_has_not_is_refused(wanted: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="decode=N"):
        plan_resize([node(0, prefill=0)], wanted, is_separate=False)


@each("seed", range(50))
def test_plans_give_what_was_asked_for(seed: int) -> None:
    rng = random.Random(seed)
    nodes = [node(index, rng.randrange(1, 4), rng.randrange(1, 4), rng.randrange(1, 64)) for index in range(4)]
    wanted = {"prefill": rng.randrange(4, 20), "decode": rng.randrange(4, 20)}
    planned = plan_resize(nodes, wanted, is_separate=True)
    for kind, count in wanted.items():
        counts = {one.share.node: len(getattr(one.share, kind)) for one in nodes}
        for changed, step in ((planned.added, 1), (planned.removed, -1)):
            for of_kind, name in changed:
                counts[name] += step * (of_kind == kind)
        assert sum(counts.values()) == count
        assert min(counts.values()) >= 1


def test_arguments_are_totals_by_kind() -> None:
    assert parse_counts(["decode=4", "prefill=02"]) == {"decode": 4, "prefill": 2}


@each(
    "given",
    [
        *([], ["decode"], ["decode="], ["decode=-1"], ["decode=1.5"], ["decode=\u0664"], ["gateway=2"], ["=4"]),
        *(["decode=1", "decode=2"], ["decode=" + "9" * 5000], ["x" * 100_000]),
    ],
)
def test_other_arguments_are_refused(given: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_counts(given)
    assert len(str(caught.value)) < 200
