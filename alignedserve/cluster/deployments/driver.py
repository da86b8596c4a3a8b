"""Carries out what DeploymentsLogic decides, one look at a time."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from ray.exceptions import RayError

from alignedserve.cluster.deployments.logic import (
    AnnounceDeployments,
    Command,
    Conclude,
    DeploymentsLogic,
    DeploymentStage,
    Discard,
    EndProcesses,
    Event,
    Failed,
    Ordered,
    Prepare,
    ProcessesGone,
    ProcessesUp,
    Say,
    SettleAdapters,
    StartProcesses,
    View,
    Viewed,
)
from alignedserve.cluster.deployments.on_demand import OnDemandModels
from alignedserve.cluster.deployments.orders import (
    Answer,
    DeploymentReport,
    ModelOrder,
    OrderDone,
    OrderRefused,
    Remark,
    RemoveModel,
)
from alignedserve.cluster.deployments.site import Described, EndingDeployment, HostedDeployments
from alignedserve.cluster.desired import Health, ProcessState
from alignedserve.cluster.ray_node import answer_or_none, have_all_ended
from alignedserve.cluster.starting import Starting
from alignedserve.core.errors import AlignedServeError, NotEnoughMemory
from alignedserve.runtime.model.served_model import DeploymentPhase, DeploymentState, ServedDeployment

_Heard = tuple[DeploymentState, ...] | None  # None: its process is lost, and Ray may start it again

_PAUSE_S = 1.0  # between two rounds while nothing changes


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


logger = logging.getLogger(__name__)

_ANNOUNCED = {
    DeploymentStage.PROVING: DeploymentPhase.PREPARING,
    DeploymentStage.SERVING: DeploymentPhase.SERVING,
    DeploymentStage.DRAINING: DeploymentPhase.DRAINING,
}


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
        self._failed: list[Failed] = []
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
        return tuple(
            standing.deployment_id for standing in self.logic.standings if standing.phase is DeploymentStage.SERVING
        )

    @property
    def announced(self) -> tuple[ServedDeployment, ...]:
        there = (
            self._site.announced(
                standing.deployment_id, _ANNOUNCED[standing.phase], is_failing=standing.deployment_id in self._failing
            )
            for standing in self.logic.standings
            if standing.phase in _ANNOUNCED
        )
        announced = (*there, *self._on_demand.sleeping(self.logic.standings))
        return tuple(sorted(announced, key=lambda deployment: self._place(deployment.served.name)))

    def _place(self, name: str) -> int:
        return self._places.get(name, len(self._places))

    @property
    def phases(self) -> dict[str, DeploymentStage]:
        return {standing.deployment_id: standing.phase for standing in self.logic.standings}

    @property
    def is_changing(self) -> bool:
        return any(standing.phase is not DeploymentStage.SERVING for standing in self.logic.standings)

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
        for standing in self.logic.standings:
            described = self._site.described(standing.deployment_id) or Described("")
            about = (standing.deployment_id, standing.name, described.path, standing.phase.value, standing.num_open)
            leaves_in_s = (
                self._on_demand.leaves_in_s(standing.name) if standing.phase is DeploymentStage.SERVING else None
            )
            failing = {name: problems[name] for name in described.processes if name in problems}
            processes = (described.workers, described.processes, described.topology)
            yield DeploymentReport(*about, *processes, leaves_in_s=leaves_in_s, failing=failing)
        yield from self._on_demand.reports(self.logic.standings)

    def note_failing(self, failing: Collection[str], healths: Mapping[str, Health]) -> None:
        """Tell gateways of which deployments no worker is to be waited for. `failing`: processes that do not start."""
        failing_ids = frozenset(
            standing.deployment_id
            for standing in self.logic.standings
            if standing.phase in (DeploymentStage.SERVING, DeploymentStage.DRAINING)
            and self._are_failing(standing.deployment_id, failing, healths)
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
            return
        self._take(order_id, order)

    def _answer_of_demand(self, order: ModelOrder) -> Answer | None:
        name = order.name
        if name is None or name not in self._on_demand:
            return None
        if not isinstance(order, RemoveModel):
            return OrderRefused(f"{name} is a model on demand; remove it first")
        phases = {standing.phase for standing in self.logic.standings if standing.name == name}
        if phases & {DeploymentStage.PREPARING, DeploymentStage.STARTING, DeploymentStage.PROVING}:
            return OrderRefused(f"{name} is being loaded; remove it once it serves")
        self._on_demand.forget(name)
        if DeploymentStage.SERVING in phases:
            return None
        self.announce()
        return OrderDone(f"{name} was asleep; it is on demand no more")

    def _take(self, order_id: str, order: ModelOrder) -> None:
        logger.info("ordered: %s", order)
        self.logic.may_be_empty = self._on_demand.may_be_alone
        self._handle(Ordered(order_id, order))

    def look(self) -> None:
        for event in [*self._events()]:
            self._handle(event)

    def resume(self) -> None:
        """Go on with what a former driver has left: what it had not brought to serve ends."""
        for command in self.logic.resume(time.monotonic()):
            self._perform(command)

    def _events(self) -> Iterator[Event]:
        for deployment_id in [key for key, future in self._preparations.items() if future.done()]:
            yield self._prepared(deployment_id, self._preparations.pop(deployment_id))
        failed, self._failed = self._failed, []
        yield from failed
        for deployment_id, starting in tuple(self._starts.items()):
            try:
                starting.look()
            except AlignedServeError as error:
                del self._starts[deployment_id]
                yield Failed(deployment_id, str(error), isinstance(error, NotEnoughMemory))
            else:
                if starting.is_over:
                    del self._starts[deployment_id]
                    yield ProcessesUp(deployment_id)
        views = self._views.look(is_changing=self.is_changing)
        if views is not None:
            yield Viewed(views)
            self._look_at_demand(views)
        for deployment_id in [key for key, ending in self._ends.items() if ending.look()]:
            del self._ends[deployment_id]
            self._site.forget_deployment(deployment_id)
            yield ProcessesGone(deployment_id)

    def _look_at_demand(self, views: Mapping[str, View]) -> None:
        for standing in self.logic.standings:
            if standing.phase is DeploymentStage.SERVING and standing.name not in self._on_demand:
                model = self._site.on_demand(standing.deployment_id)
                if model is not None:
                    self._on_demand.note(model)
        for order_id, order in [*self._on_demand.look(views, self.logic.standings)]:
            for standing in self.logic.standings:
                if isinstance(order, RemoveModel) and (standing.name, standing.phase) == (
                    order.name,
                    DeploymentStage.SERVING,
                ):
                    self._note_left(standing.deployment_id)
            self._take(order_id, order)
        if self._announced != self.announced:  # one that sleeps cannot be loaded, or can again
            self.announce()

    def _note_left(self, deployment_id: str) -> None:
        name = next(
            (standing.name for standing in self.logic.standings if standing.deployment_id == deployment_id), None
        )
        if name is not None and name in self._on_demand:
            self._on_demand.note_left(name, deployment_id, self._site.loaded_adapters(deployment_id))

    def _prepared(self, deployment_id: str, future: "Future[Any]") -> Event:
        try:
            return self._site.note_prepared(deployment_id, future.result())
        except AlignedServeError as error:
            return Failed(deployment_id, str(error), isinstance(error, NotEnoughMemory))
        except Exception as error:  # a fault of ours must not end the models that serve
            logger.exception("a model cannot be prepared")
            return Failed(deployment_id, f"an unexpected error while it was prepared: {type(error).__name__}")

    def _handle(self, event: Event) -> None:
        for command in self.logic.on_event(event, time.monotonic()):
            self._perform(command)

    def _perform(self, command: Command) -> None:
        match command:
            case Prepare(deployment_id, order, replaced):
                asleep = self._on_demand.beside(order, self.logic.standings)
                self._preparations[deployment_id] = self._site.begin_preparing(deployment_id, order, replaced, asleep)
            case StartProcesses(deployment_id):
                self._start(deployment_id)
            case Discard(deployment_id):
                self._site.forget_deployment(deployment_id)
            case SettleAdapters(order_id, replaced, deployment_id):
                missing = self._site.settle_adapters(replaced, deployment_id)
                if missing:
                    self._answer(order_id, Remark(f"adapters that the new model does not have: {', '.join(missing)}"))
            case AnnounceDeployments():
                self.announce()
            case EndProcesses(deployment_id):
                self._starts.pop(deployment_id, None)
                self._note_left(deployment_id)
                self._ends[deployment_id] = self._site.end_deployment(deployment_id)
            case Say(order_id, text):
                if not self._on_demand.is_own(order_id):
                    self._answer(order_id, Remark(text))
            case Conclude(order_id, text, is_refused, is_full):
                logger.info("an order is %s: %s", "refused" if is_refused else "carried out", text)
                answer = OrderRefused(text) if is_refused else OrderDone(text)
                if not self._on_demand.takes(order_id, answer, is_full=is_full):
                    self._answer(order_id, answer)

    def _start(self, deployment_id: str) -> None:
        try:
            self._starts[deployment_id] = self._site.start_deployment(deployment_id)
        except (RayError, ValueError) as error:
            self._failed.append(Failed(deployment_id, f"its processes cannot be created: {error}"))
