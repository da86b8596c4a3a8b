"""Finds the running cluster for a command: on this host by its door, of hosts through Ray and its authentication."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from alignedserve.cluster.deployments.client import Ask, ask, find_cluster
from alignedserve.cluster.hosts.nodes.ray_nodes import alive_nodes
from alignedserve.cluster.hosts.operations.orders import give_order
from alignedserve.cluster.hosts.ray_directory import NAMESPACE
from alignedserve.cluster.hosts.record import DRAINED, ClusterRecord, NodeRecord, read_record
from alignedserve.cluster.hosts.supervisor import Ending, end_supervisor
from alignedserve.cluster.ray_node import address_here, join_ray
from alignedserve.cluster.ray_polls import answer_of
from alignedserve.config.environment import ray_address
from alignedserve.core.errors import PeerLost, ResourceError

_ANSWER_S = 10.0
_TASK_S = 30.0  # for Ray to start a process there on a busy host, and for what was killed to be gone


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Join Ray for as long as a command needs it. Raises ResourceError when none runs here."""
    join_ray(ray_address() or address_here(), NAMESPACE)
    try:
        yield
    finally:
        ray.shutdown()


def running_cluster() -> ClusterRecord:
    """Return the record of the cluster that runs. Raises ResourceError when none does."""
    record = read_record()
    if record is None:
        raise ResourceError("no cluster serves on these hosts; start one with `alignedserve up`")
    return record


@contextlib.contextmanager
def found_cluster(cluster_id: str | None) -> Iterator[Ask]:
    """Find the cluster that runs on this host, or on the hosts that it belongs to; yield what asks it.

    `cluster_id`: of its run folder, or of the record of its hosts; None: there is one. Hosts come first where
    RAY_ADDRESS is set. Raises ResourceError naming those that there are.
    """
    try:
        door = find_cluster(cluster_id) if ray_address() is None else None
        missing = None
    except ResourceError as error:
        door, missing = None, error
    if door is not None:
        yield partial(ask, door)
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(connected())
            known = running_cluster().cluster_id
        except ResourceError:
            if missing is not None:
                raise missing from None
            raise
        if cluster_id not in (None, known):
            raise missing or ResourceError(f"no cluster {cluster_id} serves on these hosts; it is {known}")
        yield partial(give_order, known)


def lost_nodes(record: ClusterRecord) -> set[str]:
    """Return the ids of recorded nodes that Ray no longer has; drained nodes may be gone."""
    alive = {node.node_id for node in alive_nodes()}
    return {node.node_id for node in record.nodes if node.drain != DRAINED} - alive


def call_actor(name: str, method: str, *arguments: object) -> Any:
    """Call a method of a named actor. Raises PeerLost when it is not there or does not answer."""
    try:
        reference = getattr(ray.get_actor(name, NAMESPACE), method).remote(*arguments)
    except (RayError, ValueError) as error:
        raise PeerLost(f"{name} does not answer: {str(error).splitlines()[0]}") from error
    return answer_of(name, reference, _ANSWER_S)


def node_of(record: ClusterRecord, actor: str) -> NodeRecord:
    """Return the node on which this process runs. Raises ResourceError listing the nodes."""
    for node in record.nodes:
        if any(one.name == actor for one in node.actors):
            return node
    known = ", ".join(one.name for node in record.nodes for one in node.actors)
    raise ResourceError(f"there is no {actor} in this cluster; there are {known}")


def end_supervisor_of_head(*, leaves_s: float, patience_s: float) -> Ending:
    """End the supervisor of the driver, which is on the head, from any node; return how. See `end_supervisor`.

    Raises PeerLost when the head does not answer.
    """
    head = alive_nodes()[0]
    if head.node_id == ray.get_runtime_context().get_node_id():
        return end_supervisor(leaves_s=leaves_s, patience_s=patience_s)
    task: Any = ray.remote(end_supervisor)
    asked = task.options(num_cpus=0, max_retries=0, **head.options).remote(leaves_s=leaves_s, patience_s=patience_s)
    answered: Ending = answer_of(head, asked, leaves_s + patience_s + _TASK_S)
    return answered
