"""A running cluster: its actors, which Ray supervises and restarts, and its models, which come and go meanwhile."""

import atexit
import contextlib
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import psutil
import ray
from ray.exceptions import RayError

from alignedserve.batches.location import SharedState
from alignedserve.cluster.actor_factory import ActorFactory, PreparedNode
from alignedserve.cluster.batch_storage import StateLock, open_batch_storage
from alignedserve.cluster.deployments.admin_api import AdminApi
from alignedserve.cluster.deployments.driver import DeploymentsDriver
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
    RestartWorkers,
    ScaleWorkers,
    ShowModels,
    ShowStatus,
    StatusReport,
    UndoDrain,
    problem_of,
)
from alignedserve.cluster.deployments.preparing import DeploymentSettings, Examine, HostedPreparing
from alignedserve.cluster.deployments.site import HostedDeployments
from alignedserve.cluster.draining.drain_watch import DrainWatch
from alignedserve.cluster.draining.rolling_restart import WorkerRestarts
from alignedserve.cluster.draining.worker_scaling import WorkerActors, WorkerScaling
from alignedserve.cluster.local_ray.node_watch import NodeWatch, kill_all, orphans_of
from alignedserve.cluster.local_ray.start import start_ray
from alignedserve.cluster.local_ray.worker_template import WorkerTemplate
from alignedserve.cluster.nodes.joining import Joining
from alignedserve.cluster.nodes.members import Member
from alignedserve.cluster.nodes.plan import ClusterPlan
from alignedserve.cluster.ray_node import answer_of, answer_or_none, has_ended, have_all_ended, kill_actors
from alignedserve.cluster.restarts import STARTS_AGAIN, Health, ProcessState
from alignedserve.cluster.signals import signals_ignored
from alignedserve.cluster.starting import START_TIMEOUT_S, NotReady, Patience, Starting, StartObserver, ask_ready
from alignedserve.cluster.sweeper import kill_survivors
from alignedserve.cluster.watchdog import FailedProcesses, Watchdog
from alignedserve.config.model_settings import ModelSettings
from alignedserve.core.errors import AlignedServeError, ModelError, NodeLost, PeerLost
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.process.addresses import is_gateway
from alignedserve.process.loading_progress import LoadedShare, read_progress
from alignedserve.runtime.kv.arena_files import ARENA_PREFIX, arena_folder, remove_stale_arenas

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_STOP_TIMEOUT_S = 5.0
_RAY_EXIT_S = 3.0
_ANSWER_S = 5.0


class AskedToStop(Exception):
    """Raised by a start that somewhere else was asked to end."""


_PATIENCE_S = 2.0
_STATES = {ProcessState.UP: "up", ProcessState.STARTING: "starting", ProcessState.ENDED: "starting again"}


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


_READY_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class DriverSetup:
    """Parts of a cluster that each driver brings along."""

    settings: ModelSettings
    examine: Examine
    observer: StartObserver
    on_demand: tuple[ModelOnDemand, ...] = ()  # models that are not loaded at the start
    template: WorkerTemplate | None = None  # forks the processes of a cluster of one host; None: Ray starts them


class ServingCluster:
    """A started cluster of one node (this host) and a context manager. Used on one thread.
    `check`, about once a second, carries orders out and never waits. ClusterOnHosts overrides what differs with
    hosts."""

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
        self._factory = factory
        self._observer = setup.observer
        self._template = setup.template
        self._first_gateways = joining.plan.gateways  # also those of a later driver: shares must add up to the limits
        self._is_adopted = False  # a former driver has served with it
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
        self._restarts = WorkerRestarts(joining.drains, self.actors, self._answer)
        workers = WorkerActors(self._create_worker, self.remove_worker)
        self._workers = WorkerScaling(self._members, joining, workers)
        self._drain_watch = DrainWatch(joining.drains)
        self._failed = FailedProcesses(self._watched_healths, self._start_again)
        self._questions: dict[str, StatusQuestion] = {}  # of status, by order
        self._channel: OrderChannel | None = None  # from the first look on

    @property
    def plans(self) -> tuple[ClusterPlan, ...]:
        return tuple(self._joining.models[deployment_id].plan for deployment_id in self._models.listed)

    @property
    def url(self) -> str:
        host = self.config.gateway.host
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
        gateway, name = self.config.gateway, f"[{reachable}]" if ":" in reachable else reachable
        return f"{gateway.scheme}://{name}:{gateway.port}"

    def start(self, others: tuple[PreparedNode, ...] = ()) -> None:
        """Create every actor and wait until each is up. Raises the error of the first failing one."""
        self.create(others)
        self._wait_for_actors()
        for name in self._actors:
            self._watch(name)

    def create(self, others: tuple[PreparedNode, ...] = ()) -> None:
        """Create every actor; they come up by themselves, in any order."""
        self._state = SharedState(gateways=self._first_gateways)
        if self.config.batches.enabled:
            location, self._state_lock = open_batch_storage(self.config, is_adopted=self._factory.is_adopting)
            self._state = SharedState(location, self._first_gateways)
        if not ray.is_initialized():
            processes = start_ray(self.folder, f"alignedserve-{self.folder.name}", self._template)
            self._node_watch = NodeWatch(processes, self._end_unheeded)
            self._node_watch.start()
        self._create_on(self._node, self._state, drives_batches=True)
        for node in others:
            self._create_on(node, self._state_of_others())
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

    def check(self) -> bool:
        """Carry orders out, as far as they have come; False: the cluster is to stop. Raises NodeLost, PeerLost."""
        self._require_node()
        self._take_orders()
        drained = self._drain_watch.look(self.actors())
        self._end_drained(drained)
        self._look_at_models(drained)
        self._failed.look()
        return True

    def _end_drained(self, drained: Iterable[str]) -> bool:
        """End workers whose work is gone, unless they start again; return whether there were any."""
        leaving = [name for name in drained if not self._restarts.takes(name)]
        for name in leaving:
            self._workers.end(name)
        return bool(leaving)

    def _create_worker(self, node: PreparedNode, name: str) -> None:
        try:
            self.add_worker(node, name)
        except (RayError, ValueError) as error:  # a driver that died before it had told anyone has used the name
            raise PeerLost(f"{name} cannot be started, try again: {error}") from error

    def check_start(self) -> None:
        """Raise AskedToStop when the start is to end, which a cluster of one host is told by a signal, or NodeLost."""
        self._require_node()

    def ends_at_once(self) -> bool:
        """Return whether it was asked to stop without waiting for anything; by a signal alone is not known here."""
        return False

    def progress(self) -> list[LoadedShare | None]:
        names = self._actors.get(self._node.share.node, {})
        return [read_progress(self._node.book.progress_of(name)) for name in names]

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
            time.sleep(_READY_LOOK_S)

    def stop(self) -> None:
        """Stop every actor and Ray itself. May be repeated; never raises; ignores signals meanwhile."""
        with signals_ignored():
            self._end_everything()

    def leave(self) -> None:
        """Shut down after an internal error; whatever can run without this process keeps running. On one host the
        actors belong to this process and stop. May be followed by `stop`; never raises."""
        self.stop()

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
        ray.shutdown()

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

    def _open_channel(self) -> OrderChannel:
        return AdminApi(self.folder)

    def _take_orders(self) -> None:
        if self._channel is None:
            self._channel = self._open_channel()
        for order_id, order in self._channel.take():
            problem = problem_of(order)
            if problem is not None:
                self._answer(order_id, OrderRefused(problem))
            elif not self._models.logic.knows(order_id):  # a driver before this one may have begun it
                self._obey(order_id, order)

    def _obey(self, order_id: str, order: AdminRequest) -> None:
        if isinstance(order, ShowModels):
            self._answer(order_id, Models(self.url, self._reports()))
        elif isinstance(order, ShowStatus):
            actors, (gateway, *_) = self.actors(), self._node.share.gateways
            self._questions[order_id] = StatusQuestion(actors, actors[gateway[0]], time.monotonic())
        elif isinstance(order, RestartWorkers):
            self._restarts.order(order_id, order, self._models.reports())
        elif isinstance(order, NodeOrder):
            self._answer(order_id, self._obey_of_nodes(order))
        else:
            self._models.order(order_id, order)

    def _obey_of_nodes(self, order: NodeOrder) -> Answer:
        if self._restarts.goes_on:  # whose drains are not the order's
            return OrderRefused("workers are being restarted; give the order again when that is over")
        try:
            return OrderDone(self._done_with_workers(order))
        except AlignedServeError as error:
            return OrderRefused(str(error))

    def _done_with_workers(self, order: NodeOrder) -> str:
        match order:
            case DrainNode(name, within_s):
                return self._workers.drain(name, within_s)
            case UndoDrain(name):
                return self._workers.undo(name)
            case ScaleWorkers():
                return self._workers.scale(order, self.actors())

    def _look_at_models(self, drained: Collection[str]) -> bool:
        """Go on with the orders; return whether a deployment has entered another phase. `drained`: workers of which
        nothing is left."""
        before, now = self._models.phases, time.monotonic()
        self._models.look()
        self._models.note_failing(self._failed.failing, self.healths())
        self._restarts.look(drained)
        for order_id in [order_id for order_id, question in self._questions.items() if question.is_over(now)]:
            question = self._questions.pop(order_id)
            self._answer(order_id, question.report(self.url, self.healths(), self._reports()))
        return self._models.phases != before

    def _reports(self) -> tuple[DeploymentReport, ...]:
        ended = {name: STARTS_AGAIN for name, health in self.healths().items() if health.state is ProcessState.ENDED}
        return tuple(self._models.reports({**ended, **self._failed.problems}))

    def _watched_healths(self) -> dict[str, Health]:
        return {
            name: Health() if health.state is ProcessState.ENDED else health for name, health in self.healths().items()
        }

    def _start_again(self, name: str) -> None:
        member = next(member for member in self._members.values() if name in self._actors[member.name])
        self.start_again(member.part_of(name), name)

    def _answer(self, order_id: str, answer: Answer) -> None:
        if self._channel is not None:
            self._channel.answer(order_id, answer)
