"""The simulated cluster of a named policy."""

import pytest

from alignedserve.config.sections import ClusterConfig, RouterConfig, SchedulingConfig, Topology
from alignedserve.core.errors import ConfigError
from alignedserve.scheduling.policies import all_policies
from alignedserve.scheduling.policy import Mechanism
from lab.costmodel.choice import WorkerSpec
from lab.sim.config import SimMechanisms
from lab.sim.policies import ClusterHardware, as_predicted_for, mechanisms_for, simulated_policy, with_policy
from lab.workload.requests import ClosedLoop
from tests.harnesses.simulation import timed, workload_of
from tests.support.marks import each


def mechanisms(policy: str, hidden_ratio: float = 0.5, **settings: object) -> SimMechanisms:
    return mechanisms_for(SchedulingConfig(policy=policy, policy_params=settings), hidden_ratio=hidden_ratio)


def test_the_topology_is_the_policys_own_unless_another_is_asked_for() -> None:
    assert with_policy(ClusterConfig(), "aligned_slo").topology is Topology.ELASTIC
    assert with_policy(ClusterConfig(), "aligned").topology is Topology.DISAGGREGATED
    assert with_policy(ClusterConfig(), "sarathi").topology is Topology.COLOCATED
    assert with_policy(ClusterConfig(), "fcfs", topology=Topology.DISAGGREGATED).topology is Topology.DISAGGREGATED


def test_order_and_batches_come_with_the_policy() -> None:
    cluster = with_policy(ClusterConfig(), "aligned_slo")
    assert (cluster.router.prefill_order, cluster.batching.policy) == ("least_slack", "density_first")
    cluster = with_policy(ClusterConfig(), "fcfs")
    assert (cluster.router.prefill_order, cluster.batching.policy) == ("fcfs", "fcfs")


def test_what_the_user_sets_stays() -> None:
    mine = ClusterConfig(router=RouterConfig(prefill_order="least_slack"))
    assert with_policy(mine, "fcfs").router.prefill_order == "least_slack"


@each(
    ("name", "settings", "topology", "message"),
    [
        ("nonesuch", {}, None, "unknown policy 'nonesuch'; known: .*sarathi"),
        ("alise", {"levels": 3}, None, "no parameter 'levels'; known: num_levels"),
        ("alise", {"num_levels": 0}, None, "alise.*num_levels"),
        ("orca", {}, Topology.DISAGGREGATED, "policy 'orca' is for colocated or elastic workers"),
        ("aligned", {}, Topology.ELASTIC, "policy 'aligned' is for disaggregated workers; set topology=disaggregated"),
    ],
)
def test_what_cannot_be_is_said(
    name: str, settings: dict[str, object], topology: Topology | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_policy(ClusterConfig(), name, settings, topology=topology)


def test_the_engine_has_what_the_policy_wants() -> None:
    assert mechanisms("fcfs") == SimMechanisms()
    assert mechanisms("bros") == SimMechanisms(has_shared_blocks=True)
    assert mechanisms("apt_serve") == SimMechanisms(hidden_ratio=0.5)
    assert mechanisms("apt_serve", hybrid_cache=False) == SimMechanisms()


def test_there_is_no_hidden_cache_that_is_larger_than_keys_and_values() -> None:
    assert mechanisms("apt_serve", hidden_ratio=2.0) == SimMechanisms()


def test_host_memory_is_for_those_that_swap() -> None:
    machines = ClusterHardware(WorkerSpec("opt-13b", "a100-80g"))
    by_policy = {
        name: simulated_policy(machines, with_policy(ClusterConfig(), name)).decode_memory.num_free_host > 0
        for name in all_policies()
    }
    assert by_policy == {name: Mechanism.SWAP in entry.uses for name, entry in all_policies().items()}


def test_policies_that_must_know_lengths_get_them() -> None:
    loop = ClosedLoop("loop", 1, False, [timed(output_len=9)])
    workload = workload_of(timed(output_len=7, max_tokens=50), closed_loops=(loop,), max_closed=1)
    assert as_predicted_for(SchedulingConfig(policy="fcfs"), workload) is workload
    known = as_predicted_for(SchedulingConfig(policy="oracle"), workload)
    assert [one.predicted_len for one in known.requests] == [7]
    assert known.closed_loops[0].stream[0].predicted_len == 9
