"""Ray's autoscaler: whether it runs on this head, what nodes it can add, and how many the cluster requests."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from ray.exceptions import RayError

from alignedserve.cluster.nodes.ray_nodes import RayNode
from alignedserve.config.sections import ScalingConfig
from alignedserve.core.errors import ConfigError, PeerLost

_GCS_OPTION = "--gcs-address="
_FILE_OPTION = "--autoscaling-config="
_MAX_FILE_BYTES = 4 << 20

Bundle = Mapping[str, float]  # of CPU and GPU


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """Contents of the file with which Ray's autoscaler runs."""

    path: Path
    max_workers: int  # nodes besides the head
    worker: Bundle  # what a node has that it adds; empty: the file does not say

    def request(self, num_nodes: int, head: RayNode, others: Sequence[RayNode]) -> list[dict[str, float]]:
        """Return the resources of `num_nodes`: a bundle for each, with everything that Ray counts there. A node that is
        added has what the file says, or else what the largest of the others has, or the head."""
        largest = max((_all_of(node) for node in others), key=_strength, default=_all_of(head))
        worker = dict(self.worker) or largest
        bundles = [_all_of(head), *([worker] * (num_nodes - 1))]
        return [bundle for bundle in bundles if bundle]  # a head may count no CPU


def find_autoscaler(gcs_address: str) -> Autoscaler:
    """Return the autoscaler of the Ray whose head, this host, has that address. Raises ConfigError when it has none
    that adds nodes."""
    path = _file_of_autoscaler(gcs_address)
    if path is None:
        raise ConfigError(
            "scaling.max_nodes needs Ray's autoscaler, and this Ray runs without one; `ray up` starts it with the "
            "cluster, `ray start --head` with --autoscaling-config; or leave scaling.max_nodes out"
        )
    return read_autoscaler(path)


def read_autoscaler(path: Path) -> Autoscaler:
    """Read the file of Ray's autoscaler. Raises ConfigError when it is not one, or adds no nodes."""
    try:
        with path.open(encoding="utf-8") as file:
            document = yaml.safe_load(file.read(_MAX_FILE_BYTES))
        head_type = document.get("head_node_type")
        types = {name: node_type for name, node_type in document["available_node_types"].items() if name != head_type}
        max_workers = int(document["max_workers"])
        able = [_counted(one.get("resources") or {}) for one in types.values() if one.get("max_workers", max_workers)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is no file of Ray's autoscaler: {type(error).__name__} {error}") from error
    if max_workers < 1 or not able:
        raise ConfigError(f"scaling.max_nodes needs nodes that Ray can add; {path} has none (max_workers)")
    return Autoscaler(path, max_workers, max(able, key=_strength))


def most_nodes(config: ScalingConfig, autoscaler: Autoscaler) -> int:
    """Return how many nodes a cluster may have. Raises ConfigError when Ray's autoscaler adds fewer."""
    assert config.max_nodes is not None, "a cluster that does not scale"
    if config.max_nodes > autoscaler.max_workers + 1:
        raise ConfigError(
            f"scaling.max_nodes is {config.max_nodes}, and with max_workers {autoscaler.max_workers} in "
            f"{autoscaler.path} Ray has {autoscaler.max_workers + 1} nodes at most, the head among them"
        )
    return config.max_nodes


def ask_for(bundles: Sequence[Mapping[str, float]]) -> None:
    """Ask Ray to have nodes for these bundles, in place of what was asked before. Raises PeerLost."""
    try:
        # Loaded where it is needed: with it comes all of Ray's autoscaler.
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=[dict(bundle) for bundle in bundles])
    except (RayError, RuntimeError, OSError) as error:
        raise PeerLost(f"Ray's head does not answer: {error}") from error


def _file_of_autoscaler(gcs_address: str) -> Path | None:
    for process in psutil.process_iter(["cmdline", "uids"]):
        arguments, uids = process.info["cmdline"] or [], process.info["uids"]
        if _GCS_OPTION + gcs_address not in arguments or uids is None or uids.real != os.getuid():
            continue
        for argument in arguments:
            if argument.startswith(_FILE_OPTION):
                return Path(argument.removeprefix(_FILE_OPTION)).expanduser()
    return None


def _counted(resources: Mapping[str, Any]) -> dict[str, float]:
    amounts = {kind: float(resources[kind]) for kind in ("CPU", "GPU") if resources.get(kind)}
    if not all(math.isfinite(amount) and amount > 0 for amount in amounts.values()):
        raise ValueError(f"{amounts} are no amounts")
    return amounts


def _all_of(node: RayNode) -> dict[str, float]:
    return {kind: amount for kind, amount in (("CPU", node.num_cpus), ("GPU", node.num_gpus)) if amount}


def _strength(resources: Bundle) -> tuple[float, float]:
    return resources.get("GPU", 0.0), resources.get("CPU", 0.0)
