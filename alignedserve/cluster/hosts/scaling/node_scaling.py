"""Scales the nodes of a running cluster: what NodeScaler decides, done with drains."""

from collections.abc import Callable, Mapping
from typing import Any

from alignedserve.cluster.failed_processes import FailedProcesses
from alignedserve.cluster.hosts.members import Member
from alignedserve.cluster.hosts.membership import Membership
from alignedserve.cluster.hosts.nodes.ray_nodes import RayNode
from alignedserve.cluster.hosts.operations.node_drains import NodeDrains
from alignedserve.cluster.hosts.scaling.logic import GiveBack, ScaledNode
from alignedserve.cluster.hosts.scaling.scaler import NodeScaler
from alignedserve.process.addresses import is_gateway


class NodeScaling:
    """Gives nodes back that the load does not need, and lets Ray add those that it does."""

    def __init__(
        self,
        scaler: NodeScaler | None,
        members: Mapping[str, Member],
        membership: Membership,
        drains: NodeDrains,
        failed: FailedProcesses,
    ) -> None:
        """`scaler`: None: the number of nodes is left as it is. `members`: by Ray's id, the head first."""
        self._scaler = scaler
        self._members = members
        self._membership = membership
        self._drains = drains
        self._failed = failed

    def look(self, actors: Mapping[str, Mapping[str, Any]], find: Callable[[str], RayNode]) -> None:
        """Go on. `actors`: by node and name. Raises PeerLost when Ray's head does not answer."""
        if self._scaler is None:
            return
        head = next(iter(self._members))
        released, draining = self._membership.released, self._membership.draining
        nodes = [
            *(
                ScaledNode(
                    node_id,
                    node_id == head,
                    is_serving=not self._failed.are_awaited(actors[member.name]),
                    models=tuple(one for one, part in member.models.items() if part.share.num_workers),
                )
                for node_id, member in self._members.items()
                if node_id not in draining
            ),
            *(ScaledNode(node_id, is_released=True) for node_id in released),
        ]
        of_head = actors[self._members[head].name]
        gateways = [actor for name, actor in of_head.items() if is_gateway(name)]
        for command in self._scaler.check(gateways, nodes, find):
            if isinstance(command, GiveBack):
                self._drains.give_back(command.node_id)
            else:
                self._drains.take_again(command.node_id)

    def close(self) -> None:
        """Ask Ray for no nodes any more. Raises PeerLost."""
        if self._scaler is not None:
            self._scaler.close()
