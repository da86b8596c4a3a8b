"""The plan of a cluster of several nodes: one longest context for all, sizes by what each node has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from alignedserve.cluster.memory_planner import Machine, SizeChoice, choose_sizes
from alignedserve.cluster.placement import DeploymentPlacement, NodeCapacity, NodeShare
from alignedserve.cluster.preflight import window_cache_of
from alignedserve.config.sections import ClusterConfig
from alignedserve.config.unset_sizes import with_fixed_sizes
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.runtime.engine.engine_sizes import bytes_beside_blocks
from alignedserve.runtime.model.served_model import ServedModel, resolve_model

NODE_ADDRESS = "node"  # as gateway.host: the address of each gateway's own node


@dataclass(frozen=True, slots=True)
class NodeResources:
    """One node and its free memory."""

    capacity: NodeCapacity
    machine: Machine


class NodePart(NamedTuple):
    """A node's part of a deployment."""

    share: NodeShare
    capacity: NodeCapacity
    config: ClusterConfig


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Holds the processes of each node and their sizes, of one deployment."""

    config: ClusterConfig
    served: ServedModel  # with the context that fits every node
    placement: DeploymentPlacement  # which more nodes may join
    shares: tuple[NodeShare, ...]
    choices: Mapping[str, SizeChoice]  # of the nodes that have workers, by name
    capacities: tuple[NodeCapacity, ...] = ()  # of the nodes of these shares, for this deployment

    @property
    def deployment_id(self) -> str:
        return self.placement.deployment_id

    @property
    def gateways(self) -> tuple[str, ...]:
        return tuple(name for share in self.shares for name, _ in share.gateways)

    @property
    def recomputing_bytes(self) -> int:
        return bytes_beside_blocks(self.served, self.config.scheduling, self.config.engine.block_size)

    def part(self, index: int, address: str) -> "NodePart":
        share = self.shares[index]
        return NodePart(share, self.capacities[index], self.config_of(share, address))

    def config_of(self, share: NodeShare, address: str) -> ClusterConfig:
        choice = self.choices.get(share.node)
        return node_config(choice.config if choice is not None else share.config_of(self.config), share, address)


def plan_cluster(config: ClusterConfig, served: ServedModel, nodes: Sequence[NodeResources]) -> ClusterPlan:
    """Place everything and choose what is unset. Raises NotEnoughMemory naming the node. `config`: with its topology.
    The shortest context that a node allows is everyone's."""
    placement = DeploymentPlacement(config)
    return sized_plan(
        ClusterPlan(config, served, placement, (), {}), placement.place([node.capacity for node in nodes]), nodes
    )


def sized_plan(plan: ClusterPlan, shares: Sequence[NodeShare], nodes: Sequence[NodeResources]) -> ClusterPlan:
    """Return the plan with these shares of these nodes, and their sizes. Raises NotEnoughMemory, naming the node where
    there are several."""
    if plan.placement.spans_hosts:
        plan = replace(plan, served=replace(plan.served, num_hosts=plan.config.engine.pipeline_parallel))
    choose = choose_named if len(nodes) > 1 else choose_share
    while True:
        choices = {
            share.node: choose(plan, share, node.machine)
            for share, node in zip(shares, nodes, strict=True)
            if share.num_workers
        }
        context_len = min(choice.served.max_context_len for choice in choices.values())
        is_common = all(choice.served.max_context_len == context_len for choice in choices.values())
        plan = replace(plan, served=replace(plan.served, max_context_len=context_len))
        if is_common:
            capacities = tuple(node.capacity for node in nodes)
            return replace(plan, shares=tuple(shares), choices=choices, capacities=capacities)


def choose_joining(plan: ClusterPlan, share: NodeShare, machine: Machine) -> SizeChoice:
    """Choose the sizes of a node with workers that joins. Raises NotEnoughMemory when it has no room for the cluster's
    context."""
    choice = choose_named(plan, share, machine)
    if choice.served.max_context_len < plan.served.max_context_len:
        raise NotEnoughMemory(
            f"{share.node} has room for contexts of {choice.served.max_context_len} tokens, "
            f"and this cluster serves {plan.served.max_context_len}"
        )
    return choice


def plan_joining(plan: ClusterPlan, share: NodeShare, machine: Machine) -> ClusterConfig:
    """Return the configuration of a node that joins. Raises as `choose_joining`."""
    return choose_joining(plan, share, machine).config if share.num_workers else share.config_of(plan.config)


def node_config(config: ClusterConfig, share: NodeShare, address: str) -> ClusterConfig:
    gateway = config.gateway
    if gateway.host == NODE_ADDRESS:
        gateway = msgspec.structs.replace(gateway, host=address)
    if share.gateways:
        gateway = msgspec.structs.replace(gateway, port=share.gateways[0][1])
    return with_fixed_sizes(msgspec.structs.replace(config, gateway=gateway))


def choose_share(plan: ClusterPlan, share: NodeShare, machine: Machine) -> SizeChoice:
    """Choose the sizes of a node with workers. Raises NotEnoughMemory."""
    beside, num_hosts = plan.recomputing_bytes, plan.served.num_hosts
    if num_hosts > 1:  # a worker spans `num_hosts` nodes of this size
        available, shared = machine.available_bytes * num_hosts, machine.shared_bytes * num_hosts
        machine = replace(machine, available_bytes=available, shared_bytes=shared)
    return choose_sizes(share.config_of(plan.config), plan.served, machine, recomputing_bytes=beside)


def choose_named(plan: ClusterPlan, share: NodeShare, machine: Machine) -> SizeChoice:
    """Choose the sizes of a node with workers. Raises NotEnoughMemory naming it."""
    try:
        return choose_share(plan, share, machine)
    except NotEnoughMemory as error:
        raise NotEnoughMemory(f"{share.node}: {error}") from error


def resolve_for(machines: Sequence[Machine], config: ClusterConfig) -> ServedModel:
    """Read the model's config, to be computed alike on all these machines; without any, on one that can all. Raises
    ModelError or ConfigError."""
    return resolve_model(
        config.model,
        msgspec.structs.replace(config.engine, window_cache=window_cache_of(config)),
        has_bfloat16=all(machine.has_bfloat16 for machine in machines),
        has_float8=all(machine.has_float8 for machine in machines),
        states_apart=True,
    )
