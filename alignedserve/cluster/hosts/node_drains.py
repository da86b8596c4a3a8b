"""Drains whole nodes of a running cluster: by order, or because the load does not need them."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from alignedserve.cluster.deployments.orders import DrainNode
from alignedserve.cluster.draining.drain_watch import DrainWatch
from alignedserve.cluster.draining.drains import ProcessDrain
from alignedserve.cluster.hosts.membership import DrainAsked, DrainUndone, Membership, MembershipEvent, NodeDrained
from alignedserve.cluster.hosts.record import DRAINED, NodeRecord
from alignedserve.cluster.hosts.resizing import node_called, require_drainable
from alignedserve.cluster.nodes.joining import Joining
from alignedserve.cluster.nodes.members import DrainedNode, Member
from alignedserve.core.errors import ResourceError

logger = logging.getLogger(__name__)

_GIVEN_BACK_WITHIN_S = 60.0  # in which requests of a node that the load does not need may finish there


class NodeDrains:
    """The drains of one cluster's nodes. What goes on, or has ended, outlives its driver (see Joining)."""

    def __init__(
        self,
        members: Mapping[str, Member],
        membership: Membership,
        joining: Joining,
        decide: Callable[[MembershipEvent], None],
    ) -> None:
        """`members`: by Ray's id, as they come and go; `decide`: passes an event to the membership."""
        self._members = members
        self._membership = membership
        self._joining = joining
        self._drains = joining.drains
        self._decide = decide
        self._drains.resume(time.monotonic())
        self._watch = DrainWatch(self._drains)
        for node_id, drained in joining.drained.items():
            membership.keep_out(node_id, drained.ray_node.host)
        for node_id, member in members.items():
            if member.name in self._drains:
                drain_asked = DrainAsked(node_id, self._drains.is_given_back(member.name))
                membership.on_event(drain_asked, time.monotonic())

    def drain(self, order: DrainNode, nodes: Sequence[NodeRecord]) -> str:
        """Begin a drain, or give it another time; return what is said of it. Raises ResourceError."""
        node = node_called(nodes, order.node)
        member = self._members.get(node.node_id)
        left = {*self._membership.draining, node.node_id}
        others = [member.shares for node_id, member in self._members.items() if node_id not in left]
        require_drainable(node, member.shares if member is not None else None, others, is_forced=order.is_forced)
        assert member is not None, "a node that cannot be drained"
        self._begin(member, order.within_s)
        self._decide(DrainAsked(node.node_id))
        return f"{member.name} gets nothing new; what it still has in {order.within_s:.0f} s goes elsewhere."

    def undo(self, name: str, nodes: Sequence[NodeRecord]) -> str:
        """Use a node again; return what is said of it. Raises ResourceError."""
        node = node_called(nodes, name)
        if not node.drain:
            raise ResourceError(f"{node.name or node.hostname} neither drains nor has drained")
        self._joining.drained.pop(node.node_id, None)
        self.take_again(node.node_id, node.name)
        return f"{node.name} is used again" + ("; its processes start now." if node.drain == DRAINED else ".")

    def give_back(self, node_id: str) -> None:
        """Drain a node that the load does not need; it is left to Ray then."""
        self._begin(self._members[node_id], _GIVEN_BACK_WITHIN_S, is_given_back=True)
        self._decide(DrainAsked(node_id, is_given_back=True))

    def take_again(self, node_id: str, name: str | None = None) -> None:
        """Use a node again that drains or has drained. `name`: in the cluster; None: that of the member, if it is."""
        known = self._members.get(node_id)
        name = known.name if known is not None else name
        if name is not None:
            self._drains.end(name)
        logger.info("%s is used again", name or node_id)
        self._decide(DrainUndone(node_id))

    def look(self, actors: Mapping[str, Any]) -> list[str]:
        """Go on with the drains: inform routers and gateways, and end nodes whose work is gone. Returns the names of
        single workers whose work is gone."""
        workers = []
        for name in self._watch.look(actors):
            self._drains.end(name)
            node_id = next((node_id for node_id, member in self._members.items() if member.name == name), None)
            if node_id is None:
                workers.append(name)
                continue
            logger.info("%s has drained", name)
            self._decide(NodeDrained(node_id))
        return workers

    def gone(self, member: Member) -> None:
        for name in (member.name, *member.workers):
            self._drains.end(name)
        if member.ray_node.node_id in self._membership.drained:
            self._joining.drained[member.ray_node.node_id] = DrainedNode(member.name, member.ray_node)

    def _begin(self, member: Member, within_s: float, *, is_given_back: bool = False) -> None:
        # Workers that do both phases have no pool.
        pools = (share.pool_name for share in member.shares if share.prefill)
        gateways = tuple(name for name, _ in member.prepared.share.gateways)
        moves_s = time.monotonic() + within_s
        workers = (*member.workers, *pools)
        self._drains.begin(member.name, ProcessDrain(workers, gateways, moves_s, is_given_back))
        logger.info("%s drains; what is left after %.0f s goes elsewhere", member.name, within_s)
