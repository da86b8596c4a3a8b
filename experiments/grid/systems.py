"""The systems that are compared at a point: a policy, its settings, and the roles of the workers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from alignedserve.config.sections import (
    ClusterConfig,
    DecodeWorkerConfig,
    PoolConfig,
    PrefillWorkerConfig,
    RouterConfig,
    Topology,
)
from alignedserve.costmodel.choice import WorkerSpec
from alignedserve.sim.cluster_hardware import ClusterHardware
from alignedserve.sim.config import SimConfig
from alignedserve.sim.policies import simulated_policy, with_policy
from experiments.common import GIB, MANY

MODEL, HARDWARE = "llama-2-13b", "a100-80g"
UNION = "aligned_slo"
TOKEN_BUDGETS = (128, 256, 512, 1024, 2048)
_MACHINES = ClusterHardware(WorkerSpec(MODEL, HARDWARE))


class System(NamedTuple):
    """One of them."""

    policy: str
    topology: Topology
    num_prefill: int = 0  # of the workers, where they are separate
    token_budget: int = 0  # Sarathi's

    def name(self, accelerators: int) -> str:
        """Return its name among systems on this many accelerators: `sarathi 512 colocated`, `fcfs 1 + 3`."""
        budget = f" {self.token_budget}" if self.token_budget else ""
        is_split = self.topology.is_separate
        roles = f"{self.num_prefill} + {accelerators - self.num_prefill}" if is_split else self.topology.value
        return f"{self.policy}{budget} {roles}"

    def config(self, accelerators: int) -> SimConfig:
        """Configure it, with the sizes of a server and queues without a limit."""
        cluster = ClusterConfig(
            router=RouterConfig(max_queued_requests=MANY, max_queued_tokens=MANY),
            pool=PoolConfig(memory_bytes=32 * GIB * accelerators),
            prefill=PrefillWorkerConfig(
                count=max(self.num_prefill, 1), max_running_requests=64, max_num_batched_tokens=2048
            ),
            decode=DecodeWorkerConfig(
                count=accelerators - self.num_prefill,
                max_running_requests=256,
                max_num_batched_tokens=2048,
                max_waiting_requests=MANY,
                swap_space_bytes=16 * GIB,
            ),
        )
        settings: Mapping[str, int] = {"token_budget": self.token_budget} if self.token_budget else {}
        return simulated_policy(_MACHINES, with_policy(cluster, self.policy, settings, topology=self.topology))


DEFAULT = System(UNION, Topology.ELASTIC)


Family = tuple[Sequence[System], int]
"""A row of neighbours, and the place at which a search begins."""


def own_families(accelerators: int) -> tuple[Family, Family]:
    """Return the default's own policy on colocated workers, and in every split."""
    return ([System(UNION, Topology.COLOCATED)], 0), _splits(UNION, accelerators)


def field_families(accelerators: int) -> tuple[Family, ...]:
    """Return what others serve with: fcfs and Sarathi-Serve.

    Sarathi-Serve has no separate workers: its chunks share iterations with decodes, and with nothing to share it is
    `fcfs` with prompts in pieces.
    """
    return (
        ([System("sarathi", Topology.COLOCATED, token_budget=budget) for budget in TOKEN_BUDGETS], 2),
        ([System("fcfs", Topology.COLOCATED)], 0),
        _splits("fcfs", accelerators),
    )


def _splits(policy: str, accelerators: int) -> Family:
    splits = [System(policy, Topology.DISAGGREGATED, num_prefill) for num_prefill in range(1, accelerators)]
    return splits, len(splits) // 2


def others(accelerators: int) -> Mapping[str, System]:
    """Return all that the default is compared with, by their names."""
    families = (*own_families(accelerators), *field_families(accelerators))
    return {system.name(accelerators): system for systems, _ in families for system in systems}
