"""Takes over the cluster that a former driver has left: what lives goes on, what is missing is started."""

import logging
import time
from dataclasses import replace

import ray

from alignedserve.cluster.actor_factory import ActorClasses, ActorFactory
from alignedserve.cluster.hosts.admission import agent_name
from alignedserve.cluster.hosts.cluster import ClusterOnHosts, Driving
from alignedserve.cluster.hosts.handover import ClusterState
from alignedserve.cluster.hosts.joining import Joining
from alignedserve.cluster.hosts.members import DRIVER, Member, record_of
from alignedserve.cluster.hosts.nodes.placement_group import find_group, release
from alignedserve.cluster.hosts.nodes.ray_nodes import RayNode, alive_nodes
from alignedserve.cluster.hosts.orphans import end_by_name, end_cluster
from alignedserve.cluster.hosts.ray_directory import NAMESPACE
from alignedserve.cluster.hosts.record import read_record
from alignedserve.cluster.hosts.succession import Succession, left_by_former
from alignedserve.core.errors import AlignedServeError, PeerLost, ProtocolError, ResourceError

logger = logging.getLogger(__name__)

_STEP_S = 0.1
_SETTLED_S = 30.0


def adopt_cluster(asked: str, actor_classes: ActorClasses, driving: Driving) -> ClusterOnHosts | None:
    """Take over what a former driver has left; None: there is nothing, or it was of another kind and has been ended.

    `asked`: what this driver is to serve, by `digest_of`. Raises ResourceError when the former driver still runs, or
    its processes do not end.
    """
    try:
        record = read_record()
    except ProtocolError as error:  # of another version; its agents end it
        logger.warning("the former cluster cannot be taken over: %s", error)
        return None
    if record is None:
        return None
    state = left_by_former(record)
    if state is not None and state.asked == asked:
        try:
            return _adopt(state, actor_classes, replace(driving, succession=Succession(asked, state)))
        except AlignedServeError as error:
            logger.warning("the former cluster cannot be taken over, and is ended: %s", error)
    end_cluster(record)
    return None


def _adopt(state: ClusterState, actor_classes: ActorClasses, driving: Driving) -> ClusterOnHosts:
    nodes = _settled_nodes()
    alive = {node.node_id for node in nodes}
    lost = [member for member in state.members if member.ray_node.node_id not in alive]
    for member in lost:
        logger.warning("%s was lost with the former driver", member.ray_node)
        names = [actor.name for actor in record_of(member).actors if actor.name != DRIVER]
        end_by_name([*names, agent_name(member.prepared.folder.name)])
        release(member.prepared.folder.name)
        state.joining.keep_share(member)
    members = [_found_again(member) for member in state.members if member not in lost]
    if not any(member.prepared.share.is_head for member in members):
        members.insert(0, _prepared_head(state.joining, nodes[0]))
    served = state.joining.plan.served
    factory = ActorFactory(served, actor_classes, state.secrets, is_detached=True)
    logger.warning("the cluster of a former driver goes on, on %d nodes", len(members))
    return ClusterOnHosts(state.joining, members, factory, driving)


def _settled_nodes() -> list[RayNode]:
    ends_s = time.monotonic() + _SETTLED_S
    while sum(node.is_head for node in alive_nodes()) > 1:
        if time.monotonic() > ends_s:
            raise PeerLost("Ray still counts a former head among its nodes")
        time.sleep(_STEP_S)
    return alive_nodes()


def _found_again(member: Member) -> Member:
    folder_name = member.prepared.folder.name
    try:
        agent = ray.get_actor(agent_name(folder_name), NAMESPACE)
    except ValueError as error:
        raise PeerLost(f"the agent of {member.ray_node} is gone") from error
    found = replace(member, agent=replace(member.agent, actor=agent))
    found.use(find_group(folder_name, member.placed))
    return found


def _prepared_head(joining: Joining, node: RayNode) -> Member:
    preparation = joining.begin(node)
    while (member := preparation.advance()) is None:
        time.sleep(_STEP_S)
    if not member.prepared.share.is_head:
        joining.vacate(member)
        raise ResourceError("Ray's head is on another host than before")
    return member
