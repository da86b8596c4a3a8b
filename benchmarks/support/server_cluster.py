"""The cluster of the simulated comparisons: Llama-2-13B on A100s, with the sizes of a server."""

from alignedserve.config.sections import ClusterConfig, DecodeWorkerConfig, PoolConfig, PrefillWorkerConfig, Topology
from alignedserve.costmodel.choice import WorkerSpec
from alignedserve.sim.cluster_hardware import ClusterHardware
from alignedserve.sim.config import SimConfig
from alignedserve.sim.policies import simulated_policy, with_policy

WORKER = WorkerSpec("llama-2-13b", "a100-80g")
MACHINES = ClusterHardware(WORKER)
_GIB = 1 << 30


def server_cluster(policy: str, topology: Topology, num_workers: int, num_prefill: int = 0) -> SimConfig:
    """Configure so many workers, of which `num_prefill` prefill where they are separate."""
    cluster = ClusterConfig(
        pool=PoolConfig(memory_bytes=64 * _GIB),
        prefill=PrefillWorkerConfig(count=max(num_prefill, 1), max_running_requests=64, max_num_batched_tokens=2048),
        decode=DecodeWorkerConfig(
            count=num_workers - num_prefill,
            max_running_requests=256,
            max_num_batched_tokens=2048,
            swap_space_bytes=16 * _GIB,
        ),
    )
    return simulated_policy(MACHINES, with_policy(cluster, policy, topology=topology))
