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
from experiments.common import GIB, MANY
from lab.costmodel.choice import WorkerSpec
from lab.sim.config import SimConfig
from lab.sim.policies import ClusterHardware, simulated_policy, with_policy

MODEL, HARDWARE = "llama-2-13b", "a100-80g"
UNION = "aligned_slo"
TOKEN_BUDGETS = (256, 512, 1024, 2048)
USUAL_FLOOR = RouterConfig().best_effort_floor
_FIRST_BUDGET = 1  # of these: where a search begins
_MACHINES = ClusterHardware(WorkerSpec(MODEL, HARDWARE))


class Baseline(NamedTuple):
    """A policy of the field, and how it is run."""

    policy: str
    knows_classes: bool = False
    budgets: tuple[int, ...] = ()  # the best of these for the point
    is_colocated: bool = True
    has_splits: bool = False  # on separate workers, in every split
    has_twin: bool = False  # another of the field does the same where there is one class alone


FIELD = (
    Baseline("qoserve", knows_classes=True, has_splits=True),
    Baseline("edf", knows_classes=True, budgets=TOKEN_BUDGETS, has_splits=True),
    Baseline("srpt", knows_classes=True, budgets=TOKEN_BUDGETS, has_splits=True),
    Baseline("sarathi_classed", knows_classes=True, budgets=TOKEN_BUDGETS),
    Baseline("fcfs_classed", knows_classes=True, has_splits=True),
    Baseline("sarathi", budgets=TOKEN_BUDGETS, has_twin=True),
    Baseline("fcfs", has_splits=True, has_twin=True),
    Baseline("distserve", is_colocated=False, has_splits=True),
)
"""All that the default is compared with."""


class System(NamedTuple):
    """One of them."""

    policy: str
    topology: Topology
    num_prefill: int = 0  # of the workers, where they are separate
    token_budget: int = 0  # Sarathi's
    knows_classes: bool = False
    best_effort_floor: float = USUAL_FLOOR  # `router.best_effort_floor`

    def name(self, accelerators: int) -> str:
        """Return its name among systems on this many accelerators: `sarathi 512 colocated`, `fcfs 1 + 3`."""
        budget = f" {self.token_budget}" if self.token_budget else ""
        is_split = self.topology.is_separate
        roles = f"{self.num_prefill} + {accelerators - self.num_prefill}" if is_split else self.topology.value
        floor = "" if self.best_effort_floor == USUAL_FLOOR else f" floor {self.best_effort_floor:g}"
        return f"{self.policy}{budget} {roles}{floor}"

    def config(self, accelerators: int, machines: ClusterHardware = _MACHINES) -> SimConfig:
        """Configure it, with the sizes of a server and queues without a limit."""
        cluster = ClusterConfig(
            router=RouterConfig(
                max_queued_requests=MANY, max_queued_tokens=MANY, best_effort_floor=self.best_effort_floor
            ),
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
        return simulated_policy(machines, with_policy(cluster, self.policy, settings, topology=self.topology))


DEFAULT = System(UNION, Topology.ELASTIC, knows_classes=True)


Family = tuple[Sequence[System], int]
"""A row of neighbours, and the place at which a search begins."""


def families(accelerators: int, *, has_best_effort: bool = True) -> list[Family]:
    """Return all systems of the field, neighbours together: a policy's token budgets, its splits."""
    found: list[Family] = []
    for one in FIELD:
        if one.has_twin and not has_best_effort:
            continue
        if one.is_colocated and one.budgets:
            systems = [
                System(one.policy, Topology.COLOCATED, token_budget=budget, knows_classes=one.knows_classes)
                for budget in one.budgets
            ]
            found.append((systems, _FIRST_BUDGET))
        elif one.is_colocated:
            found.append(([System(one.policy, Topology.COLOCATED, knows_classes=one.knows_classes)], 0))
        if one.has_splits:
            found.append(_splits(one, accelerators))
    return found


def _splits(baseline: Baseline, accelerators: int) -> Family:
    splits = [
        System(baseline.policy, Topology.DISAGGREGATED, num_prefill, knows_classes=baseline.knows_classes)
        for num_prefill in range(1, accelerators)
    ]
    return splits, len(splits) // 2


def others(accelerators: int, *, has_best_effort: bool = True) -> Mapping[str, System]:
    found = families(accelerators, has_best_effort=has_best_effort)
    return {system.name(accelerators): system for systems, _ in found for system in systems}
