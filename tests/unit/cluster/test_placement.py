"""The plan of what runs where: counts by what nodes have or as configured, against brute force on small cases."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.nodes.admission import NodeReport, differences
from alignedserve.cluster.nodes.members import resources_of
from alignedserve.cluster.nodes.ray_nodes import NodeGroup, RayNode, WorkerShare, bundles_of, worker_shares
from alignedserve.cluster.placement import DeploymentPlacement, NodeCapacity, NodeShare, engines_of, first_gpus
from alignedserve.config.sections import MIB, ClusterConfig, EngineConfig, Topology
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.core.errors import ConfigError
from tests.support.marks import each

SEPARATE, COLOCATED = {"topology": "disaggregated"}, {"topology": "colocated"}


def config_of(topology: dict[str, str], **counts: int) -> ClusterConfig:
    return from_mapping({**topology, **{name: {"count": count} for name, count in counts.items()}})


def nodes(*cores: int) -> list[NodeCapacity]:
    return [NodeCapacity(f"node-{index}", f"10.0.0.{index}", count) for index, count in enumerate(cores)]


def test_without_counts_every_node_has_workers_a_pool_and_a_gateway() -> None:
    shares = DeploymentPlacement(config_of(SEPARATE)).place(nodes(2, 8, 2))
    assert [share.is_head for share in shares] == [True, False, False]
    assert [share.pool_name for share in shares] == ["pool-0", "pool-1", "pool-2"]
    assert [share.prefill for share in shares] == [("prefill-0",), ("prefill-1",), ("prefill-2",)]
    assert [share.decode for share in shares] == [("decode-0",), ("decode-1",), ("decode-2",)]
    assert [share.gateways for share in shares] == [
        (("gateway-0", 8000),),
        (("gateway-1", 8000),),
        (("gateway-2", 8000),),
    ]


def test_a_node_of_gpus_has_a_worker_on_each() -> None:
    gpus = NodeCapacity("node-0", "a", 64, tuple(f"cuda:{index}" for index in range(4)))
    (separate,) = DeploymentPlacement(config_of(SEPARATE)).place([gpus])
    (colocated,) = DeploymentPlacement(config_of(COLOCATED)).place([gpus])
    assert (len(separate.prefill), len(separate.decode)) == (2, 2)
    assert (len(colocated.prefill), len(colocated.decode)) == (0, 4)
    engines = engines_of(separate, config_of(SEPARATE).engine, gpus)
    assert {name: engine.device for name, engine in engines.items()} == {
        "prefill-0": "cuda:0",
        "prefill-1": "cuda:1",
        "decode-0": "cuda:2",
        "decode-1": "cuda:3",
    }


def test_a_worker_of_two_ranks_has_two_neighbouring_gpus() -> None:
    gpus = NodeCapacity("node-0", "a", 64, tuple(f"cuda:{index}" for index in range(5)))
    config = from_mapping({**COLOCATED, "engine": {"tensor_parallel": 2}})
    (share,) = DeploymentPlacement(config).place([gpus])
    engines = engines_of(share, config.engine, gpus)
    assert {name: engine.device for name, engine in engines.items()} == {"worker-0": "cuda:0", "worker-1": "cuda:2"}


@pytest.mark.parametrize(("gpus", "used"), [((0, 2, 3), ("cuda:2",)), ((1, 2, 4, 5), ("cuda:1", "cuda:4"))])
def test_ranks_never_take_a_gpu_that_is_another_models(gpus: tuple[int, ...], used: tuple[str, ...]) -> None:
    assert first_gpus([f"cuda:{number}" for number in gpus], 2) == used


@pytest.mark.parametrize("gpus", [("cuda:0",), ("cuda:0", "cuda:2")])
def test_ranks_without_neighbouring_gpus_are_refused_and_never_put_on_the_cpu(gpus: tuple[str, ...]) -> None:
    config = from_mapping({**COLOCATED, "engine": {"tensor_parallel": 2}})
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel is 2, but of the GPUs .* no 2 are neighbours"):
        DeploymentPlacement(config).place([NodeCapacity("node-0", "a", 64, gpus)])


def test_a_node_without_workers_may_have_any_gpus() -> None:
    config = from_mapping({**COLOCATED, "engine": {"tensor_parallel": 2}, "decode": {"count": 1}})
    placement = DeploymentPlacement(config)
    placement.place(nodes(4))
    node = NodeCapacity("node-1", "b", 64, ("cuda:0",))
    assert engines_of(placement.join(node), config.engine, node) == {}


def test_workers_of_a_node_share_its_cores() -> None:
    node = nodes(9)[0]
    (share,) = DeploymentPlacement(config_of(SEPARATE, decode=3)).place([node])
    engines = engines_of(share, config_of(SEPARATE).engine, node)
    assert {engine.threads_per_worker for engine in engines.values()} == {2}
    fixed = msgspec.structs.replace(config_of(SEPARATE).engine, threads_per_worker=5)
    assert {engine.threads_per_worker for engine in engines_of(share, fixed, node).values()} == {5}


def test_nodes_of_one_host_share_its_ports() -> None:
    pair = [NodeCapacity("node-0", "10.0.0.1", 2), NodeCapacity("node-1", "10.0.0.1", 2)]
    shares = DeploymentPlacement(config_of(COLOCATED)).place(pair)
    assert [share.gateways for share in shares] == [(("gateway-0", 8000),), (("gateway-1", 8001),)]


def test_gateways_may_share_one_port() -> None:
    config = from_mapping({**COLOCATED, "gateway": {"count": 3, "shared_port": True, "port": 9000}})
    (share,) = DeploymentPlacement(config).place(nodes(8))
    assert share.gateways == (("gateway-0", 9000), ("gateway-1", 9000), ("gateway-2", 9000))


def test_a_node_that_joins_follows_from_what_it_has_unless_counts_are_configured() -> None:
    placement = DeploymentPlacement(config_of(SEPARATE))
    placement.place(nodes(2, 2))
    joined = placement.join(NodeCapacity("node-2", "10.0.0.9", 2))
    assert (joined.prefill, joined.decode, joined.pool_name) == (("prefill-2",), ("decode-2",), "pool-2")
    assert joined.gateways == (("gateway-2", 8000),)
    assert not joined.is_head
    configured = DeploymentPlacement(config_of(SEPARATE, decode=2, gateway=1))
    configured.place(nodes(2, 2))
    assert configured.join(NodeCapacity("node-2", "10.0.0.9", 2)).num_workers == 0
    assert configured.join(NodeCapacity("node-3", "10.0.0.8", 2)).gateways == ()


def test_a_prefill_worker_never_stands_alone() -> None:
    shares = DeploymentPlacement(config_of(SEPARATE, prefill=3, decode=2)).place(nodes(4, 2, 8))
    assert [(len(share.prefill), len(share.decode)) for share in shares] == [(1, 1), (0, 0), (2, 1)]
    assert shares[1].gateways  # it still answers clients


SIZES = [cores for count in (1, 2, 3) for cores in itertools.product((1, 2, 7), repeat=count)]


@each("total", [1, 2, 3, 5])
@each("cores", SIZES, ids=str)
def test_configured_totals_leave_the_poorest_worker_as_much_as_possible(cores: Sequence[int], total: int) -> None:
    shares = DeploymentPlacement(config_of(COLOCATED, decode=total)).place(nodes(*cores))
    counts = [len(share.decode) for share in shares]
    assert sum(counts) == total
    assert least(counts, cores) == max(
        least(other, cores) for other in itertools.product(range(total + 1), repeat=len(cores)) if sum(other) == total
    )


@each(("num_prefill", "num_decode"), [(1, 1), (1, 4), (4, 1), (2, 3), (5, 5)])
@each("cores", SIZES, ids=str)
def test_separate_workers_are_in_pairs_and_none_is_lost(
    cores: Sequence[int], num_prefill: int, num_decode: int
) -> None:
    shares = DeploymentPlacement(config_of(SEPARATE, prefill=num_prefill, decode=num_decode)).place(nodes(*cores))
    assert sum(len(share.prefill) for share in shares) == num_prefill
    assert sum(len(share.decode) for share in shares) == num_decode
    assert all(bool(share.prefill) == bool(share.decode) for share in shares)
    used = [count for count, share in zip(cores, shares, strict=True) if share.num_workers]
    idle = [count for count, share in zip(cores, shares, strict=True) if not share.num_workers]
    assert len(used) == min(len(cores), num_prefill, num_decode)
    assert not idle or max(idle) <= min(used)
    names = [name for share in shares for name in (*share.prefill, *share.decode)]
    assert len(set(names)) == num_prefill + num_decode


def test_a_share_has_the_configuration_of_its_own_counts() -> None:
    config = config_of(SEPARATE, prefill=2, decode=5)
    shares = DeploymentPlacement(config).place(nodes(2, 2))
    assert [share.config_of(config).decode.count for share in shares] == [3, 2]
    assert [share.config_of(config).prefill.count for share in shares] == [1, 1]
    assert shares[0].config_of(config).chosen_topology is Topology.DISAGGREGATED


def least(counts: Sequence[int], cores: Sequence[int]) -> float:
    return min(num_cores / count for num_cores, count in zip(cores, counts, strict=True) if count)


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
