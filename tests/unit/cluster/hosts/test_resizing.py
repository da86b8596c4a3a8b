"""More and fewer workers while a cluster serves: what is planned, what is refused, what arguments are read."""

import random

import pytest

from alignedserve.cluster.hosts.resizing import Resize, RunningNode, parse_counts, plan_resize
from alignedserve.cluster.placement import NodeCapacity, NodeShare
from alignedserve.core.errors import ConfigError, ResourceError
from tests.support.marks import each


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
