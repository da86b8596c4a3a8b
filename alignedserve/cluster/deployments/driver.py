"""Carries out what DeploymentsLogic decides, one look at a time, on the nodes of the cluster."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from ray.exceptions import RayError

from alignedserve.cluster.actor_factory import BATCHES, PreparedNode
from alignedserve.cluster.deployments.logic import (
    DeploymentsLogic,
    DeploymentStage,
    Failed,
    ModelAct,
    ModelStep,
    Prepared,
    SeenModels,
    View,
)
from alignedserve.cluster.deployments.on_demand import ModelOnDemand, OnDemandModels
from alignedserve.cluster.deployments.orders import (
    AddModel,
    Answer,
    DeploymentReport,
    ModelOrder,
    OrderDone,
    OrderRefused,
    Remark,
    RemoveModel,
    ReplaceModel,
)
from alignedserve.cluster.deployments.preparing import Asleep, HostedPlan, HostedPreparing, Surroundings
from alignedserve.cluster.desired import Health, ProcessState
from alignedserve.cluster.nodes.admission import Agent
from alignedserve.cluster.nodes.joining import Joining
from alignedserve.cluster.nodes.members import HostedModel, Member
from alignedserve.cluster.ray_node import OpenCalls, answer_or_none, have_all_ended, kill_actors
from alignedserve.cluster.run_folder import remove_files
from alignedserve.cluster.starting import START_TIMEOUT_S, LoggingObserver, Patience, Starting, StartObserver
from alignedserve.core.errors import AlignedServeError, NotEnoughMemory
from alignedserve.process.addresses import ROUTER, deployed_name
from alignedserve.process.loading_progress import LoadedShare
from alignedserve.runtime.model.served_model import DeploymentPhase, DeploymentState, ServedDeployment

logger = logging.getLogger(__name__)

_STOP_S = 5.0  # for processes to free their memory
_GONE_S = 10.0  # for killed processes
_PAUSE_S = 1.0  # between two rounds of views while nothing changes
_SERVE_NOTHING = (ProcessState.FAILED, ProcessState.DEAD)
_ANNOUNCED = {
    DeploymentStage.PROVING: DeploymentPhase.PREPARING,
    DeploymentStage.SERVING: DeploymentPhase.SERVING,
    DeploymentStage.DRAINING: DeploymentPhase.DRAINING,
}
_COMING = (DeploymentStage.PREPARING, DeploymentStage.STARTING, DeploymentStage.PROVING)
_Heard = tuple[DeploymentState, ...] | None  # None: its process is lost, and Ray may start it again


class EndingDeployment:
    """A deployment whose processes end: asked first, then killed, until their memory is free."""

    def __init__(self, name: str, actors: Mapping[str, Any], remove: Callable[[], bool]) -> None:
        """`name`: of its model. `remove`: removes what they leave; returns whether nothing is held any more."""
        self._name = name
        self._actors = actors
        self._remove = remove
        self._stops: list[Any] = []
        for actor in actors.values():
            with contextlib.suppress(RayError, ValueError):
                self._stops.append(actor.stop.remote())
        self._kills_s: float | None = time.monotonic() + _STOP_S
        self._gone_s = 0.0

    def look(self) -> bool:
        if self._kills_s is not None:
            if not have_all_ended(self._stops) and time.monotonic() < self._kills_s:
                return False
            kill_actors(self._actors.values())
            self._kills_s, self._gone_s = None, time.monotonic() + _GONE_S
            return False
        is_gone = self._remove()
        if not is_gone and time.monotonic() < self._gone_s:
            return False
        if not is_gone:
            logger.warning("memory of %s is not free yet", self._name)
        return True


class Described(NamedTuple):
    """A deployment as reports name it."""

    path: str  # of its model
    workers: tuple[str, ...] = ()  # names of the workers
    processes: tuple[str, ...] = ()  # names of all processes of the deployment
    topology: str = ""


class RunningProcesses(Protocol):
    """The processes of a cluster, as deployments come and go; see ServingCluster."""

    def healths(self) -> Mapping[str, Health]: ...
    def progress(self) -> list[LoadedShare | None]: ...
    def actors_of(self, node: str) -> Mapping[str, Any]: ...
    def add_part(self, part: PreparedNode) -> dict[str, Any]: ...
    def take_out(self, node: str, names: Iterable[str]) -> dict[str, Any]: ...


class HostedDeployments:
    """Starts and ends deployments on the members of a cluster. Nothing here waits but on a thread of its own."""

    def __init__(
        self,
        members: Mapping[str, Member],
        joining: Joining,
        preparing: HostedPreparing,
        cluster: RunningProcesses,
        observer: StartObserver,
    ) -> None:
        """`members`: by Ray's id, as they come and go, the head first."""
        self._members = members
        self._joining = joining
        self._preparing = preparing
        self.settings = preparing.settings
        self._cluster = cluster
        self._observer = observer
        self._planned: dict[str, HostedPlan] = {}  # that have no processes yet

    def begin_preparing(
        self, deployment_id: str, order: AddModel | ReplaceModel, replaced: str | None, asleep: Asleep
    ) -> "Future[Any]":
        """Begin to plan one more deployment; the result is for `note_prepared`, or an error of the tree."""
        members = [member for member in self._members.values() if member.name not in self._joining.wanted.drains]
        able = tuple(replace(member, others=dict(member.others)) for member in members)  # for a thread, as they are now
        device = self._joining.plan.config.engine.device
        around = Surroundings(able, dict(self._joining.models), dict(self._joining.wholes), device, asleep)
        return _in_background(
            lambda: self._preparing.prepare(deployment_id, order, replaced, around), f"preparing {deployment_id}"
        )

    def note_prepared(self, deployment_id: str, prepared: HostedPlan) -> Prepared:
        self._planned[deployment_id] = prepared
        self._observer.sizes_chosen(next(iter(prepared.model.plan.choices.values())), has_others=True)
        nodes = ", ".join(name for name, part in prepared.parts.items() if part.share.num_workers)
        where = (f"workers on {nodes}",) if len(self._members) > 1 else ()
        return Prepared(prepared.model.served.name, (*where, *prepared.remarks))

    def start_deployment(self, deployment_id: str) -> Starting:
        """Create its processes, but on nodes that have gone meanwhile. Raises RayError or ValueError."""
        planned = self._planned.pop(deployment_id)
        self._joining.models[deployment_id] = planned.model
        made: dict[str, Any] = {}
        for member in self._members.values():
            part = planned.parts.get(member.name)
            if part is not None and part.folder == member.prepared.folder:  # not one that has come back since
                member.set_part(part)
                made |= self._cluster.add_part(part)
        return Starting(made, Patience(self._cluster.progress, START_TIMEOUT_S, LoggingObserver()))

    def end_deployment(self, deployment_id: str) -> EndingDeployment:
        model = self._joining.models[deployment_id]
        ended: dict[str, Any] = {}
        left: dict[str, tuple[Agent, tuple[str, ...]]] = {}
        for member in self._members.values():
            part = member.models.get(deployment_id)
            if part is None:
                continue
            share = part.share
            names = (share.router, share.pool_name, *share.workers)
            ended |= self._cluster.take_out(member.name, names)
            left[member.name] = member.agent, names
        self.settings.forget(deployment_id)
        return EndingDeployment(model.served.name, ended, _Cleaning(left).is_over)

    def forget_deployment(self, deployment_id: str) -> None:
        """Forget a deployment that has ended, or was not started after all. Until then its memory counts, and a next
        driver finds its processes."""
        self._planned.pop(deployment_id, None)
        self._joining.models.pop(deployment_id, None)
        for member in self._members.values():
            member.remove_model(deployment_id)
        self.settings.forget(deployment_id)

    def announced(self, deployment_id: str, phase: DeploymentPhase, *, is_failing: bool) -> ServedDeployment:
        plan = self._joining.models[deployment_id].plan
        config = next(iter(plan.choices.values())).config
        return ServedDeployment(
            served=plan.served,
            block_size=config.engine.block_size,
            prefix_cache=config.prefix_cache,
            deployment_id=deployment_id,
            router=deployed_name(ROUTER, deployment_id),
            phase=phase,
            is_failing=is_failing,
        )

    def on_demand(self, deployment_id: str) -> ModelOnDemand | None:
        """Return a deployment's model as one on demand; None: it is there for good."""
        model = self._joining.models[deployment_id]
        plan = model.plan
        if plan.config.model.keep_alive is None:
            return None
        sized = next(iter(plan.choices.values())).config
        return ModelOnDemand.of(plan, sized, model.own)

    def described(self, deployment_id: str) -> Described | None:
        """Return what reports say of a deployment; None: it is not planned yet."""
        planned, model = self._planned.get(deployment_id), self._joining.models.get(deployment_id)
        if planned is not None:
            return _described(planned.model, planned.parts.values())
        if model is None:
            return None
        parts = (member.models.get(deployment_id) for member in self._members.values())
        return _described(model, [part for part in parts if part is not None])

    def listeners(self) -> Iterator[Any]:
        """Return the actors of all gateways and of the batch worker, but for those that serve nothing: a port that is
        taken on one host must not keep models from all others."""
        healths = self._cluster.healths()
        for member in self._members.values():
            actors = self._cluster.actors_of(member.name)
            for name in (*(name for name, _ in member.prepared.share.gateways), BATCHES):
                if name in actors and healths.get(name, Health()).state not in _SERVE_NOTHING:
                    yield actors[name]


def _described(model: HostedModel, parts: Iterable[PreparedNode]) -> Described:
    all_parts = list(parts)
    workers = tuple(name for part in all_parts for name in part.share.workers)
    routers = (part.share.router for part in all_parts if part.share.is_head)
    pools = (part.share.pool_name for part in all_parts if part.share.num_workers and part.config.node_pool is not None)
    topology = model.plan.config.chosen_topology.value
    return Described(str(model.folder), workers, (*routers, *pools, *workers), topology)


class _Cleaning:
    def __init__(self, left: Mapping[str, tuple[Agent, Sequence[str]]]) -> None:
        self._left = dict(left)  # by node
        self._calls = OpenCalls()

    def is_over(self) -> bool:
        gone = [node for node, is_gone in self._calls.answers().items() if is_gone is not False]
        for node, (agent, names) in self._left.items():
            if agent.actor is None:
                gone += [node] if remove_files(agent.book.folder, names) else []
            elif node not in self._calls and node not in gone:
                self._calls.ask(node, agent.actor.remove_files.remote(names))
        self._left = {node: left for node, left in self._left.items() if node not in gone}
        return not self._left


class Views:
    """The views of all who serve requests. One round of questions at a time; used on one thread."""

    def __init__(self, listeners: Callable[[], Iterable[Any]], clock: Callable[[], float]) -> None:
        self._listeners = listeners
        self._clock = clock
        self._announced: tuple[ServedDeployment, ...] = ()
        self._round: tuple[tuple[ServedDeployment, ...], list[Any]] | None = None  # what was told, and the answers
        self._next_s = 0.0

    def announce(self, deployments: tuple[ServedDeployment, ...]) -> None:
        """Tell everyone at once; answers to what was told before do not count any more."""
        self._announced = deployments
        self._ask()

    def look(self, *, is_changing: bool) -> Mapping[str, View] | None:
        """Return the views by deployment; None: not all have answered. `is_changing`: ask again without a pause."""
        if self._round is None:
            if self._announced and (is_changing or self._clock() >= self._next_s):
                self._ask()
            return None
        announced, calls = self._round
        if not have_all_ended(calls):
            return None
        self._round = None
        self._next_s = self._clock() + _PAUSE_S
        if announced is not self._announced:
            self._ask()
            return None
        return combined([served.deployment_id for served in announced], [answer_or_none(call) for call in calls])

    def _ask(self) -> None:
        if self._round is None:
            listeners = list(self._listeners())
            self._round = (self._announced, [listener.serve_models.remote(self._announced) for listener in listeners])


def combined(deployment_ids: Iterable[str], answers: Sequence[_Heard]) -> dict[str, View]:
    return {deployment_id: _view(deployment_id, answers) for deployment_id in deployment_ids}


def _view(deployment_id: str, answers: Sequence[_Heard]) -> View:
    states = [state for answer in answers for state in answer or () if state.deployment_id == deployment_id]
    hopeless = [state for state in states if state.is_hopeless]
    missing = next((state.missing for state in (*hopeless, *states) if state.missing is not None), None)
    if missing is None and len(states) < max(len(answers), 1):
        missing = "a gateway or the batch worker is not up"
    num_unknown = sum(answer is None for answer in answers)  # each may hold a request
    used = [state for state in states if state.idle_s is not None]
    last = min(used, key=lambda state: state.idle_s or 0.0, default=None)
    return View(
        missing,
        sum(state.num_open for state in states) + num_unknown,
        num_documents=sum(state.num_documents for state in states),
        has_lines=any(state.has_lines for state in states),
        idle_s=last.idle_s if last is not None else None,
        keep_alive_s=last.keep_alive_s if last is not None else None,
        waited_s=_longest(state.waited_s for state in states),
        documents_waited_s=_longest(state.documents_waited_s for state in states),
        is_hopeless=bool(hopeless),
    )


def _longest(waits_s: Iterable[float | None]) -> float | None:
    return max((wait_s for wait_s in waits_s if wait_s is not None), default=None)


def _in_background(prepare: Callable[[], Any], name: str) -> "Future[Any]":
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(prepare())
        except Exception as error:  # noqa: BLE001  (raised again where the result is asked for)
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class DeploymentsDriver:
    """Drives the deployments of one cluster. All methods on one thread; none waits."""

    def __init__(
        self,
        site: HostedDeployments,
        logic: DeploymentsLogic,
        answer: Callable[[str, Answer], None],
        on_demand: OnDemandModels,
    ) -> None:
        """`answer`: gives the giver of an order, by its id, an answer; any but a Remark is the last one."""
        self._site = site
        self._answer = answer
        self._views = Views(site.listeners, time.monotonic)
        self._preparations: dict[str, Future[Any]] = {}
        self._starts: dict[str, Starting] = {}
        self._failed: dict[str, Failed] = {}  # whose processes cannot be created
        self._ends: dict[str, EndingDeployment] = {}
        self._on_demand = on_demand
        self._announced: tuple[ServedDeployment, ...] = ()
        # Positions of models by name, in order of arrival: a model keeps its position through sleep. The first of them
        # serves requests that name none.
        self._places: dict[str, int] = {}
        self._failing: frozenset[str] = frozenset()  # deployments of which no missing worker starts
        self.logic = logic

    @property
    def listed(self) -> tuple[str, ...]:
        return tuple(self.logic.serving.values())

    @property
    def announced(self) -> tuple[ServedDeployment, ...]:
        there = (
            self._site.announced(key, _ANNOUNCED[row.phase], is_failing=key in self._failing)
            for key, row in ((row.deployment_id, row) for row in self.logic.rows)
            if row.phase in _ANNOUNCED
        )
        announced = (*there, *self._on_demand.sleeping(self.logic.serving))
        return tuple(sorted(announced, key=lambda deployment: self._place(deployment.served.name)))

    def _place(self, name: str) -> int:
        return self._places.get(name, len(self._places))

    @property
    def is_changing(self) -> bool:
        return any(row.phase is not DeploymentStage.SERVING for row in self.logic.rows)

    def announce(self) -> None:
        self._announced = self.announced
        names = dict.fromkeys(deployment.served.name for deployment in self._announced)
        self._places = {name: index for index, name in enumerate(names)}
        self._views.announce(self._announced)

    def are_all_ready(self) -> bool:
        views = self._views.look(is_changing=True)
        return views is not None and all(view.missing is None for view in views.values())

    def reports(self, problems: Mapping[str, str] = MappingProxyType({})) -> Iterator[DeploymentReport]:
        yield from sorted(self._reports(problems), key=lambda report: self._place(report.name))

    def _reports(self, problems: Mapping[str, str]) -> Iterator[DeploymentReport]:
        for row in self.logic.rows:
            described = self._site.described(row.deployment_id) or Described("")
            yield DeploymentReport(
                *(row.deployment_id, row.name, described.path, row.phase.value, row.num_open),
                *(described.workers, described.processes, described.topology),
                leaves_in_s=self._on_demand.leaves_in_s(row.name) if row.phase is DeploymentStage.SERVING else None,
                failing={name: problems[name] for name in described.processes if name in problems},
            )
        yield from self._on_demand.reports({row.name for row in self.logic.rows})

    def note_failing(self, failing: Collection[str], healths: Mapping[str, Health]) -> None:
        """Tell gateways of which deployments no worker is to be waited for. `failing`: processes that do not start."""
        failing_ids = frozenset(
            row.deployment_id
            for row in self.logic.rows
            if row.phase in (DeploymentStage.SERVING, DeploymentStage.DRAINING)
            and self._are_failing(row.deployment_id, failing, healths)
        )
        if failing_ids != self._failing:
            self._failing = failing_ids
            self.announce()

    def _are_failing(self, deployment_id: str, failing: Collection[str], healths: Mapping[str, Health]) -> bool:
        described = self._site.described(deployment_id)
        if described is None:
            return False
        missing = [name for name in described.workers if healths.get(name, Health()).state is not ProcessState.UP]
        return not described.workers or (bool(missing) and all(name in failing for name in missing))

    def order(self, order_id: str, order: ModelOrder) -> None:
        answer = self._answer_of_demand(order)
        if answer is not None:
            self._answer(order_id, answer)
        else:
            self._take(order_id, order)

    def _answer_of_demand(self, order: ModelOrder) -> Answer | None:
        name = order.name
        if name is None or name not in self._on_demand:
            return None
        if not isinstance(order, RemoveModel):
            return OrderRefused(f"{name} is a model on demand; remove it first")
        if any(row.name == name and row.phase in _COMING for row in self.logic.rows):
            return OrderRefused(f"{name} is being loaded; remove it once it serves")
        self._on_demand.forget(name)
        if name in self.logic.serving:
            return None
        self.announce()
        return OrderDone(f"{name} was asleep; it is on demand no more")

    def _take(self, order_id: str, order: ModelOrder) -> None:
        logger.info("ordered: %s", order)
        self.logic.may_be_empty = self._on_demand.may_be_alone
        self._perform(self.logic.order(order_id, order, time.monotonic()))

    def look(self) -> None:
        seen, views = self._observed()
        self._perform(self.logic.reconcile(seen, time.monotonic()))
        if views is not None:
            self._look_at_demand(views)

    def resume(self) -> None:
        """Go on with what a former driver has left: what it had not brought to serve ends."""
        self._perform(self.logic.resume(time.monotonic()))

    def _observed(self) -> tuple[SeenModels, Mapping[str, View] | None]:
        done = [key for key, future in self._preparations.items() if future.done()]
        prepared = {key: self._prepared(key, self._preparations.pop(key)) for key in done}
        failed, self._failed = self._failed, {}
        failed |= {key: outcome for key, outcome in prepared.items() if isinstance(outcome, Failed)}
        up = []
        for deployment_id, starting in tuple(self._starts.items()):
            try:
                starting.look()
            except AlignedServeError as error:
                failed[deployment_id] = Failed(str(error), isinstance(error, NotEnoughMemory))
            else:
                up += [deployment_id] if starting.is_over else []
        self._starts = {key: it for key, it in self._starts.items() if key not in failed and key not in up}
        views = self._views.look(is_changing=self.is_changing)
        gone = [key for key, ending in self._ends.items() if ending.look()]
        for deployment_id in gone:
            del self._ends[deployment_id]
            self._site.forget_deployment(deployment_id)
        ready = {key: outcome for key, outcome in prepared.items() if isinstance(outcome, Prepared)}
        return SeenModels(ready, up, failed, views or {}, gone), views

    def _prepared(self, deployment_id: str, future: "Future[Any]") -> Prepared | Failed:
        try:
            return self._site.note_prepared(deployment_id, future.result())
        except AlignedServeError as error:
            return Failed(str(error), isinstance(error, NotEnoughMemory))
        except Exception as error:  # a fault of ours must not end the models that serve
            logger.exception("a model cannot be prepared")
            return Failed(f"an unexpected error while it was prepared: {type(error).__name__}")

    def _look_at_demand(self, views: Mapping[str, View]) -> None:
        for name, deployment_id in self.logic.serving.items():
            model = self._site.on_demand(deployment_id) if name not in self._on_demand else None
            if model is not None:
                self._on_demand.note(model)
        serving = self.logic.serving
        for order_id, order in [*self._on_demand.look(views, serving, is_changing=self.is_changing)]:
            if isinstance(order, RemoveModel) and order.name in serving:
                self._note_left(serving[order.name])
            self._take(order_id, order)
        if self._announced != self.announced:  # one that sleeps cannot be loaded, or can again
            self.announce()

    def _note_left(self, deployment_id: str) -> None:
        name = self.logic.of(deployment_id).name
        if name in self._on_demand:
            self._on_demand.note_left(name, deployment_id, self._site.settings.loaded_adapters(deployment_id))

    def _perform(self, steps: Iterable[ModelStep]) -> None:
        for act, subject, text, order, replaced, is_full in steps:
            match act:
                case ModelAct.PREPARE:
                    assert order is not None, "a preparation without an order"
                    asleep = self._on_demand.beside(order, self.logic.serving)
                    self._preparations[subject] = self._site.begin_preparing(subject, order, replaced, asleep)
                case ModelAct.START:
                    try:
                        self._starts[subject] = self._site.start_deployment(subject)
                    except (RayError, ValueError) as error:
                        self._failed[subject] = Failed(f"its processes cannot be created: {error}")
                case ModelAct.DISCARD:
                    self._site.forget_deployment(subject)
                case ModelAct.SETTLE:
                    assert replaced is not None, "a replacement of nothing"
                    missing = self._site.settings.settle_adapters(replaced, subject)
                    order_id = self.logic.of(replaced).order_id
                    if missing and order_id is not None:
                        remark = f"adapters that the new model does not have: {', '.join(missing)}"
                        self._answer(order_id, Remark(remark))
                case ModelAct.ANNOUNCE:
                    self.announce()
                case ModelAct.END:
                    self._starts.pop(subject, None)
                    self._note_left(subject)
                    self._ends[subject] = self._site.end_deployment(subject)
                case ModelAct.SAY:
                    if not self._on_demand.is_own(subject):
                        self._answer(subject, Remark(text))
                case ModelAct.DONE | ModelAct.REFUSE:
                    is_refused = act is ModelAct.REFUSE
                    logger.info("an order is %s: %s", "refused" if is_refused else "carried out", text)
                    answer = OrderRefused(text) if is_refused else OrderDone(text)
                    if not self._on_demand.takes(subject, answer, is_full=is_full):
                        self._answer(subject, answer)
