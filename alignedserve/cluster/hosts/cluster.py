"""A running cluster of several nodes, looked after by its driver: nodes join, and are lost."""

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from alignedserve.cluster.actor_factory import ActorFactory
from alignedserve.cluster.hosts.drain_rules import node_called, require_drainable
from alignedserve.cluster.hosts.drain_watch import DrainWatch
from alignedserve.cluster.hosts.drains import Draining, Drains
from alignedserve.cluster.hosts.joining import Joining, Preparation
from alignedserve.cluster.hosts.members import DRIVER, Member, drained_record, record_of
from alignedserve.cluster.hosts.membership import (
    Announce,
    CancelPreparation,
    DrainAsked,
    DrainUndone,
    EndNode,
    ForgetNode,
    Host,
    Membership,
    MembershipCommand,
    MembershipEvent,
    NodeDrained,
    NodeJoined,
    NodePostponed,
    NodeRefused,
    NodesSeen,
    PrepareNode,
)
from alignedserve.cluster.hosts.node_report import own_versions
from alignedserve.cluster.hosts.orders import (
    Answer,
    DrainNode,
    Order,
    ScaleWorkers,
    UndoDrain,
    answer_order,
    take_orders,
)
from alignedserve.cluster.hosts.ray_nodes import RayNode, alive_nodes
from alignedserve.cluster.hosts.record import (
    DRAINED,
    ClusterRecord,
    NodeRecord,
    is_asked_to_stop,
    remove_record,
    write_record,
)
from alignedserve.cluster.launch import AskedToStop, RunningCluster
from alignedserve.cluster.start_observer import StartObserver
from alignedserve.core.errors import AlignedServeError, PeerLost, ResourceError
from alignedserve.runtime.process.loading_progress import Progress

logger = logging.getLogger(__name__)

_HEAD_SILENT_S = 20.0
_STOP_LOOK_S = 0.5  # between looks during a start


class ClusterOnHosts(RunningCluster):
    """A started cluster of several nodes, for a driver that calls `check` about once a second."""

    def __init__(
        self, joining: Joining, members: Sequence[Member], factory: ActorFactory, observer: StartObserver
    ) -> None:
        super().__init__(members[0].prepared, joining.plan.served, factory, observer)
        self._members = {member.ray_node.node_id: member for member in members}
        self._membership = Membership({node_id: _host(one.ray_node) for node_id, one in self._members.items()})
        self._drained: dict[str, Member] = {}  # by the id under which it was a member
        self._drains = Drains()
        self._drain_watch = DrainWatch(self._drains)
        self._seen = {member.ray_node.node_id: member.ray_node for member in members}
        self._starting: dict[Any, str] = {}  # actors of nodes that joined, by the call that says how it went
        self._joining = joining
        self._preparations: dict[str, Preparation] = {}
        self._cluster_id = joining.cluster_id
        self._started = time.time()
        self._is_ready = False
        self._has_news = False  # that the record does not have
        self._loading: dict[Any, str] = {}  # nodes whose progress is asked for, by the call
        self._progress_of: dict[str, list[Progress | None]] = {}  # of nodes that answered
        self._asked_s = 0.0  # when it was last asked whether to stop
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

    def check_start(self) -> None:
        """See RunningCluster."""
        now = time.monotonic()
        if now - self._asked_s < _STOP_LOOK_S:
            return
        self._asked_s = now
        with contextlib.suppress(PeerLost):
            if is_asked_to_stop(self._cluster_id):
                raise AskedToStop

    def progress(self) -> list[Progress | None]:
        """See RunningCluster; of all nodes."""
        answered = ray.wait(list(self._loading), num_returns=len(self._loading), timeout=0)[0] if self._loading else []
        for reference in answered:
            name = self._loading.pop(reference)
            with contextlib.suppress(ray.exceptions.RayError):
                self._progress_of[name] = ray.get(reference)
        others = [member for member in self._members.values() if member.prepared.folder != self.folder]
        asked = set(self._loading.values())
        for member in others:
            if member.name not in asked:
                self._loading[member.keeper.actor.progress.remote()] = member.name
        return [*super().progress(), *(one for member in others for one in self._progress_of.get(member.name, ()))]

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
        draining = self._membership.draining
        used = (record_of(one, is_draining=node_id in draining) for node_id, one in self._members.items())
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
            nodes=(*used, *(drained_record(member) for member in self._drained.values()), *refused),
        )

    def _look_around(self) -> bool:
        if is_asked_to_stop(self._cluster_id):
            return False
        self._seen = {node.node_id: node for node in alive_nodes()}
        self._decide(NodesSeen({node_id: _host(node) for node_id, node in self._seen.items()}))
        for preparation in list(self._preparations.values()):
            self._go_on(preparation)
        self._look_at_starting()
        for name, order in take_orders(self._cluster_id):
            answer_order(self._cluster_id, name, self._obey(order))
        for name in self._drain_watch.look(self.actors()):
            self._drain_ended(name)
        if self._has_news:
            self._announce()
        return True

    def _decide(self, event: MembershipEvent) -> None:
        for command in self._membership.on_event(event, time.monotonic()):
            self._perform(command)

    def _perform(self, command: MembershipCommand) -> None:
        match command:
            case PrepareNode(node_id):
                self._preparations[node_id] = self._joining.begin(self._seen[node_id])
            case CancelPreparation(node_id):
                self._preparations.pop(node_id).close()
            case ForgetNode(node_id):
                self._forget(self._members.pop(node_id))
            case EndNode(node_id):
                self._end_node(node_id)
            case Announce():
                self._has_news = True

    def _go_on(self, preparation: Preparation) -> None:
        node = preparation.node
        try:
            member = preparation.advance()
            if member is None:
                return
            self._admit(member)
        except PeerLost as error:
            logger.warning("%s joins later: %s", node, error)
            del self._preparations[node.node_id]
            self._decide(NodePostponed(node.node_id))
        except AlignedServeError as error:
            logger.error("%s is not used: %s", node, error)
            del self._preparations[node.node_id]
            self._decide(NodeRefused(node.node_id, str(error)))
        else:
            del self._preparations[node.node_id]
            self._decide(NodeJoined(node.node_id))

    def _admit(self, member: Member) -> None:
        """Create the actors of a node. Raises PeerLost while Ray has not given up those that had their names."""
        try:
            self.add_node(member.prepared)
        except ValueError as error:
            self._joining.vacate(member)
            raise PeerLost(f"its former actors have not ended: {error}") from error
        self._members[member.ray_node.node_id] = member
        actors = self._actors[member.name]
        self._starting |= {actor.failure.remote(): f"{name} on {member.ray_node}" for name, actor in actors.items()}
        logger.info("%s has joined as %s with %s", member.ray_node, member.name, ", ".join(actors))

    def _forget(self, member: Member) -> None:
        logger.warning("%s is lost, and with it %s", member.ray_node, member.name)
        self.remove_node(member.name)
        self._joining.vacate(member)
        if member.name in self._drains:
            self._drains.end(member.name)
            self._drained[member.ray_node.node_id] = member

    def _obey(self, order: Order) -> Answer:
        try:
            match order:
                case DrainNode():
                    return Answer(self._drain(order))
                case UndoDrain(name):
                    return Answer(self._undo_drain(name))
                case ScaleWorkers():
                    raise ResourceError("this cluster cannot be scaled yet")
        except AlignedServeError as error:
            return Answer(str(error), is_refused=True)

    def _drain(self, order: DrainNode) -> str:
        node = node_called(self.record().nodes, order.node)
        member = self._members.get(node.node_id)
        draining = self._membership.draining
        others = [
            one.prepared.share for one_id, one in self._members.items() if one_id not in (*draining, node.node_id)
        ]
        share = member.prepared.share if member is not None else None
        require_drainable(node, share, others, is_forced=order.is_forced)
        assert share is not None, "a node that cannot be drained"
        pool = (share.pool_name,) if share.pool_name in self._actors[share.node] else ()
        gateways = tuple(name for name, _ in share.gateways)
        moves_s = time.monotonic() + order.within_s
        self._drains.begin(share.node, Draining((*share.prefill, *share.decode, *pool), gateways, moves_s))
        if node.node_id not in draining:
            self._decide(DrainAsked(node.node_id))
        logger.info("%s drains; what is left after %.0f s goes elsewhere", share.node, order.within_s)
        return (
            f"{share.node} drains: it gets nothing new, and what is left after {order.within_s:.0f} s goes elsewhere."
        )

    def _undo_drain(self, name: str) -> str:
        node = node_called(self.record().nodes, name)
        if not node.drain:
            raise ResourceError(f"{node.name or node.hostname} neither drains nor has drained")
        self._drains.end(node.name)
        self._drained.pop(node.node_id, None)
        self._decide(DrainUndone(node.node_id))
        logger.info("%s is used again", node.name)
        return f"{node.name} is used again" + ("; its processes start now." if node.drain == DRAINED else ".")

    def _drain_ended(self, name: str) -> None:
        self._drains.end(name)
        node_id = next(node_id for node_id, member in self._members.items() if member.name == name)
        self._decide(NodeDrained(node_id))

    def _end_node(self, node_id: str) -> None:
        member = self._drained[node_id] = self._members.pop(node_id)
        logger.info("%s has drained", member.name)
        self.remove_node(member.name)
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
        for preparation in self._preparations.values():
            preparation.close()
        self._preparations.clear()
        if ray.is_initialized():
            try:
                remove_record(self._cluster_id)
            except PeerLost:
                logger.warning("Ray's head is gone, and with it the record of this cluster")
        super()._leave_ray()
        logging.getLogger("alignedserve").removeHandler(self._log)
        self._log.close()

    def _announce(self) -> None:
        write_record(self.record())
        self._has_news = False


def _host(node: RayNode) -> Host:
    return node.hostname, node.address


def _log_to(folder: Path) -> logging.Handler:
    """Write what the driver says beside the logs of the head's other processes, until the handler is removed."""
    folder.mkdir(exist_ok=True)
    handler = logging.FileHandler(folder / f"{DRIVER}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("alignedserve")
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    return handler
