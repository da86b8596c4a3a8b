"""Configures the simulation of a policy: its topology, its other settings, and its mechanisms."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from alignedserve.config.sections import ClusterConfig, SchedulingConfig, Topology
from alignedserve.scheduling.factory import resolve_policy
from alignedserve.scheduling.policies import (
    policy_entry,
    require_policy,
    wanted_mechanisms,
    wants_shared_blocks,
)
from alignedserve.scheduling.policy import Mechanism
from lab.costmodel.profile_file import MachineProfile
from lab.sim.cluster_hardware import ClusterHardware, simulated_as_profiled, simulated_on
from lab.sim.config import SimConfig, SimMechanisms
from lab.workload.requests import RequestSource, TimedRequest, Workload, in_every_turn


def with_policy(
    cluster: ClusterConfig, name: str, settings: Mapping[str, Any] | None = None, *, topology: Topology | None = None
) -> ClusterConfig:
    """Configure this cluster for a policy, in the policy's topology unless another is given.

    Settings that the policy implies become its own unless the cluster sets them. Raises ConfigError for
    an unknown name, parameter or value, and where the policy does not run in that topology.
    """
    scheduling = msgspec.structs.replace(cluster.scheduling, policy=name, policy_params=dict(settings or {}))
    chosen = topology or policy_entry(name).topologies[0]
    require_policy(scheduling, chosen, frozenset(Mechanism))  # the simulated engine can have all of them
    return resolve_policy(msgspec.structs.replace(cluster, topology=chosen, scheduling=scheduling))


def simulated_policy(cluster_hardware: ClusterHardware | MachineProfile, cluster: ClusterConfig) -> SimConfig:
    """Configure this cluster on this hardware, with all mechanisms that its policy wants, at their true costs.

    Raises ConfigError for unknown names, for a model that does not fit, and for a policy that needs what this model
    cannot have (a hidden cache where it is larger than keys and values).
    """
    if isinstance(cluster_hardware, MachineProfile):
        shape, config = cluster_hardware.shape, simulated_as_profiled(cluster_hardware, cluster)
    else:
        shape, config = cluster_hardware.decode.shape, simulated_on(cluster_hardware, cluster)
    scheduling, changed = cluster.scheduling, msgspec.structs.replace
    wanted = wanted_mechanisms(scheduling)
    decode = changed(
        config.cluster.decode,
        swap_space_bytes=cluster.decode.swap_space_bytes if Mechanism.SWAP in wanted else 0,
        swap_format="int8" if Mechanism.INT8_SWAP in wanted else cluster.decode.swap_format,
    )
    mechanisms = mechanisms_for(
        scheduling,
        hidden_ratio=shape.hidden_ratio,
        can_move=cluster.chosen_topology is not Topology.COLOCATED,
        has_int8_swaps=decode.has_int8_swaps,
    )
    config = replace(config, cluster=changed(config.cluster, decode=decode), mechanisms=mechanisms)
    require_policy(scheduling, cluster.chosen_topology, config.available | {Mechanism.KNOWN_LENGTHS})
    return config


def mechanisms_for(
    scheduling: SchedulingConfig, *, hidden_ratio: float, can_move: bool = False, has_int8_swaps: bool = False
) -> SimMechanisms:
    """Return the mechanisms for this policy. `hidden_ratio`: the model's; from 1 on there is no hidden cache."""
    wanted = wanted_mechanisms(scheduling)
    has_hidden = Mechanism.HIDDEN_CACHE in wanted and hidden_ratio < 1.0
    return SimMechanisms(
        hidden_ratio=hidden_ratio if has_hidden else None,
        has_shared_blocks=wants_shared_blocks(scheduling, can_move=can_move, has_int8_swaps=has_int8_swaps),
    )


# --- policies that know how long answers will be


def as_predicted_for(scheduling: SchedulingConfig, workload: Workload) -> Workload:
    """Return the workload with exact predictions if the policy must know lengths."""
    if Mechanism.KNOWN_LENGTHS not in wanted_mechanisms(scheduling):
        return workload
    loops = tuple(replace(loop, stream=_KnownStream(loop.stream)) for loop in workload.closed_loops)
    requests = tuple(in_every_turn(request, _known) for request in workload.requests)
    return replace(workload, requests=requests, closed_loops=loops)


@dataclass(frozen=True, slots=True)
class _KnownStream:
    stream: RequestSource

    def __getitem__(self, number: int) -> TimedRequest:
        return in_every_turn(self.stream[number], _known)


def _known(request: TimedRequest) -> TimedRequest:
    return replace(request, predicted_len=request.output_len)
