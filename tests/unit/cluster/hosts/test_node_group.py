"""Ray's account of a node's workers: shares of CPUs and GPUs, and the bundles that hold them. Without Ray."""

from types import SimpleNamespace
from typing import Any

import pytest

from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.nodes.admission import NodeReport, differences
from alignedserve.cluster.nodes.members import resources_of
from alignedserve.cluster.nodes.ray_nodes import NodeGroup, RayNode, WorkerShare, bundles_of, worker_shares
from alignedserve.cluster.placement import NodeCapacity, NodeShare, engines_of
from alignedserve.config.sections import MIB, EngineConfig

ADDRESS = "10.0.0.1"


def shares_of(
    num_decode: int, num_cpus: float, gpus: tuple[str, ...] = (), threads: int | None = None, num_ranks: int = 1
) -> dict[str, WorkerShare]:
    share = NodeShare("node-1", "pool-1", ("prefill-1",), tuple(f"decode-{index}" for index in range(num_decode)))
    capacity = NodeCapacity("node-1", ADDRESS, 8, gpus)
    engine = EngineConfig(threads_per_worker=threads, tensor_parallel=num_ranks)
    return worker_shares(engines_of(share, engine, capacity), num_cpus)


def test_workers_take_a_cpu_for_each_of_their_threads() -> None:
    shares = shares_of(1, 8.0)
    assert shares == {"prefill-1": WorkerShare(0, 4.0, 0.0), "decode-0": WorkerShare(0, 4.0, 0.0)}
    assert bundles_of(shares, ADDRESS) == [{"CPU": 8.0}]
    shares = shares_of(1, 8.0, threads=1)
    assert bundles_of(shares, ADDRESS) == [{"CPU": 2.0}]


@pytest.mark.parametrize(
    ("num_cpus", "each", "in_all"), [(1.0, 0.3333, 0.9999), (2.0, 0.6666, 1.9998), (7.0, 2.0, 6.0)]
)
def test_more_threads_than_ray_counts_cpus_are_shares_of_what_it_counts(
    num_cpus: float, each: float, in_all: float
) -> None:
    shares = shares_of(2, num_cpus)
    assert {share.num_cpus for share in shares.values()} == {each}
    assert bundles_of(shares, ADDRESS) == [{"CPU": in_all}]


def test_each_gpu_is_a_bundle_of_its_own_and_whole() -> None:
    shares = shares_of(4, 10.0, ("cuda:0", "cuda:1"))
    assert [(share.bundle, share.num_gpus) for share in shares.values()] == [
        *((0, 0.3333), (1, 0.5), (0, 0.3333), (1, 0.5), (0, 0.3333))
    ]
    assert bundles_of(shares, ADDRESS) == [{"CPU": 3.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}]


def test_a_worker_of_two_ranks_has_both_gpus_in_one_bundle() -> None:
    shares = shares_of(2, 9.0, tuple(f"cuda:{index}" for index in range(4)), num_ranks=2)
    assert [(share.bundle, share.num_gpus) for share in shares.values()] == [(0, 1.0), (1, 2.0), (0, 1.0)]
    assert bundles_of(shares, ADDRESS) == [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 2.0}]


def test_workers_on_gpus_see_all_of_them_on_a_ray_that_others_started() -> None:
    """Such a Ray shows an actor its own alone, as number 0, where a worker asks for cuda:1."""
    group: Any = SimpleNamespace()
    found = NodeGroup(group, shares_of(1, 8.0, ("cuda:0", "cuda:1"))).options_of("decode-0")
    assert found["runtime_env"] == {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    assert "runtime_env" not in NodeGroup(group, shares_of(1, 8.0)).options_of("decode-0")


def test_where_ray_counts_no_cpu_or_no_worker_runs_the_group_still_marks_the_node() -> None:
    assert bundles_of(shares_of(1, 0.0), ADDRESS) == [{f"node:{ADDRESS}": 0.001}]
    assert bundles_of({}, ADDRESS) == [{f"node:{ADDRESS}": 0.001}]


def test_gpus_that_ray_does_not_count_are_not_used() -> None:
    machine = Machine(MIB, MIB, num_cores=4, has_bfloat16=False)
    report = NodeReport("v1", machine, gpus=("cuda:0", "cuda:1"), digests=("m",))
    found = RayNode("id", ADDRESS, "spare", is_head=False, num_cpus=4.0, num_gpus=1.0)
    assert differences({found: report}, report) == {}
    assert resources_of("node-1", found, report).capacity.gpus == ("cuda:0",)
    without = found._replace(num_gpus=0.0)
    assert "Ray counts none of its 2 GPUs" in differences({without: report}, report)[without]
