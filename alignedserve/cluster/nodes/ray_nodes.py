"""The nodes of a Ray cluster."""

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util import get_placement_group, placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from typing_extensions import override

from alignedserve.cluster.ray_node import SEES_EVERY_GPU
from alignedserve.config.sections import EngineConfig
from alignedserve.core.errors import ConfigError, PeerLost

_HEAD_RESOURCE = "node:__internal_head__"
_POLL_S = 0.5


def gpu_options(num_gpus: float) -> dict[str, Any]:
    """Return Ray's options that let a process with so many GPUs of a node see all of them; none without GPUs. Workers
    name GPUs by their numbers on the host and map the memory of others. A Ray that we have not started shows an actor
    those alone that it was given, numbered from 0."""
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
    alive = [_ray_node(node, node["Resources"]) for node in nodes if node["Alive"] and node["Resources"] is not None]
    return sorted(alive, key=lambda node: (not node.is_head, node.address, node.node_id))


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
    `own_id`: of the node that it has joined; on the head's host there may be several."""
    here = next((node for node in nodes if node.node_id == own_id), None)
    if here is not None and here.address != nodes[0].address:
        raise ConfigError(f"a cluster is started on the head of Ray, {nodes[0]}; this is {here}")


logger = logging.getLogger(__name__)

_CPU = "cpu"  # the agent of a node needs no PyTorch
_NODE_LABEL = "ray.io/node-id"
_PREFIX = "alignedserve-node-"
_WAIT_S = 20.0  # for what a former cluster had
_DIGITS = 4  # to which Ray counts parts of CPUs and GPUs
_ROUNDING = 1e-3  # more than shares are rounded by, together
_TOKEN = 0.001  # of the node's own resource, for nodes without workers


class WorkerShare(NamedTuple):
    """One worker's part of what its node has."""

    bundle: int  # of the group
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """One node's group."""

    group: PlacementGroup
    shares: Mapping[str, WorkerShare]

    def options_of(self, name: str) -> Mapping[str, Any]:
        """Return Ray's options of the process of this name: workers have their shares, all others share the cores."""
        share = self.shares.get(name, WorkerShare(0, 0.0, 0.0))
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=share.bundle)
        amounts = {"num_cpus": share.num_cpus, "num_gpus": share.num_gpus}
        return {**amounts, "scheduling_strategy": strategy, **gpu_options(share.num_gpus)}

    @override
    def __str__(self) -> str:
        bundles = self.group.bundle_specs
        kinds = dict.fromkeys(kind for bundle in bundles for kind in bundle)
        return " and ".join(f"{sum(bundle.get(kind, 0.0) for bundle in bundles):g} {kind}" for kind in kinds)


def worker_shares(engines: Mapping[str, EngineConfig], num_cpus: float) -> dict[str, WorkerShare]:
    """Return the CPUs (in Ray's count) and the share of a GPU of each worker. A worker has a CPU for each
    of its threads, or less where Ray counts fewer; workers of one GPU share it evenly, and one of several ranks has a
    GPU for each of them."""
    num_on = Counter(engine.device for engine in engines.values())
    bundles = {device: index for index, device in enumerate(num_on)}
    shares = {}
    for name, engine in engines.items():
        cpus = min(float(engine.threads_per_worker or 1), num_cpus / len(engines))
        gpus = 0.0 if engine.device == _CPU else engine.tensor_parallel / num_on[engine.device]
        shares[name] = WorkerShare(bundles[engine.device], _rounded_down(cpus), _rounded_down(gpus))
    return shares


def bundles_of(shares: Mapping[str, WorkerShare], address: str) -> list[dict[str, float]]:
    """Return the bundles that hold these shares on the node at this address: one of each GPU, or one in all. GPUs are
    whole, though three workers' thirds of one are less by a rounding."""
    by_index: dict[int, dict[str, float]] = {}
    for share in shares.values():
        bundle = by_index.setdefault(share.bundle, {"CPU": 0.0, "GPU": 0.0})
        bundle["CPU"] = round(bundle["CPU"] + share.num_cpus, _DIGITS)
        bundle["GPU"] = bundle["GPU"] + share.num_gpus
    for bundle in by_index.values():
        bundle["GPU"] = float(math.ceil(bundle["GPU"] - _ROUNDING))
    bundles = [{kind: amount for kind, amount in by_index[index].items() if amount} for index in sorted(by_index)]
    return [bundle or {f"node:{address}": _TOKEN} for bundle in bundles or [{}]]


def create_group(node: RayNode, folder_name: str, shares: Mapping[str, WorkerShare]) -> NodeGroup:
    """Create the group of the node that has this private folder. It is placed when Ray has what the workers take."""
    bundles = bundles_of(shares, node.address)
    group = placement_group(
        bundles,
        strategy="STRICT_PACK",
        name=_PREFIX + folder_name,
        lifetime="detached",
        bundle_label_selector=[{_NODE_LABEL: node.node_id}] * len(bundles),
    )
    return NodeGroup(group, shares)


def find_group(folder_name: str, shares: Mapping[str, WorkerShare]) -> NodeGroup:
    """Return the group of the node that has this private folder. Raises PeerLost when it is not there."""
    try:
        return NodeGroup(get_placement_group(_PREFIX + folder_name), shares)
    except (ValueError, RayError) as error:
        raise PeerLost(f"what was reserved for {folder_name} is gone: {error}") from error


def is_placed(made: NodeGroup) -> bool:
    """Wait until Ray has given a group what it needs; False: it has not as much. Raises PeerLost."""
    try:
        return bool(made.group.wait(_WAIT_S))
    except (RayError, ray.exceptions.GetTimeoutError) as error:
        raise PeerLost(f"Ray does not answer for its resources: {error}") from error


def release(folder_name: str) -> None:
    if not ray.is_initialized():
        return  # Ray would start one to ask it
    with contextlib.suppress(ValueError, RayError):
        remove_placement_group(get_placement_group(_PREFIX + folder_name))


def release_former() -> None:
    table: Mapping[str, Mapping[str, Any]] = placement_group_table()
    for entry in table.values():
        name = str(entry["name"])
        if name.startswith(_PREFIX) and entry["state"] != "REMOVED":
            logger.info("removing what a former driver had reserved: %s", name)
            release(name.removeprefix(_PREFIX))


def _rounded_down(amount: float) -> float:
    return float(math.floor(amount * 10**_DIGITS + 1e-6) / 10**_DIGITS)
