"""A serving cluster, of one node or of many: its actors (Ray restarts them), models, nodes and workers.

About once a second `check` hears what nodes and processes report, takes orders as wishes, and performs the steps that
`reconcile` returns. A cluster of this host alone has a Ray of its own. Several hosts share a Ray, nodes join and are
lost, and another driver may go on with what this one has left.
"""

import atexit
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
import psutil
import ray
from ray.exceptions import RayError

from alignedserve.batches.location import SharedState
from alignedserve.cluster.actor_factory import ActorFactory, PreparedNode
from alignedserve.cluster.batch_storage import StateLock, open_batch_storage
from alignedserve.cluster.deployments.admin_api import AdminApi
from alignedserve.cluster.deployments.driver import DeploymentsDriver, HostedDeployments
from alignedserve.cluster.deployments.on_demand import ModelOnDemand, OnDemandModels
from alignedserve.cluster.deployments.orders import (
    AdminRequest,
    Answer,
    DeploymentReport,
    DrainNode,
    Models,
    NodeOrder,
    OrderChannel,
    OrderDone,
    OrderRefused,
    ProcessReport,
    Remark,
    RestartWorkers,
    ScaleWorkers,
    ShowModels,
    ShowStatus,
    StatusReport,
    UndoDrain,
    problem_of,
)
from alignedserve.cluster.deployments.preparing import DeploymentSettings, Examine, HostedPreparing
from alignedserve.cluster.desired import (
    STARTS_AGAIN,
    Act,
    ClusterStep,
    Health,
    ProcessState,
    SeenCluster,
    SeenNode,
    reconcile,
)
from alignedserve.cluster.drain_watch import DrainWatch
from alignedserve.cluster.hosts.orders import StoredOrders
from alignedserve.cluster.hosts.record import (
    DRAINED,
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
from alignedserve.cluster.local_ray.node_watch import NodeWatch, kill_all, orphans_of
from alignedserve.cluster.local_ray.start import start_ray
from alignedserve.cluster.local_ray.worker_template import WorkerTemplate
from alignedserve.cluster.nodes.agent import end_actors
from alignedserve.cluster.nodes.agent_calls import AdapterExchange, LoadingOfNodes
from alignedserve.cluster.nodes.joining import Joining, Preparation
from alignedserve.cluster.nodes.members import DRIVER, Member, record_of
from alignedserve.cluster.nodes.plan import ClusterPlan
from alignedserve.cluster.nodes.ray_nodes import RayNode, alive_nodes, release
from alignedserve.cluster.ray_node import answer_of, answer_or_none, has_ended, have_all_ended, kill_actors
from alignedserve.cluster.signals import signals_ignored
from alignedserve.cluster.starting import START_TIMEOUT_S, NotReady, Patience, Starting, StartObserver, ask_ready
from alignedserve.cluster.sweeper import kill_survivors
from alignedserve.cluster.watchdog import Watchdog
from alignedserve.cluster.wishes import Wishes
from alignedserve.config.environment import log_format
from alignedserve.config.model_settings import ModelSettings
from alignedserve.core.errors import AlignedServeError, ModelError, NodeLost, PeerLost, ResourceError
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.process.addresses import is_gateway, is_router
from alignedserve.process.loading_progress import LoadedShare, read_progress
from alignedserve.process.logs import LogFileHandler, require_format
from alignedserve.runtime.kv.arena_files import ARENA_PREFIX, arena_folder, remove_stale_arenas

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_STOP_TIMEOUT_S = 5.0
_RAY_EXIT_S = 3.0
_ANSWER_S = 5.0
_STOP_LOOK_S = 0.5  # between looks during a start
_SETTLED_S = 30.0  # after which a driver has served, and an error in it is not one of each driver's start
_PATIENCE_S = 2.0
_STATES = {ProcessState.UP: "up", ProcessState.STARTING: "starting", ProcessState.ENDED: "starting again"}


class AskedToStop(Exception):
    """Raised by a start that somewhere else was asked to end."""


class StatusQuestion:
    """One question: what each process takes of memory, and the routers' last reports."""

    def __init__(self, actors: Mapping[str, Any], gateway: Any, now: float) -> None:
        """`actors`: all of the cluster. `gateway`: the actor that gives the routers' reports."""
        self._memory = {name: actor.memory_bytes.remote() for name, actor in actors.items()}
        self._loads = gateway.cluster_statuses.remote()
        self._ends_s = now + _PATIENCE_S

    def is_over(self, now: float) -> bool:
        return have_all_ended([self._loads, *self._memory.values()]) or now >= self._ends_s

    def report(self, url: str, healths: Mapping[str, Health], reports: tuple[DeploymentReport, ...]) -> StatusReport:
        memory = psutil.virtual_memory()
        return StatusReport(
            url=url,
            deployments=reports,
            loads=_answer(self._loads) or {},
            processes=tuple(self._processes(healths)),
            total_bytes=memory.total,
            available_bytes=memory.available,
        )

    def _processes(self, healths: Mapping[str, Health]) -> Iterator[ProcessReport]:
        for name, call in self._memory.items():
            health = healths.get(name, Health())
            state = _STATES.get(health.state, "fails")
            yield ProcessReport(name, state, health.problem, _answer(call))


def _answer(call: Any) -> Any:
    return answer_or_none(call) if has_ended(call) else None


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


class NodeScaling(Protocol):
    """Gives nodes back that the load does not need, and lets Ray add missing ones: the plugin `autoscaler`."""

    def look(self, actors: Mapping[str, Mapping[str, Any]], find: Callable[[str], RayNode]) -> None:
        """Go on. `actors`: by node and name. `find`: nodes by Ray's id. Raises PeerLost when Ray's head is silent."""

    def close(self) -> None:
        """Ask Ray for no nodes any more. Raises PeerLost."""


# From the members by Ray's id, the head first, and whether some of these processes start now.
MakeScaling = Callable[[Mapping[str, Member], Wishes, Callable[[Iterable[str]], bool]], NodeScaling]


@dataclass(frozen=True, slots=True)
class DriverSetup:
    """Parts of a cluster that each driver brings along."""

    settings: ModelSettings
    examine: Examine
    observer: StartObserver
    on_demand: tuple[ModelOnDemand, ...] = ()  # models that are not loaded at the start
    template: WorkerTemplate | None = None  # forks the processes of a cluster of one host; None: Ray starts them
    succession: Succession | None = None  # on hosts that share a Ray; None: on this host alone, with a Ray of its own
    make_scaling: MakeScaling | None = None  # None: the number of nodes is left as it is


class ServingCluster:
    """A started cluster and a context manager. Used on one thread. `check`, about once a second, never waits."""

    def __init__(self, joining: Joining, members: Sequence[Member], factory: ActorFactory, setup: DriverSetup) -> None:
        """`members`: the head first."""
        node = members[0].prepared
        self.config = node.config
        self.served = joining.plan.served
        self.folder = node.folder
        self.on_demand = setup.on_demand
        self._node = node
        self._members = {member.ray_node.node_id: member for member in members}
        self._joining = joining
        self._wanted = joining.wanted
        self._wanted.resume(time.monotonic())
        self._factory = factory
        self._observer = setup.observer
        self._template = setup.template
        self._succession = setup.succession
        self._first_gateways = joining.plan.gateways  # also those of a later driver: shares must add up to the limits
        self._is_adopted = setup.succession is not None and setup.succession.is_adopted  # a former driver has served
        self._state = SharedState()
        self._state_lock: StateLock | None = None
        self._node_watch: NodeWatch | None = None  # of the Ray that this process has started
        self._watchdogs: dict[str, Watchdog] = {}  # by node
        self._actors: dict[str, dict[str, Any]] = {}  # by node and name
        template_pid = setup.template.pid if setup.template is not None else None
        children = psutil.Process().children()
        self._children_before = {child for child in children if child.pid != template_pid}  # started for others
        sections = {deployment_id: model.own for deployment_id, model in joining.models.items()}
        preparing = HostedPreparing(DeploymentSettings(setup.settings, sections, self.folder), setup.examine)
        site = HostedDeployments(self._members, joining, preparing, self, setup.observer)
        self._models = DeploymentsDriver(site, joining.logic, self._answer, OnDemandModels(setup.on_demand))
        self._wishes = Wishes(self._members, joining, self._create_worker)
        self._drain_watch = DrainWatch(self._wanted)
        self._questions: dict[str, StatusQuestion] = {}  # of status, by order
        self._shown: list[str] = []  # orders that ask for the models
        self._channel: OrderChannel | None = None  # from the first look on
        self._problems: Mapping[str, str] = {}  # of processes that do not serve, as they were last logged
        self._seen = {member.ray_node.node_id: member.ray_node for member in members}
        self._preparations: dict[str, Preparation] = {}
        known = (self._members, self._wishes, self._are_awaited)
        self._scaling = setup.make_scaling(*known) if setup.make_scaling is not None else None
        self._adapters, self._loading = AdapterExchange(), LoadingOfNodes()
        self._driver_id = secrets.token_hex(4)
        self._ready_s: float | None = None  # since when it has answered
        self._announced: ClusterRecord | None = None
        self._asked_s = 0.0  # when it was last asked whether to stop
        self._heard_s = time.monotonic()  # from Ray's head
        self._recordings = Recordings(self.config.recording.folder if self.is_on_hosts else None)
        self._log = DriverLog(self.folder / "logs") if self.is_on_hosts else None

    @property
    def is_on_hosts(self) -> bool:
        return self._succession is not None

    @property
    def plans(self) -> tuple[ClusterPlan, ...]:
        return tuple(self._joining.models[deployment_id].plan for deployment_id in self._models.listed)

    @property
    def url(self) -> str:
        host = self.config.gateway.host
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
        gateway, name = self.config.gateway, f"[{reachable}]" if ":" in reachable else reachable
        return f"{gateway.scheme}://{name}:{gateway.port}"

    def refuse(self, node: RayNode, problem: str) -> None:
        self._seen[node.node_id] = node
        self._wanted.refuse(node.node_id, problem)
        logger.error("%s is not used: %s", node, problem)

    # --- start

    def start(self) -> None:
        """Create every actor and wait until each is up; those of a former driver are taken over and not waited for.
        Raises the error of the first failing one."""
        if self.is_on_hosts:
            self._announce()
        for member in self._members.values():
            self._recordings.follow(member)
        if self._is_adopted:
            with self._factory.adopting():
                self._create()
        else:
            self._create()
            self._wait_for_actors()
        for name in self._actors:
            self._watch(name)
        if self._is_adopted:
            self._models.resume()
        elif self.is_on_hosts:
            self._models.announce()

    def _create(self) -> None:
        self._state = SharedState(gateways=self._first_gateways)
        if self.config.batches.enabled:
            location, self._state_lock = open_batch_storage(self.config, is_adopted=self._factory.is_adopting)
            self._state = SharedState(location, self._first_gateways)
        if not ray.is_initialized():
            processes = start_ray(self.folder, f"alignedserve-{self.folder.name}", self._template)
            self._node_watch = NodeWatch(processes, self._end_unheeded)
            self._node_watch.start()
        self._create_on(self._node, self._state, drives_batches=True)
        for member in tuple(self._members.values())[1:]:
            self._create_on(member.prepared, self._state_of_others())
        if self._has_several_models:
            self._models.announce()

    @property
    def _has_several_models(self) -> bool:
        return len(self._joining.models) > 1 or bool(self.on_demand)

    def _create_on(self, node: PreparedNode, state: SharedState, *, drives_batches: bool = False) -> None:
        made: dict[str, Any] = {}
        try:
            made |= self._factory_of(node).create(node, state, drives_batches=drives_batches)
            member = next(member for member in self._members.values() if member.name == node.share.node)
            for part in member.others.values():
                made |= self._factory_of(part).create(part, state)
        except BaseException:
            kill_actors(made.values())
            raise
        self._actors[node.share.node] = made

    def _factory_of(self, part: PreparedNode) -> ActorFactory:
        model = self._joining.models.get(part.share.deployment_id)
        served = model.served if model is not None else self.served  # of which a node without it has gateways alone
        return self._factory.serving(served, self._models.announced)

    def add_node(self, node: PreparedNode) -> None:
        self._create_on(node, self._state_of_others())
        self._watch(node.share.node)

    def remove_node(self, name: str) -> None:
        watchdog = self._watchdogs.pop(name, None)
        if watchdog is not None:
            watchdog.stop()
        kill_actors(self._actors.pop(name, {}).values())

    def add_worker(self, node: PreparedNode, name: str) -> None:
        """Create one more worker on a node; `node` has the new share. The worker comes up by itself."""
        of_node = node.share.node
        actor = self._actors[of_node][name] = self._factory_of(node).create_worker(node, name)
        self._watchdogs[of_node].watch(name, actor)

    def remove_worker(self, node: str, name: str) -> None:
        self._watchdogs[node].forget(name)
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actors[node].pop(name), no_restart=True)

    def add_part(self, part: PreparedNode) -> dict[str, Any]:
        """Create what a further deployment has on a node that serves; return its actors. They come up by themselves.
        Raises an error of Ray's, with none of them left."""
        node = part.share.node
        state = self._state if part.share.is_head else self._state_of_others()
        actors = self._factory_of(part).create(part, state)
        self._actors[node].update(actors)
        for name, actor in actors.items():
            self._watchdogs[node].watch(name, actor)
        return actors

    def take_out(self, node: str, names: Iterable[str]) -> dict[str, Any]:
        """Return those actors of a node that have these names, which are of the cluster no more and end elsewhere."""
        of_node = self._actors.get(node, {})
        taken = {name: of_node.pop(name) for name in names if name in of_node}
        for name in taken:
            self._watchdogs[node].forget(name)
        return taken

    def actors_of(self, node: str) -> Mapping[str, Any]:
        return self._actors.get(node, {})

    def healths(self) -> dict[str, Health]:
        return {name: health for watchdog in self._watchdogs.values() for name, health in watchdog.healths().items()}

    def start_again(self, node: PreparedNode, name: str) -> None:
        """Start a process of a node anew that serves nothing. Raises an error of Ray's while it holds the former one.
        `node`: with its present share."""
        of_node = self._actors[node.share.node]
        if self.healths()[name].state is not ProcessState.DEAD:
            ray.kill(of_node[name], no_restart=False)
        elif node.share.is_head:
            of_node[name] = self._factory_of(node).create_again(node, name, self._state, drives_batches=True)
        else:
            of_node[name] = self._factory_of(node).create_again(node, name, self._state_of_others())
        self._watchdogs[node.share.node].watch(name, of_node[name])

    def actors(self) -> dict[str, Any]:
        return {name: actor for actors in self._actors.values() for name, actor in actors.items()}

    def statuses(self) -> dict[str, ClusterStatus]:
        """Return the last report of each deployment's router, from a gateway that has any; empty: none answers."""
        for name, actor in self.actors().items():
            with contextlib.suppress(PeerLost):
                statuses = answer_of(name, actor.cluster_statuses.remote(), _ANSWER_S) if is_gateway(name) else None
                if statuses:
                    return dict(statuses)
        return {}

    def read_again(self) -> None:
        for name, actor in self.actors().items():
            if is_gateway(name):
                actor.read_again.remote()

    def check_start(self) -> None:
        """Raise AskedToStop when the start is to end, which a cluster of one host is told by a signal, or NodeLost."""
        self._require_node()
        now = time.monotonic()
        if self.is_on_hosts and now - self._asked_s >= _STOP_LOOK_S:
            self._asked_s = now
            self._hand_over()
            with contextlib.suppress(PeerLost):
                if is_asked_to_stop(self._joining.cluster_id):
                    raise AskedToStop

    def progress(self) -> list[LoadedShare | None]:
        names = self._actors.get(self._node.share.node, {})
        others = [member for member in self._members.values() if member.prepared.folder != self.folder]
        return [*(read_progress(self._node.book.progress_of(name)) for name in names), *self._loading.look(others)]

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until a token of every model has passed through the whole system. Raises PeerLost if none does within
        `timeout_s`, or within that of the last progress of a model that is loaded; ModelError at once for a model of a
        new cluster that gives no tokens; AskedToStop."""
        patience = self._patience(timeout_s)
        not_ready = NotReady("nothing was asked")
        while not patience.is_over():
            self.check_start()
            answer = ask_ready(self.url)
            if answer is None:
                self._wait_for_every_model(timeout_s)
                self._ready_s = time.monotonic()
                if self.is_on_hosts:
                    self._announce()
                self._heard_s = time.monotonic()
                return
            not_ready = answer
            if not_ready.is_lasting and not self._is_adopted:
                raise ModelError(
                    f"the model gives no answer: {not_ready.reason}; the logs are in {self.folder / 'logs'}"
                )
            time.sleep(0.05)
        raise PeerLost(
            f"the cluster was not ready within {timeout_s:.0f} s: {not_ready.reason}; "
            f"its logs are in {self.folder / 'logs'}"
        )

    def _wait_for_every_model(self, timeout_s: float) -> None:
        patience = self._patience(timeout_s)
        while self._has_several_models and not self._is_adopted and not self._models.are_all_ready():
            self.check_start()
            if patience.is_over():
                raise PeerLost(f"not every model was ready within {timeout_s:.0f} s; see {self.folder / 'logs'}")
            time.sleep(_POLL_S)

    # --- looks

    def check(self) -> bool:
        """Take in new nodes, give up lost ones, carry orders out as far as they have come; False: the cluster is to
        stop. Raises NodeLost, or PeerLost when Ray's head has not answered for long."""
        self._require_node()
        self._hand_over()
        try:
            goes_on = self._look_around()
        except PeerLost:
            if not self.is_on_hosts or time.monotonic() - self._heard_s > head_patience_s():
                raise
            return True
        self._heard_s = time.monotonic()
        return goes_on

    def ends_at_once(self) -> bool:
        """Return whether it was asked to stop without waiting for anything; by a signal alone is not known here."""
        try:
            return self.is_on_hosts and is_asked_to_stop_at_once(self._joining.cluster_id)
        except PeerLost:
            return True

    def _look_around(self) -> bool:
        if self.is_on_hosts:
            if is_asked_to_stop(self._joining.cluster_id):
                return False
            self._seen = {node.node_id: node for node in alive_nodes()}
            self._adapters.look(self._members.values(), self._joining.models)
        for preparation in list(self._preparations.values()):
            if preparation.node.node_id in self._seen:
                self._go_on(preparation)
        self._take_orders()
        self._drain_watch.look(self.actors())
        for step in reconcile(self._wanted, self._observed(), time.monotonic()):
            self._perform(step)
        self._log_problems()
        self._models.look()
        self._models.note_failing(self._wanted.failures.failing, self.healths())
        self._answer_questions()
        if self._scaling is not None:
            self._scaling.look(self._actors, self._seen.__getitem__)
        if self.is_on_hosts and self.record() != self._announced:
            self._announce()
        return True

    def _observed(self) -> SeenCluster:
        healths = self.healths()
        if not self.is_on_hosts:  # its processes start again within a second or two: no problem to be told
            healths = {name: Health() if it.state is ProcessState.ENDED else it for name, it in healths.items()}
        return SeenCluster(
            {node_id: node.host for node_id, node in self._seen.items()},
            {
                node_id: SeenNode(member.name, member.ray_node.host, member.workers)
                for node_id, member in self._members.items()
            },
            self._preparations,
            self._drain_watch.left,
            healths,
            self._drain_watch.registrations,
            [name for name in self.actors() if is_router(name)],
        )

    def _perform(self, step: ClusterStep) -> None:
        name = step.subject
        match step.act:
            case Act.PREPARE:
                self._preparations[name] = self._joining.begin(self._seen[name], self._members.values())
            case Act.CANCEL:
                self._preparations.pop(name).close()
            case Act.FORGET:
                member = self._members.pop(name)
                logger.warning("%s is lost, and with it %s", member.ray_node, member.name)
                self._recordings.forget(member.name)
                self._end_member(member)
            case Act.END_NODE:
                member = self._members.pop(name)
                logger.info("%s has drained", member.name)
                self._end_member(member)
            case Act.END_WORKER:
                self._end_worker(name)
            case Act.RESTART:
                with contextlib.suppress(RayError, ValueError, KeyError):  # its node is lost: it will not return
                    ray.kill(self.actors()[name], no_restart=False)
            case Act.START_AGAIN if name in self.actors():  # else its node has just ended
                logger.info("%s is started again", name)
                try:
                    self._start_again(name)
                except (RayError, ValueError):  # the next pause is longer
                    logger.warning("%s cannot be started yet", name, exc_info=True)
            case Act.SAY:
                logger.info("%s", step.text)
                self._answer(name, Remark(step.text))
            case Act.DONE:
                self._answer(name, OrderDone(step.text))
            case Act.REFUSE:
                self._answer(name, OrderRefused(step.text))

    def _log_problems(self) -> None:
        former, self._problems = self._problems, self._wanted.failures.problems
        for name, problem in self._problems.items():
            if problem != former.get(name):
                logger.error("%s does not serve: %s", name, problem)
        for name in former.keys() - self._problems.keys():
            logger.info("%s serves, or is gone", name)

    def _are_awaited(self, names: Iterable[str]) -> bool:
        healths, problems = self.healths(), self._wanted.failures.problems
        return any(
            healths.get(name, Health()).state is ProcessState.STARTING and name not in problems for name in names
        )

    # --- nodes

    def _go_on(self, preparation: Preparation) -> None:
        node = preparation.node
        try:
            member = preparation.advance()
            if member is None:
                return
            self._admit(member)
        except PeerLost as error:
            logger.warning("%s joins later: %s", node, error)
            self._wanted.postpone(node.node_id, time.monotonic())
        except AlignedServeError as error:
            self.refuse(node, str(error))
        else:
            self._wanted.joined(node.node_id)
        del self._preparations[node.node_id]

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

    def record(self) -> ClusterRecord:
        """Return what commands on any node are told."""
        draining, problems = self._wishes.draining, self._wanted.failures.problems
        released = (node_id for node_id in self._wishes.released if node_id not in self._members)
        left_out = {**self._wanted.refused, **dict.fromkeys(released, "given back, as the load does not need it")}
        members, seen = self._members.items(), self._seen
        return ClusterRecord(
            cluster_id=self._joining.cluster_id,
            version=own_versions(),
            model=", ".join(plan.served.name for plan in self.plans),
            topology=self.config.chosen_topology.value,
            models=tuple(msgspec.structs.replace(report, num_open=None) for report in self._reports()),
            started=self._succession.started if self._succession is not None else 0.0,
            is_ready=self._ready_s is not None,
            nodes=(
                *(record_of(member, is_draining=key in draining, problems=problems) for key, member in members),
                *(
                    NodeRecord(node.name, key, node.host[1], node.host[0], drain=DRAINED)
                    for key, node in self._wanted.drained.items()
                ),
                *(
                    NodeRecord("", key, seen[key].address, seen[key].hostname, problem=why)
                    for key, why in left_out.items()
                ),
            ),
            driver=self._driver_id,
            drain_s=self.config.gateway.drain_s,
        )

    def _announce(self) -> None:
        self._hand_over(has_changed=True)
        record = self.record()
        write_record(record)
        self._announced = record

    def _hand_over(self, *, has_changed: bool = False) -> None:
        if self._succession is not None:
            known = (self._joining, tuple(self._members.values()), self._factory.secrets, self._actors)
            self._succession.hand_over(*known, has_changed=has_changed)

    # --- workers

    def _create_worker(self, node: PreparedNode, name: str) -> None:
        try:
            self.add_worker(node, name)
        except (RayError, ValueError) as error:  # a driver that died before it had told anyone has used the name
            raise PeerLost(f"{name} cannot be started, try again: {error}") from error

    def _end_worker(self, name: str) -> None:
        member = self._member_of(name)
        if member is not None:
            part = member.part_of(name)
            member.set_part(replace(part, share=part.share.without([name])))
            self.remove_worker(member.name, name)
            logger.info("%s has drained and ended", name)

    def _member_of(self, worker: str) -> Member | None:
        return next((member for member in self._members.values() if worker in member.workers), None)

    # --- end

    def stop(self) -> None:
        """Stop every actor and Ray itself. May be repeated; never raises; ignores signals meanwhile."""
        with signals_ignored():
            self._end_everything()

    def leave(self) -> None:
        """Shut down after an internal error; whatever can run without this process keeps running, for the next driver.
        A cluster of one host stops, and so does one that served only briefly: the next driver might fail likewise. May
        be followed by `stop`; never raises."""
        if not self.is_on_hosts or self._ready_s is None or time.monotonic() - self._ready_s < _SETTLED_S:
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
            self._close_log()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _watch(self, name: str) -> None:
        self._watchdogs[name] = Watchdog(self._actors[name], self.config.links.hang_timeout_s)
        self._watchdogs[name].start()

    def _state_of_others(self) -> SharedState:
        if self._state.batches is None:
            return self._state
        return replace(self._state, batches=self._state.batches.elsewhere())

    def _require_node(self) -> None:
        problem = self._node_watch.problem if self._node_watch is not None else None
        if problem is not None:
            raise NodeLost(f"{problem}; without it no process is started again")

    def _end_unheeded(self, problem: str) -> None:
        logger.critical("%s, and a call of Ray's hangs; everything is ended", problem)
        self._end_without_ray()
        os._exit(os.EX_TEMPFAIL)

    def _end_without_ray(self) -> None:
        assert self._node_watch is not None, "Ray was lost that this process has not started"
        atexit.unregister(ray.shutdown)
        kill_all([*self._started_processes(), *self._node_watch.children])
        self._close_own()
        self._remove_files()

    def _end_everything(self) -> None:
        if self._node_watch is not None:
            self._node_watch.stop()
            if self._node_watch.problem is not None:
                self._end_without_ray()
                return
        for watchdog in self._watchdogs.values():
            watchdog.stop()
        started = self._started_processes()
        if ray.is_initialized() and self._actors:
            stops = [actor.stop.remote() for actor in self.actors().values()]
            try:
                ray.wait(stops, num_returns=len(stops), timeout=_STOP_TIMEOUT_S)
            except (RayError, ValueError):
                logger.debug("an actor was gone before it was stopped")
        self._leave_ray()
        if self._template is not None:
            self._template.stop()
        self._actors.clear()
        self._close_own()
        kill_survivors(started, _RAY_EXIT_S)
        kill_all(orphans_of(self.folder))
        self._remove_files()

    def _remove_files(self) -> None:
        remove_stale_arenas(arena_folder(), f"{ARENA_PREFIX}{self.folder.name}-")
        for path in (*self.folder.glob("*.sock"), *self.folder.glob("*.progress")):
            path.unlink(missing_ok=True)

    def _started_processes(self) -> list[psutil.Process]:
        processes = [child for child in psutil.Process().children() if child not in self._children_before]
        for child in tuple(processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                processes += child.children(recursive=True)
        return processes

    def _close_own(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._state_lock is not None:
            self._state_lock.release()

    def _leave_ray(self) -> None:
        self._close_preparations()
        self._recordings.close(is_end=ray.is_initialized())
        if self.is_on_hosts and ray.is_initialized():
            agents = [member.agent.actor for member in self._members.values()]
            everything = [*self.actors().values(), *agents]
            try:
                remove_record(self._joining.cluster_id)
                kill_actors(everything)
                for member in self._members.values():
                    release(member.prepared.folder.name)
                if self._scaling is not None:
                    self._scaling.close()
            except PeerLost:
                logger.warning("Ray's head is gone, and with it the record of this cluster")
                end_actors(everything)
        ray.shutdown()
        self._close_log()

    def _close_preparations(self) -> None:
        for preparation in self._preparations.values():
            with contextlib.suppress(RayError, ValueError):  # Ray's head may be gone
                preparation.close()
        self._preparations.clear()

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()

    def _wait_for_actors(self) -> None:
        """Wait until every actor is up, as long as models load. Raises the error of the first failing one, or
        AskedToStop."""
        starting = Starting(self.actors(), self._patience(START_TIMEOUT_S))
        while not starting.is_over:
            self.check_start()
            starting.look(_POLL_S)

    def _patience(self, timeout_s: float) -> Patience:
        return Patience(self.progress, timeout_s, self._observer)

    # --- orders and models

    def _take_orders(self) -> None:
        if self._channel is None:
            is_shared = self.is_on_hosts
            self._channel = StoredOrders(self._joining.cluster_id) if is_shared else AdminApi(self.folder)
        restart = self._wanted.restart
        for order_id, order in self._channel.take():
            problem = problem_of(order)
            if problem is not None:
                self._answer(order_id, OrderRefused(problem))
            elif not self._models.logic.knows(order_id) and (restart is None or order_id != restart.order_id):
                self._obey(order_id, order)  # else a driver before this one has begun it

    def _obey(self, order_id: str, order: AdminRequest) -> None:
        try:
            match order:
                case ShowModels():
                    self._shown.append(order_id)
                case ShowStatus():
                    actors, (gateway, *_) = self.actors(), self._node.share.gateways
                    self._questions[order_id] = StatusQuestion(actors, actors[gateway[0]], time.monotonic())
                case RestartWorkers():
                    self._wishes.restart(order_id, order, self._models.reports())
                case DrainNode() | UndoDrain() | ScaleWorkers():
                    said = self._done_with_nodes(order)
                    self._hand_over(has_changed=True)  # before the giver is told
                    self._answer(order_id, OrderDone(said))
                case _:
                    self._models.order(order_id, order)
        except AlignedServeError as error:
            self._answer(order_id, OrderRefused(str(error)))

    def _done_with_nodes(self, order: NodeOrder) -> str:
        if self.is_on_hosts and isinstance(order, DrainNode):
            return self._wishes.drain_node(order, self.record().nodes)
        if self.is_on_hosts and isinstance(order, UndoDrain):
            return self._wishes.undo_node(order.node, self.record().nodes)
        if self._wanted.restart is not None:  # whose drains are not the order's
            raise ResourceError("workers are being restarted; give the order again when that is over")
        match order:
            case DrainNode(name, within_s):
                return self._wishes.drain_worker(name, within_s)
            case UndoDrain(name):
                return self._wishes.undo_worker(name)
            case ScaleWorkers():
                return self._wishes.scale(order, self.actors())

    def _answer_questions(self) -> None:
        now, shown = time.monotonic(), self._shown
        self._shown = []
        for order_id in shown:
            self._answer(order_id, Models(self.url, self._reports()))
        for order_id in [order_id for order_id, question in self._questions.items() if question.is_over(now)]:
            question = self._questions.pop(order_id)
            self._answer(order_id, question.report(self.url, self.healths(), self._reports()))

    def _reports(self) -> tuple[DeploymentReport, ...]:
        ended = {name: STARTS_AGAIN for name, health in self.healths().items() if health.state is ProcessState.ENDED}
        return tuple(self._models.reports({**ended, **self._wanted.failures.problems}))

    def _start_again(self, name: str) -> None:
        member = next(member for member in self._members.values() if name in self._actors[member.name])
        self.start_again(member.part_of(name), name)

    def _answer(self, order_id: str, answer: Answer) -> None:
        if self._channel is not None:
            self._channel.answer(order_id, answer)
