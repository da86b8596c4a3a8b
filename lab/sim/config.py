"""Configuration of a simulation: the live system's own, and the costs and links of its machines."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from alignedserve.config.sections import ClusterConfig, Topology
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.hardware import LinkModel
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.model import CostModel
from alignedserve.scheduling.factory import resolve_policy, with_yielding
from alignedserve.scheduling.policy import DeviceMemory, Mechanism
from alignedserve.worker_core.factory import memory_of


@dataclass(frozen=True, slots=True)
class SimLinks:
    """Links for blocks and messages. Each pair of memories has a link of its own, one in each direction."""

    host: LinkModel  # between a worker and the pool: PCIe
    device: LinkModel  # between two workers: NVLink
    message_s: float = 0.0002  # between components, and to the client
    submit_s: float | None = None  # of a request from its arrival at the gateway to the router; None: `message_s`
    token_s: float | None = None  # of a token from its worker to the client; None: `message_s`
    submit_times_s: tuple[float, ...] = ()  # recorded; each request takes one of them, by seed, instead of `submit_s`
    network: LinkModel | None = None  # between two workers of different nodes; None: as `device`


class Slowdowns(NamedTuple):
    """Shares of its own time by which an iteration is prolonged by each concurrent one.

    Prompts: iterations with a part of a prompt; decodes: all others.
    """

    decodes_by_decodes: float = 0.0
    decodes_by_prompts: float = 0.0
    prompts_by_decodes: float = 0.0
    prompts_by_prompts: float = 0.0

    @classmethod
    def alike(cls, slowdown: float) -> "Slowdowns":
        """Return the slowdowns where every iteration prolongs every other by this share."""
        return cls(slowdown, slowdown, slowdown, slowdown)

    def of(self, *, has_prompt: bool, has_other_prompt: bool) -> float:
        """Return the share by which the one kind is prolonged by the other."""
        return self[2 * has_prompt + has_other_prompt]


NO_SLOWDOWNS = Slowdowns()


@dataclass(frozen=True, slots=True)
class SimMechanisms:
    """Mechanisms of the simulated engine beyond the live one's, for policies that want them."""

    hidden_ratio: float | None = None  # bytes of a hidden cache by bytes of keys and values; None: no such cache
    has_shared_blocks: bool = False


@dataclass(frozen=True, slots=True)
class SimRouters:
    """The routers. Nodes are shared out among them; gateways choose one for each request (routers.py)."""

    count: int = 1
    event_s: float = 0.0  # a router's own time for each event; 0: none
    lost_at_s: float | None = None  # when the first is lost, in seconds of the workload
    restart_s: float = 2.0  # until it is back

    def __post_init__(self) -> None:
        if self.event_s < 0.0 or self.restart_s <= 0.0:
            raise ConfigError("event_s of routers must be at least 0, restart_s above 0")
        if self.lost_at_s is not None and self.lost_at_s < 0.0:
            raise ConfigError("lost_at_s of routers must be at least 0")


@dataclass(frozen=True, slots=True)
class SimWorkerLoss:
    """The loss of a worker with its memory and work, and its return."""

    worker: str  # by name: worker-N, or prefill-N and decode-N where they are separate
    at_s: float  # in seconds of the workload
    restart_s: float = 6.0  # until it is back: a process that starts

    def __post_init__(self) -> None:
        if self.at_s < 0.0 or self.restart_s <= 0.0:
            raise ConfigError("at_s of a lost worker must be at least 0, restart_s above 0")


@dataclass(frozen=True, slots=True)
class SimConfig:
    """One simulated cluster. Numbers of blocks are computed as in the live system: memory over bytes of a block."""

    cluster: ClusterConfig
    layout: BlockLayout
    links: SimLinks
    decode_costs: CostModel  # of colocated workers: for both phases
    prefill_costs: CostModel | None = None  # None: as `decode_costs`
    own_costs: Mapping[str, CostModel] = field(default_factory=dict)  # of single workers, by name, before the two above
    mechanisms: SimMechanisms = SimMechanisms()
    learns_costs: bool = True  # policies learn the cost of iterations, as live ones do; False: they know it
    measured: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)  # what workers measured before they
    # served, by name; the others measure at the true costs
    unmeasured_costs: CostModel | None = None  # the part of an iteration that no engine measures, so no policy learns
    can_stop: bool = False  # whether its engine can stop a pass between two layers, and does unless the cluster forbids
    context_len: int | None = None  # of the model; None: what a decode worker's memory holds
    slowdowns: Slowdowns = NO_SLOWDOWNS  # of iterations by those of other workers of the machine (copies.py)
    num_pools: int = 1  # nodes: prefill and decode workers are distributed over them
    routers: SimRouters = SimRouters()
    losses: tuple[SimWorkerLoss, ...] = ()  # each of another worker
    seed: int = 0
    duration_s: float | None = None  # end of the simulation; None: when every request has ended
    timeline_of: str | None = None  # the worker whose iterations are all recorded
    miss_limits: Mapping[str, int] | None = None  # of classes: abandoned when more requests miss their objectives
    ends_when_settled: bool = False  # once it is known of each request of these classes, all open loops, if it misses

    def __post_init__(self) -> None:
        decode, prefill = self.cluster.decode.count, self.cluster.prefill.count
        num_workers = decode if self.is_colocated else min(decode, prefill)
        if not 1 <= self.num_pools <= num_workers:
            raise ConfigError(f"num_pools must be between 1 and {num_workers}: every node needs workers of each kind")
        if not 1 <= self.routers.count <= self.num_pools:
            raise ConfigError(f"routers must be between 1 and {self.num_pools}, the number of nodes")

    @property
    def resolved(self) -> "SimConfig":
        """The same with what the policy implies, and what the simulated engine does where that is unset."""
        cluster = resolve_policy(self.cluster)
        scheduling = with_yielding(cluster.scheduling, can_stop=self.can_stop, decodes_here=self.is_colocated)
        return replace(self, cluster=msgspec.structs.replace(cluster, scheduling=scheduling))

    def costs_of(self, worker: str, *, is_prefill: bool = False) -> CostModel:
        """Return the costs of a worker's iterations."""
        usual = self.prefill_costs if is_prefill and self.prefill_costs is not None else self.decode_costs
        return self.own_costs.get(worker, usual)

    @property
    def decode_memory(self) -> DeviceMemory:
        """Memory of one idle decode or colocated worker: a live one's, and what the mechanisms add."""
        decode, mechanisms = self.cluster.decode, self.mechanisms
        live = memory_of(decode, self.layout, num_blocks=self.layout.blocks_in(decode.kv_cache_bytes))
        return replace(
            live,
            hidden_ratio=mechanisms.hidden_ratio,
            has_shared_blocks=mechanisms.has_shared_blocks,
        )

    @property
    def memory_tokens(self) -> int:
        """Tokens whose cache a decode worker's memory holds."""
        num_blocks = self.layout.blocks_in(self.cluster.decode.kv_cache_bytes)
        return max(num_blocks - self.layout.state_blocks, 0) * self.layout.block_size

    @property
    def max_context_len(self) -> int:
        """Tokens that a request may come to hold: its limit where the client sets none, as in a gateway."""
        return min(self.context_len or self.memory_tokens, self.memory_tokens)

    @property
    def available(self) -> frozenset[Mechanism]:
        """Mechanisms that the simulated engine offers policies; known lengths depend on the workload."""
        has = {
            Mechanism.SWAP: self.cluster.decode.swap_space_bytes > 0,
            Mechanism.INT8_SWAP: self.cluster.decode.has_int8_swaps,
            Mechanism.HIDDEN_CACHE: self.mechanisms.hidden_ratio is not None,
            Mechanism.SHARED_BLOCKS: self.mechanisms.has_shared_blocks,
        }
        return frozenset(mechanism for mechanism, is_there in has.items() if is_there)

    def decode_name(self, number: int) -> str:
        """Return the name of a worker that decodes, as in a cluster."""
        return f"worker-{number}" if self.is_colocated else f"decode-{number}"

    @property
    def is_colocated(self) -> bool:
        """True if every worker both prefills and decodes."""
        return not self.cluster.chosen_topology.is_separate

    @property
    def can_move(self) -> bool:
        """True if such workers hand requests over as well."""
        return self.cluster.chosen_topology is Topology.ELASTIC

    @property
    def moves_between_nodes(self) -> bool:
        """True if workers hand requests over to other nodes."""
        return self.can_move and self.num_pools > 1 and self.cluster.router.moves_between_nodes
