"""Performs what ScalingLogic decides: asks the gateways what the routers report, and Ray for nodes."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from alignedserve.cluster.nodes.members import Member
from alignedserve.cluster.nodes.ray_nodes import RayNode
from alignedserve.cluster.ray_node import answer_or_none, has_ended
from alignedserve.cluster.serving_cluster import MakeScaling
from alignedserve.cluster.wishes import Wishes
from alignedserve.config.sections import ClusterConfig, ScalingConfig
from alignedserve.config.unset_sizes import DefaultSize
from alignedserve.core.errors import ConfigError, PeerLost
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.process.addresses import is_gateway
from plugins.autoscaler.logic import AskForNodes, GiveBack, ScaledNode, ScalingLogic, TakeAgain
from plugins.autoscaler.ray_autoscaler import Autoscaler, ask_for, find_autoscaler, most_nodes

logger = logging.getLogger("alignedserve.plugins.autoscaler")  # the driver's log has what is below "alignedserve"

_SILENT_S = 5.0  # after which the last report is no longer believed


class NodeScaler:
    """Scales one cluster. `check` about once a second, on the driver's thread; it waits for nothing but Ray's head."""

    def __init__(self, config: ScalingConfig, autoscaler: Autoscaler) -> None:
        self._autoscaler = autoscaler
        self._logic = ScalingLogic(config, most_nodes(config, autoscaler))
        self._asked: Any = None  # the call of a gateway that has not answered
        self._asked_s = 0.0
        self._statuses: Mapping[str, ClusterStatus] = {}

    @property
    def num_wanted(self) -> int | None:
        """Return the number of nodes at which the cluster is to be; None before the first look."""
        return self._logic.num_wanted

    def check(
        self, gateways: Sequence[Any], nodes: Sequence[ScaledNode], find: Callable[[str], RayNode]
    ) -> list[GiveBack | TakeAgain]:
        """Ask Ray for nodes as decided, and return what the cluster itself is to do. `gateways`: actors, the nearest
        first. Raises PeerLost when Ray's head does not answer."""
        self._look_at_answer(gateways)
        commands: list[GiveBack | TakeAgain] = []
        for command in self._logic.decide(self._statuses, nodes, time.monotonic()):
            match command:
                case AskForNodes(num_nodes):
                    logger.info("the load wants %d nodes; there are %d", num_nodes, len(nodes))
                    self._ask_ray(num_nodes, [find(node.node_id) for node in nodes])
                case GiveBack(node_id):
                    logger.info("%s is not needed", find(node_id))
                    commands.append(command)
                case TakeAgain(node_id):
                    logger.info("%s is needed again", find(node_id))
                    commands.append(command)
        return commands

    def _ask_ray(self, num_nodes: int, members: Sequence[RayNode]) -> None:
        head = next(node for node in members if node.is_head)
        others = [node for node in members if not node.is_head]
        try:
            ask_for(self._autoscaler.request(num_nodes, head, others))
        except PeerLost:
            self._logic.ask_again()
            raise

    def close(self) -> None:
        """Ask Ray for nothing any more: it removes nodes that are idle. Raises PeerLost."""
        ask_for([])

    def _look_at_answer(self, gateways: Sequence[Any]) -> None:
        if self._asked is not None:
            if not has_ended(self._asked):
                if time.monotonic() - self._asked_s > _SILENT_S:
                    self._statuses = {}
                return
            self._statuses = answer_or_none(self._asked) or {}
        self._asked = gateways[0].cluster_statuses.remote() if gateways else None
        self._asked_s = time.monotonic()


class ScaledCluster:
    """The nodes of one cluster, more and fewer. See NodeScaling of `alignedserve.cluster.serving_cluster`."""

    def __init__(
        self,
        scaler: NodeScaler,
        members: Mapping[str, Member],
        wishes: Wishes,
        are_awaited: Callable[[Iterable[str]], bool],
    ) -> None:
        self._scaler = scaler
        self._members = members
        self._wishes = wishes
        self._are_awaited = are_awaited

    def look(self, actors: Mapping[str, Mapping[str, Any]], find: Callable[[str], RayNode]) -> None:
        head = next(iter(self._members))
        released, draining = self._wishes.released, self._wishes.draining
        nodes = [
            *(
                ScaledNode(
                    node_id,
                    node_id == head,
                    is_serving=not self._are_awaited(actors[member.name]),
                    models=tuple(model for model, part in member.models.items() if part.share.num_workers),
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
                self._wishes.give_back(command.node_id)
            else:
                self._wishes.take_again(command.node_id)

    def close(self) -> None:
        self._scaler.close()


def scaling_of(configs: Sequence[ClusterConfig], gcs_address: str) -> MakeScaling:
    """Return what makes the scaling of a cluster on the Ray at this address. Raises ConfigError. `configs`: of its
    models."""
    for config in configs:
        if not isinstance(config.decode.count, DefaultSize) or not isinstance(config.prefill.count, DefaultSize):
            raise ConfigError(
                "scaling.max_nodes needs workers that follow the nodes: leave prefill.count and decode.count out"
            )
    return partial(ScaledCluster, NodeScaler(configs[0].scaling, find_autoscaler(gcs_address)))
