"""A running cluster of several nodes, looked after by its driver: nodes join, and are lost."""

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import ray
from ray.exceptions import RayError
from typing_extensions import override

from alignedserve.cluster.actor_factory import ActorFactory
from alignedserve.cluster.deployments.orders import (
    Answer,
    DrainNode,
    NodeOrder,
    OrderChannel,
    OrderDone,
    OrderRefused,
    ScaleWorkers,
    UndoDrain,
)
from alignedserve.cluster.hosts.membership import (
    Announce,
    CancelPreparation,
    EndNode,
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
from alignedserve.cluster.hosts.node_drains import NodeDrains
from alignedserve.cluster.hosts.orders import StoredOrders
from alignedserve.cluster.hosts.record import (
    ClusterRecord,
    NodeRecord,
    is_asked_to_stop,
    is_asked_to_stop_at_once,
    own_versions,
    remove_record,
    write_record,
)
from alignedserve.cluster.hosts.recordings import Recordings
from alignedserve.cluster.hosts.succession import Succession, head_patience_s
from alignedserve.cluster.nodes.agent import end_actors
from alignedserve.cluster.nodes.joining import Joining, Preparation
from alignedserve.cluster.nodes.members import DRIVER, HostedModel, Member, record_of
from alignedserve.cluster.nodes.ray_nodes import RayNode, alive_nodes, release
from alignedserve.cluster.ray_node import answers_so_far, kill_actors
from alignedserve.cluster.restarts import Health
from alignedserve.cluster.serving_cluster import AskedToStop, DriverSetup, ServingCluster
from alignedserve.cluster.signals import signals_ignored
from alignedserve.cluster.watchdog import FailedProcesses
from alignedserve.config.environment import log_format
from alignedserve.core.errors import AlignedServeError, PeerLost
from alignedserve.process.loading_progress import LoadedShare
from alignedserve.process.logs import LogFileHandler, require_format
from alignedserve.runtime.lora.loaded_adapters import Changes, merged

_PERIOD_S = 0.5


class AdapterExchange:
    """The changes of all nodes, by deployment. Used on the driver's thread; never waits. It keeps nothing that the
    nodes do not have: the next driver hears all of it again."""

    def __init__(self) -> None:
        self._known: dict[str, Changes] = {}  # by deployment
        self._asked: dict[Any, Any] = {}  # agents by their calls
        self._looked_s = float("-inf")

    def look(self, members: Iterable[Member], models: Mapping[str, HostedModel]) -> None:
        for call, answer in answers_so_far(list(self._asked)).items():
            del self._asked[call]
            for deployment_id, changes in (answer or {}).items():
                if deployment_id in self._known:
                    self._known[deployment_id] = merged(self._known[deployment_id], changes)
        now = time.monotonic()
        able = [key for key, model in models.items() if model.served.lora.is_enabled and model.served.encoder is None]
        self._known = {key: self._known.get(key, {}) for key in able}
        if not able or now - self._looked_s < _PERIOD_S:
            return
        self._looked_s = now
        asked_agents = set(self._asked.values())
        known = {key: tuple(changes.values()) for key, changes in self._known.items()}
        for member in members:
            agent = member.agent.actor
            if agent not in asked_agents:
                self._asked[agent.exchange_adapters.remote(known)] = agent


class LoadingOfNodes:
    """The progress of nodes, as they last said."""

    def __init__(self) -> None:
        self._asked: dict[Any, str] = {}  # nodes by the calls of their agents
        self._known: dict[str, list[LoadedShare | None]] = {}

    def look(self, members: Iterable[Member]) -> list[LoadedShare | None]:
        answered = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)[0] if self._asked else []
        for reference in answered:
            name = self._asked.pop(reference)
            with contextlib.suppress(RayError):
                self._known[name] = ray.get(reference)
        names, asked_agents = [], set(self._asked.values())
        for member in members:
            names.append(member.name)
            if member.name not in asked_agents:
                self._asked[member.agent.actor.progress.remote()] = member.name
        return [share for name in names for share in self._known.get(name, ())]


class DriverLog:
    """Writes what the package says to a file, until it is closed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._package = logging.getLogger("alignedserve")
        self._handler = LogFileHandler(folder / f"{DRIVER}.log", require_format(log_format()))
        self._package.addHandler(self._handler)
        self._package.setLevel(logging.INFO)

    def close(self) -> None:
        self._package.removeHandler(self._handler)
        self._handler.close()


logger = logging.getLogger(__name__)

_STOP_LOOK_S = 0.5  # between looks during a start
_SETTLED_S = 30.0  # after which a driver has served, and an error in it is not one of each driver's start


class NodeScaling(Protocol):
    """Gives nodes back that the load does not need, and lets Ray add missing ones: the plugin `autoscaler`."""

    def look(self, actors: Mapping[str, Mapping[str, Any]], find: Callable[[str], RayNode]) -> None:
        """Go on. `actors`: by node and name. `find`: nodes by Ray's id. Raises PeerLost when Ray's head is silent."""

    def close(self) -> None:
        """Ask Ray for no nodes any more. Raises PeerLost."""


# From the members by Ray's id, the head first.
MakeScaling = Callable[[Mapping[str, Member], Membership, NodeDrains, FailedProcesses], NodeScaling]


@dataclass(frozen=True, slots=True)
class HostsSetup:
    """Parts of a cluster of hosts that each driver brings along."""

    driver: DriverSetup
    succession: Succession
    make_scaling: MakeScaling | None = None  # None: the number of nodes is left as it is


class ClusterOnHosts(ServingCluster):
    """A started cluster of several nodes, for a driver that calls `check` about once a second."""

    def __init__(self, joining: Joining, members: Sequence[Member], factory: ActorFactory, setup: HostsSetup) -> None:
        super().__init__(joining, members, factory, setup.driver)
        self._membership = Membership({node_id: member.ray_node.host for node_id, member in self._members.items()})
        self._drains = NodeDrains(self._members, self._membership, joining, self._decide)
        self._adapters = AdapterExchange()
        self._seen = {member.ray_node.node_id: member.ray_node for member in members}
        self._preparations: dict[str, Preparation] = {}
        known = (self._members, self._membership, self._drains, self._failed)
        self._scaling = setup.make_scaling(*known) if setup.make_scaling is not None else None
        self._cluster_id = joining.cluster_id
        self._succession = setup.succession
        self._is_adopted = setup.succession.is_adopted
        self._driver_id = secrets.token_hex(4)
        self._ready_s: float | None = None  # since when it has answered
        self._has_news = False  # that the record does not have
        self._loading = LoadingOfNodes()
        self._asked_s = 0.0  # when it was last asked whether to stop
        self._heard_s = time.monotonic()  # from Ray's head
        self._recordings = Recordings(self.config.recording.folder)
        self._log = DriverLog(self.folder / "logs")

    def refuse(self, node: RayNode, problem: str) -> None:
        self._seen[node.node_id] = node
        self._membership.refuse(node.node_id, problem)
        logger.error("%s is not used: %s", node, problem)

    def start_all(self) -> None:
        """Start the actors of all nodes; those of a former driver are taken over. Raises the error of the first failing
        one."""
        self._announce()
        for member in self._members.values():
            self._recordings.follow(member)
        others = tuple(member.prepared for member in self._members.values())[1:]
        if not self._is_adopted:
            self.start(others)
            self._models.announce()
            return
        with self._factory.adopting():
            self.create(others)
        for member in self._members.values():
            self._watch(member.name)
        self._models.resume()

    @override
    def wait_ready(self, timeout_s: float = 60.0) -> None:
        super().wait_ready(timeout_s)
        self._ready_s = time.monotonic()
        self._announce()
        self._heard_s = time.monotonic()

    @override
    def check_start(self) -> None:
        now = time.monotonic()
        if now - self._asked_s < _STOP_LOOK_S:
            return
        self._asked_s = now
        self._hand_over()
        with contextlib.suppress(PeerLost):
            if is_asked_to_stop(self._cluster_id):
                raise AskedToStop

    @override
    def progress(self) -> list[LoadedShare | None]:
        others = [member for member in self._members.values() if member.prepared.folder != self.folder]
        return [*super().progress(), *self._loading.look(others)]

    @override
    def check(self) -> bool:
        """Take in new nodes and give up lost ones; False: the cluster has to stop. Raises PeerLost when Ray's head has
        not answered for long."""
        self._hand_over()
        try:
            goes_on = self._look_around()
        except PeerLost:
            if time.monotonic() - self._heard_s > head_patience_s():
                raise
            return True
        self._heard_s = time.monotonic()
        return goes_on

    @override
    def ends_at_once(self) -> bool:
        try:
            return is_asked_to_stop_at_once(self._cluster_id)
        except PeerLost:
            return True

    def record(self) -> ClusterRecord:
        draining, problems = self._membership.draining, self._failed.problems
        released = [node_id for node_id in self._membership.released if node_id not in self._members]
        left_out = {**self._membership.refused, **dict.fromkeys(released, "given back, as the load does not need it")}
        used = (
            record_of(member, is_draining=one_id in draining, problems=problems)
            for one_id, member in self._members.items()
        )
        refused = (
            NodeRecord("", node.node_id, node.address, node.hostname, problem=problem)
            for node, problem in ((self._seen[node_id], why) for node_id, why in left_out.items())
        )
        return ClusterRecord(
            cluster_id=self._cluster_id,
            version=own_versions(),
            model=", ".join(plan.served.name for plan in self.plans),
            topology=self.config.chosen_topology.value,
            models=tuple(msgspec.structs.replace(report, num_open=None) for report in self._reports()),
            started=self._succession.started,
            is_ready=self._ready_s is not None,
            nodes=(*used, *(node.record for node in self._joining.drained.values()), *refused),
            driver=self._driver_id,
            drain_s=self.config.gateway.drain_s,
        )

    @override
    def leave(self) -> None:
        """Leave the cluster to the next driver, as if this process had been killed. Stop a cluster that served only
        briefly: the next driver might fail likewise."""
        if self._ready_s is None or time.monotonic() - self._ready_s < _SETTLED_S:
            self.stop()
            return
        logger.error("the driver ends by an error and leaves the cluster to the next one")
        with signals_ignored():
            for watchdog in self._watchdogs.values():
                watchdog.stop()
            self._close_preparations()
            self._recordings.close(is_end=False)
            ray.shutdown()
            self._close_own()
            self._log.close()

    def _hand_over(self, *, has_changed: bool = False) -> None:
        known = (self._joining, tuple(self._members.values()), self._factory.secrets, self._actors)
        self._succession.hand_over(*known, has_changed=has_changed)

    def _look_around(self) -> bool:
        if is_asked_to_stop(self._cluster_id):
            return False
        self._seen = {node.node_id: node for node in alive_nodes()}
        self._decide(NodesSeen({node_id: node.host for node_id, node in self._seen.items()}))
        for preparation in list(self._preparations.values()):
            self._go_on(preparation)
        self._has_news |= self._failed.look()
        self._take_orders()
        self._adapters.look(self._members.values(), self._joining.models)
        drained = self._drains.look(self.actors())
        self._has_news |= self._end_drained(drained)
        self._has_news |= self._look_at_models(drained)
        if self._scaling is not None:
            self._scaling.look(self._actors, self._seen.__getitem__)
        if self._has_news:
            self._announce()
        return True

    @override
    def _open_channel(self) -> OrderChannel:
        return StoredOrders(self._cluster_id)

    @override
    def _obey_of_nodes(self, order: NodeOrder) -> Answer:
        try:
            match order:
                case DrainNode():
                    return OrderDone(self._drains.drain(order, self.record().nodes))
                case UndoDrain(name):
                    return OrderDone(self._drains.undo(name, self.record().nodes))
                case ScaleWorkers():
                    self._has_news = True
                    return super()._obey_of_nodes(order)
        except AlignedServeError as error:
            return OrderRefused(str(error))

    @override
    def _watched_healths(self) -> dict[str, Health]:
        return self.healths()

    def _decide(self, event: MembershipEvent) -> None:
        for command in self._membership.on_event(event, time.monotonic()):
            self._perform(command)

    def _perform(self, command: MembershipCommand) -> None:
        match command:
            case PrepareNode(node_id):
                self._preparations[node_id] = self._joining.begin(self._seen[node_id], self._members.values())
            case CancelPreparation(node_id):
                self._preparations.pop(node_id).close()
            case ForgetNode(node_id):
                member = self._members.pop(node_id)
                logger.warning("%s is lost, and with it %s", member.ray_node, member.name)
                self._recordings.forget(member.name)
                self._end_member(member)
            case EndNode(node_id):
                self._end_member(self._members.pop(node_id))
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
        for deployment_id in member.models.keys() - self._joining.lasting_models().keys():
            member.remove_model(deployment_id)  # it has ended since, or is about to: nothing would end what is created
        self._members[member.ray_node.node_id] = member
        try:
            self.add_node(member.prepared)
        except (RayError, ValueError) as error:
            del self._members[member.ray_node.node_id]
            self._joining.vacate(member)
            raise PeerLost(f"its former actors have not ended: {error}") from error
        self._recordings.follow(member)
        actors = ", ".join(self._actors[member.name])
        logger.info("%s has joined as %s with %s", member.ray_node, member.name, actors)

    def _end_member(self, member: Member) -> None:
        self.remove_node(member.name)
        self._recordings.finish(member.name)
        self._joining.vacate(member)
        self._drains.gone(member)

    def _close_preparations(self) -> None:
        for preparation in self._preparations.values():
            with contextlib.suppress(RayError, ValueError):  # Ray's head may be gone
                preparation.close()
        self._preparations.clear()

    @override
    def _leave_ray(self) -> None:
        self._close_preparations()
        self._recordings.close(is_end=ray.is_initialized())
        if ray.is_initialized():
            agents = [member.agent.actor for member in self._members.values()]
            everything = [*self.actors().values(), *agents]
            try:
                remove_record(self._cluster_id)
                kill_actors(everything)
                for member in self._members.values():
                    release(member.prepared.folder.name)
                if self._scaling is not None:
                    self._scaling.close()
            except PeerLost:
                logger.warning("Ray's head is gone, and with it the record of this cluster")
                end_actors(everything)
        super()._leave_ray()
        self._log.close()

    def _announce(self) -> None:
        self._hand_over(has_changed=True)
        write_record(self.record())
        self._has_news = False
