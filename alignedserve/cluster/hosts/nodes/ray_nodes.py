"""The nodes of a Ray cluster."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from typing_extensions import override

from alignedserve.cluster.ray_node import SEES_EVERY_GPU
from alignedserve.core.errors import ConfigError, PeerLost

_HEAD_RESOURCE = "node:__internal_head__"
_POLL_S = 0.5


def gpu_options(num_gpus: float) -> dict[str, Any]:
    """Return Ray's options that let a process with so many GPUs of a node see all of them; none without GPUs.

    Workers name GPUs by their numbers on the host and map the memory of others. A Ray that we have not started shows an
    actor those alone that it was given, numbered from 0.
    """
    return {"runtime_env": {"env_vars": {SEES_EVERY_GPU: "1"}}} if num_gpus else {}


class RayNode(NamedTuple):
    """One node that is alive."""

    node_id: str
    address: str  # in the network of the cluster
    hostname: str
    is_head: bool
    num_cpus: float = 0.0  # as Ray counts them, in use or not
    num_gpus: float = 0.0

    @property
    def host(self) -> tuple[str, str]:
        """Return what stays the same when the host comes back under another id; nodes of a test may share it."""
        return self.hostname, self.address

    @property
    def options(self) -> dict[str, Any]:
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(self.node_id, soft=False)}

    @override
    def __str__(self) -> str:
        return f"{self.hostname} ({self.address})"


def alive_nodes() -> list[RayNode]:
    """Return the nodes, the head first and the others by address. Raises PeerLost when Ray's head does not answer."""
    try:
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
    except (RayError, RuntimeError, OSError) as error:
        raise PeerLost(f"Ray's head does not answer: {error}") from error
    found = [_ray_node(node, node["Resources"]) for node in nodes if node["Alive"] and node["Resources"] is not None]
    return sorted(found, key=lambda node: (not node.is_head, node.address, node.node_id))


def _ray_node(node: Mapping[str, Any], resources: Mapping[str, float]) -> RayNode:
    return RayNode(
        node_id=node["NodeID"],
        address=node["NodeManagerAddress"],
        hostname=node["NodeManagerHostname"],
        is_head=_HEAD_RESOURCE in resources,
        num_cpus=resources.get("CPU", 0.0),
        num_gpus=resources.get("GPU", 0.0),
    )


def wait_for_nodes(
    num_nodes: int, timeout_s: float, look: Callable[[], Sequence[RayNode]] = alive_nodes
) -> Sequence[RayNode]:
    ends_s = time.monotonic() + timeout_s
    while len(nodes := look()) < num_nodes and time.monotonic() < ends_s:
        time.sleep(_POLL_S)
    return nodes


def require_head(nodes: Sequence[RayNode], own_id: str) -> None:
    """Check that a driver runs on the host of the head, whose private folder and batches it uses. Raises ConfigError.

    `own_id`: of the node that it has joined; on the head's host there may be several.
    """
    here = next((node for node in nodes if node.node_id == own_id), None)
    if here is not None and here.address != nodes[0].address:
        raise ConfigError(f"a cluster is started on the head of Ray, {nodes[0]}; this is {here}")
