"""A running cluster of several nodes, looked after by its driver: nodes join, and are lost."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from alignedserve.cluster.actor_factory import ActorFactory
from alignedserve.cluster.hosts.joining import Joining
from alignedserve.cluster.hosts.members import DRIVER, Member, record_of
from alignedserve.cluster.hosts.membership import (
    ForgetNode,
    Membership,
    MembershipCommand,
    MembershipEvent,
    NodeJoined,
    NodePostponed,
    NodeRefused,
    NodesSeen,
    PrepareNode,
)
from alignedserve.cluster.hosts.node_group import release
from alignedserve.cluster.hosts.node_report import own_versions
from alignedserve.cluster.hosts.plan import ClusterPlan
from alignedserve.cluster.hosts.ray_nodes import RayNode, alive_nodes
from alignedserve.cluster.hosts.record import (
    ClusterRecord,
    NodeRecord,
    is_asked_to_stop,
    remove_record,
    write_record,
)
from alignedserve.cluster.launch import RunningCluster
from alignedserve.cluster.start_observer import StartObserver
from alignedserve.core.errors import AlignedServeError, PeerLost

logger = logging.getLogger(__name__)

_HEAD_SILENT_S = 20.0


class ClusterOnHosts(RunningCluster):
    """A started cluster of several nodes, for a driver that calls `check` about once a second."""

    def __init__(
        self, plan: ClusterPlan, members: Sequence[Member], factory: ActorFactory, observer: StartObserver
    ) -> None:
        super().__init__(members[0].prepared, plan.served, factory, observer)
        self._members = {member.ray_node.node_id: member for member in members}
        self._membership = Membership(tuple(self._members))
        self._seen = {member.ray_node.node_id: member.ray_node for member in members}
        self._starting: dict[Any, str] = {}  # actors of nodes that joined, by the call that says how it went
        self._cluster_id = self.folder.name.partition("-")[0]
        self._joining = Joining(plan, self._cluster_id, len(members))
        self._started = time.time()
        self._is_ready = False
        self._heard_s = time.monotonic()  # from Ray's head
        self._log = _log_to(self.folder / "logs")

    def refuse(self, node: RayNode, problem: str) -> None:
        """Note a node that is not used, and why."""
        self._seen[node.node_id] = node
        self._membership.refuse(node.node_id, problem)
        logger.error("%s is not used: %s", node, problem)

    def start_all(self) -> None:
        """Start the actors of all nodes. Raises the error of the first failing one."""
        self._announce()
        self.start(tuple(member.prepared for member in self._members.values())[1:])

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """See RunningCluster; then every command finds the cluster."""
        super().wait_ready(timeout_s)
        self._is_ready = True
        self._announce()
        self._heard_s = time.monotonic()

    def check(self) -> bool:
        """Take in nodes that have come and give up those that are gone; False: the cluster was asked to stop.

        Raises PeerLost when Ray's head has not answered for long.
        """
        try:
            goes_on = self._look_around()
        except PeerLost:
            if time.monotonic() - self._heard_s > _HEAD_SILENT_S:
                raise
            return True
        self._heard_s = time.monotonic()
        return goes_on

    def record(self) -> ClusterRecord:
        """Return what the cluster consists of now."""
        refused = (
            NodeRecord("", node.node_id, node.address, node.hostname, problem=problem)
            for node, problem in ((self._seen[node_id], why) for node_id, why in self._membership.refused.items())
        )
        return ClusterRecord(
            cluster_id=self._cluster_id,
            version=own_versions(),
            model=self.served.name,
            topology=self.config.chosen_topology.value,
            started=self._started,
            is_ready=self._is_ready,
            nodes=(*(record_of(member) for member in self._members.values()), *refused),
        )

    def _look_around(self) -> bool:
        if is_asked_to_stop(self._cluster_id):
            return False
        self._seen = {node.node_id: node for node in alive_nodes()}
        self._decide(NodesSeen(tuple(self._seen)))
        self._look_at_starting()
        return True

    def _decide(self, event: MembershipEvent) -> None:
        for command in self._membership.on_event(event):
            self._perform(command)

    def _perform(self, command: MembershipCommand) -> None:
        match command:
            case PrepareNode(node_id):
                self._join(self._seen[node_id])
            case ForgetNode(node_id):
                self._forget(self._members.pop(node_id))
            case _:
                self._announce()

    def _join(self, node: RayNode) -> None:
        head = next(iter(self._members.values())).ray_node
        try:
            member = self._joining.prepare(node, head)
        except AlignedServeError as error:
            logger.error("%s is not used: %s", node, error)
            self._decide(NodeRefused(node.node_id, str(error)))
            return
        try:
            self.add_node(member.prepared)
        except ValueError as error:  # Ray has not yet given up the actors that had these names
            logger.info("%s joins later: %s", node, error)
            release(member.prepared.folder.name)
            self._decide(NodePostponed(node.node_id))
            return
        self._joining.take(node)
        self._members[node.node_id] = member
        actors = self._actors[member.name]
        self._starting |= {actor.failure.remote(): f"{name} on {node}" for name, actor in actors.items()}
        logger.info("%s has joined as %s with %s", node, member.name, ", ".join(actors))
        self._decide(NodeJoined(node.node_id))

    def _forget(self, member: Member) -> None:
        logger.warning("%s is lost, and with it %s", member.ray_node, member.name)
        self.remove_node(member.name)
        release(member.prepared.folder.name)
        self._joining.vacate(member)

    def _look_at_starting(self) -> None:
        if not self._starting:
            return
        answered, _ = ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)
        for reference in answered:
            name = self._starting.pop(reference)
            try:
                failure = ray.get(reference)
            except ray.exceptions.RayError as error:
                failure = error
            if failure is not None:
                logger.error("%s did not start: %s", name, str(failure).splitlines()[0])

    def _leave_ray(self) -> None:
        if ray.is_initialized():
            for member in self._members.values():
                release(member.prepared.folder.name)
            try:
                remove_record(self._cluster_id)
            except PeerLost:
                logger.warning("Ray's head is gone, and with it the record of this cluster")
        super()._leave_ray()
        logging.getLogger("alignedserve").removeHandler(self._log)
        self._log.close()

    def _announce(self) -> None:
        write_record(self.record())


def _log_to(folder: Path) -> logging.Handler:
    """Write what the driver says beside the logs of the head's other processes, until the handler is removed."""
    folder.mkdir(exist_ok=True)
    handler = logging.FileHandler(folder / f"{DRIVER}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("alignedserve")
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    return handler
