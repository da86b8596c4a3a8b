"""The placement group of each node: what Ray's autoscaler, its `status` and other jobs see of a cluster there.

A group has a bundle for each GPU that workers use, or one for those that compute on the CPU, and all processes of the
node are placed in it. It is tied to its node by Ray's label of node ids, so that a group whose node is gone waits for
ever instead of moving; the driver removes it as soon as it sees that. Groups are detached and found by their names, as
they belong to a node and not to a driver.
"""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util import get_placement_group, placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from typing_extensions import override

from alignedserve.cluster.hosts.nodes.ray_nodes import RayNode, gpu_options
from alignedserve.config.sections import EngineConfig
from alignedserve.core.errors import PeerLost

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
    """Return what each worker takes of this many CPUs, as Ray counts them, and of its GPU.

    A worker has a CPU for each of its threads, or less where Ray counts fewer; workers of one GPU share it evenly, and
    one of several ranks has a GPU for each of them.
    """
    num_on = Counter(engine.device for engine in engines.values())
    bundles = {device: index for index, device in enumerate(num_on)}
    shares = {}
    for name, engine in engines.items():
        cpus = min(float(engine.threads_per_worker or 1), num_cpus / len(engines))
        gpus = 0.0 if engine.device == _CPU else engine.tensor_parallel / num_on[engine.device]
        shares[name] = WorkerShare(bundles[engine.device], _rounded_down(cpus), _rounded_down(gpus))
    return shares


def bundles_of(shares: Mapping[str, WorkerShare], address: str) -> list[dict[str, float]]:
    """Return the bundles that hold these shares on the node at this address: one of each GPU, or one in all.

    GPUs are whole, though three workers' thirds of one are less by a rounding.
    """
    found: dict[int, dict[str, float]] = {}
    for share in shares.values():
        bundle = found.setdefault(share.bundle, {"CPU": 0.0, "GPU": 0.0})
        bundle["CPU"] = round(bundle["CPU"] + share.num_cpus, _DIGITS)
        bundle["GPU"] = bundle["GPU"] + share.num_gpus
    for bundle in found.values():
        bundle["GPU"] = float(math.ceil(bundle["GPU"] - _ROUNDING))
    bundles = [{kind: amount for kind, amount in found[index].items() if amount} for index in sorted(found)]
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
    """Remove the groups that a driver left which did not end by itself."""
    table: Mapping[str, Mapping[str, Any]] = placement_group_table()
    for entry in table.values():
        name = str(entry["name"])
        if name.startswith(_PREFIX) and entry["state"] != "REMOVED":
            logger.info("removing what a former driver had reserved: %s", name)
            release(name.removeprefix(_PREFIX))


def _rounded_down(amount: float) -> float:
    return float(math.floor(amount * 10**_DIGITS + 1e-6) / 10**_DIGITS)
