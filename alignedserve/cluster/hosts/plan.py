"""The plan of a cluster of several nodes: one longest context for all, sizes by what each node has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.placement import NodeCapacity, NodeShare, Placement
from alignedserve.cluster.sizing import SizeChoice, choose_sizes
from alignedserve.config.sections import ClusterConfig
from alignedserve.config.unset_sizes import with_fixed_sizes
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.runtime.model.served_model import ServedModel

NODE_ADDRESS = "node"  # as gateway.host: the address of each gateway's own node


@dataclass(frozen=True, slots=True)
class NodeResources:
    """One node and its free memory."""

    capacity: NodeCapacity
    machine: Machine


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Holds the processes of each node and their sizes."""

    config: ClusterConfig
    served: ServedModel  # with the context that fits every node
    placement: Placement  # which more nodes may join
    shares: tuple[NodeShare, ...]
    choices: Mapping[str, SizeChoice]  # of the nodes that have workers, by name

    @property
    def gateways(self) -> tuple[str, ...]:
        """Return the names of all gateways at the start."""
        return tuple(name for share in self.shares for name, _ in share.gateways)

    def config_of(self, share: NodeShare, address: str) -> ClusterConfig:
        """Return the configuration of a node at this address."""
        choice = self.choices.get(share.node)
        return node_config(choice.config if choice is not None else share.config_of(self.config), share, address)


def plan_cluster(
    config: ClusterConfig, served: ServedModel, nodes: Sequence[NodeResources], *, recomputing_bytes: int = 0
) -> ClusterPlan:
    """Place everything and choose what is unset. Raises NotEnoughMemory naming the node.

    `config`: with its topology. The shortest context that a node allows is everyone's.
    """
    while True:
        placement = Placement(config)
        shares = placement.place([node.capacity for node in nodes])
        choices = {
            share.node: _choose(share, config, served, node.machine, recomputing_bytes)
            for share, node in zip(shares, nodes, strict=True)
            if share.num_workers
        }
        context_len = min(choice.served.max_context_len for choice in choices.values())
        if all(choice.served.max_context_len == context_len for choice in choices.values()):
            shortened = replace(served, max_context_len=context_len)
            return ClusterPlan(config, shortened, placement, tuple(shares), choices)
        served = replace(served, max_context_len=context_len)


def plan_joining(plan: ClusterPlan, share: NodeShare, machine: Machine, recomputing_bytes: int) -> ClusterConfig:
    """Choose the sizes of a node that joins. Raises NotEnoughMemory when it has no room for the cluster's context."""
    if not share.num_workers:
        return share.config_of(plan.config)
    choice = _choose(share, plan.config, plan.served, machine, recomputing_bytes)
    if choice.served.max_context_len < plan.served.max_context_len:
        raise NotEnoughMemory(
            f"{share.node} has room for contexts of {choice.served.max_context_len} tokens, "
            f"and this cluster serves {plan.served.max_context_len}"
        )
    return choice.config


def node_config(config: ClusterConfig, share: NodeShare, address: str) -> ClusterConfig:
    """Return a node's configuration with the addresses of its own gateways, and nothing left to choose."""
    gateway = config.gateway
    if gateway.host == NODE_ADDRESS:
        gateway = msgspec.structs.replace(gateway, host=address)
    if share.gateways:
        gateway = msgspec.structs.replace(gateway, port=share.gateways[0][1])
    return with_fixed_sizes(msgspec.structs.replace(config, gateway=gateway))


def _choose(
    share: NodeShare, config: ClusterConfig, served: ServedModel, machine: Machine, recomputing_bytes: int
) -> SizeChoice:
    try:
        return choose_sizes(share.config_of(config), served, machine, recomputing_bytes=recomputing_bytes)
    except NotEnoughMemory as error:
        raise NotEnoughMemory(f"{share.node}: {error}") from error
