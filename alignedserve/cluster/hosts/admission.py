"""Admission of nodes to a cluster: they report, are compared with the head, and get a keeper."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from alignedserve.cluster.hosts.node_actor import NodeActor
from alignedserve.cluster.hosts.node_report import NodeReport, check_node, report_node
from alignedserve.cluster.hosts.ray_directory import RayDirectory
from alignedserve.cluster.hosts.ray_nodes import RayNode
from alignedserve.config.sections import ClusterConfig, LinksConfig
from alignedserve.core.errors import AlignedServeError, PeerLost, ResourceError
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.runtime.process.addresses import AddressBook

logger = logging.getLogger(__name__)

_REPORT_S = 180.0  # of a node that loads PyTorch from a cold disk


@dataclass(frozen=True, slots=True)
class Keeper:
    """The NodeActor of one node, and the node as its processes see it."""

    actor: Any
    book: AddressBook


def reports_of(nodes: Sequence[RayNode], device: str, model: Path) -> dict[RayNode, NodeReport]:
    """Ask every node at once. Raises PeerLost naming the node that does not answer."""
    asked = {node: report_node.options(**node.options).remote(device, model) for node in nodes}
    return {node: _answer(node, reference) for node, reference in asked.items()}


def differences(reports: Mapping[RayNode, NodeReport], head: NodeReport) -> dict[RayNode, str]:
    """Return, for each node that cannot work with the head, why."""
    found = {}
    for node, report in reports.items():
        if report.problem is not None:
            found[node] = str(report.problem)
        elif report.versions != head.versions:
            found[node] = f"it has {report.versions}, the head {head.versions}"
        elif report.model_digest is None:
            found[node] = "it has no copy of the model at the same path"
        elif report.model_digest != head.model_digest:
            found[node] = "its copy of the model is another one (configuration, tokenizer or index differ)"
    return found


def start_keeper(node: RayNode, folder_name: str, cluster_id: str, links: LinksConfig) -> Keeper:
    """Start the keeper of a node. Raises the error for which its folder cannot be made, or PeerLost."""
    options = {"num_cpus": 0, "max_restarts": -1, "name": keeper_name(folder_name), **node.options}
    actor = NodeActor.options(**options).remote(folder_name)
    failure: AlignedServeError | None = _answer(node, actor.failure.remote())
    if failure is not None:
        raise ResourceError(f"{node}: {failure}") from failure
    folder: Path = _answer(node, actor.folder.remote())
    book = AddressBook(folder, node.node_id, node.address, RayDirectory(cluster_id), has_tls=links.tls)
    return Keeper(actor, book)


def keeper_name(folder_name: str) -> str:
    """Return the name of the keeper of this folder, among Ray's named actors."""
    return f"keeper-{folder_name}"


def check_resources(node: RayNode, config: ClusterConfig, served: ServedModel, ports: Sequence[int]) -> None:
    """Check a node's memory and ports on the node itself. Raises the error found there, or PeerLost."""
    failure: AlignedServeError | None = _answer(node, check_node.options(**node.options).remote(config, served, ports))
    if failure is not None:
        raise type(failure)(f"{node}: {failure}") from failure


def _answer(node: RayNode, reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=_REPORT_S)
    except (RayError, TimeoutError) as error:
        raise PeerLost(f"{node} does not answer: {str(error).splitlines()[0]}") from error
