"""A running cluster whose models are added, replaced and removed while it serves: on one host, or on several."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from typing_extensions import override

from alignedserve.cluster.actor_factory import ActorFactory, PreparedNode
from alignedserve.cluster.deployments.admin_api import AdminApi
from alignedserve.cluster.deployments.driver import DeploymentsDriver
from alignedserve.cluster.deployments.on_demand import ModelOnDemand, OnDemandModels
from alignedserve.cluster.deployments.orders import (
    AdminRequest,
    Answer,
    DeploymentReport,
    Models,
    NodeOrder,
    OrderChannel,
    ProcessReport,
    Refused,
    RestartWorkers,
    ShowModels,
    ShowStatus,
    StatusReport,
    problem_of,
)
from alignedserve.cluster.deployments.preparing import DeploymentSettings, Examine, HostedPreparing
from alignedserve.cluster.deployments.site import HostedDeployments
from alignedserve.cluster.draining.drain_watch import DrainWatch
from alignedserve.cluster.draining.rolling_restart import WorkerRestarts
from alignedserve.cluster.local_ray.worker_template import WorkerTemplate
from alignedserve.cluster.nodes.joining import Joining
from alignedserve.cluster.nodes.members import Member
from alignedserve.cluster.nodes.plan import ClusterPlan
from alignedserve.cluster.ray_polls import answer_or_none, has_ended, have_all_ended
from alignedserve.cluster.restarts import STARTS_AGAIN, Health, ProcessState
from alignedserve.cluster.running_cluster import RunningCluster
from alignedserve.cluster.start_observer import StartObserver
from alignedserve.cluster.watchdog import FailedProcesses
from alignedserve.config.model_settings import ModelSettings
from alignedserve.core.errors import PeerLost

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
        for name, asked in self._memory.items():
            health = healths.get(name, Health())
            state = _STATES.get(health.state, "fails")
            yield ProcessReport(name, state, health.problem, _answer(asked))


def _answer(asked: Any) -> Any:
    return answer_or_none(asked) if has_ended(asked) else None


_READY_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Brought:
    """Parts of a cluster that each driver brings along."""

    settings: ModelSettings
    examine: Examine
    observer: StartObserver
    on_demand: tuple[ModelOnDemand, ...] = ()  # models that are not loaded at the start
    template: WorkerTemplate | None = None  # forks the processes of a cluster of one host; None: Ray starts them


class ServingCluster(RunningCluster):
    """A started cluster of one node, this host. `check` carries orders out and never waits."""

    def __init__(self, joining: Joining, members: Sequence[Member], factory: ActorFactory, brought: Brought) -> None:
        """`members`: the head first."""
        super().__init__(members[0].prepared, joining.plan.served, factory, brought.observer, brought.template)
        self._members = {member.ray_node.node_id: member for member in members}
        self._joining = joining
        self._first_gateways = joining.plan.gateways  # also those of a later driver: shares must add up to the limits
        settings = DeploymentSettings(
            brought.settings, {one: model.own for one, model in joining.models.items()}, self.folder
        )
        preparing = HostedPreparing(settings, brought.examine)
        site = HostedDeployments(self._members, joining, preparing, self, brought.observer)
        self._models = DeploymentsDriver(site, joining.logic, self._answer, OnDemandModels(brought.on_demand))
        self.on_demand = brought.on_demand
        self._restarts = WorkerRestarts(joining.drains, self.actors, self._answer)
        self._drain_watch = DrainWatch(joining.drains)
        self._failed = FailedProcesses(self._watched_healths, self._start_again)
        self._questions: dict[str, StatusQuestion] = {}  # of status, by order
        self._channel: OrderChannel | None = None  # from the first look on

    @property
    def plans(self) -> tuple[ClusterPlan, ...]:
        """Return the plans of the models that are listed to clients, in that order."""
        return tuple(self._joining.models[one].plan for one in self._models.listed)

    @override
    def create(self, others: tuple[PreparedNode, ...] = ()) -> None:
        super().create(others)
        if len(self._joining.models) > 1 or self.on_demand:
            self._models.announce()

    @override
    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """See RunningCluster; of every model."""
        super().wait_ready(timeout_s)
        patience = self._patience(timeout_s)
        while (len(self._joining.models) > 1 or self.on_demand) and not self._are_all_ready():
            self.check_start()
            if patience.is_over():
                raise PeerLost(f"not every model was ready within {timeout_s:.0f} s; see {self.folder / 'logs'}")
            time.sleep(_READY_LOOK_S)

    def _are_all_ready(self) -> bool:
        return self._models.are_all_ready()

    @override
    def check(self) -> bool:
        """Carry orders out, as far as they have come. They are taken from the first call on. Raises NodeLost."""
        super().check()
        self._take_orders()
        self._look_at_models(self._drain_watch.look(self.actors()))
        self._failed.look()
        return True

    def _open_channel(self) -> OrderChannel:
        return AdminApi(self.folder)

    def _take_orders(self) -> None:
        if self._channel is None:
            self._channel = self._open_channel()
        for order_id, order in self._channel.take():
            problem = problem_of(order)
            if problem is not None:
                self._answer(order_id, Refused(problem))
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
        return Refused("one host serves alone; nodes are drained and workers scaled in a cluster of several hosts")

    def _look_at_models(self, drained: Collection[str]) -> bool:
        """Go on with the orders; return whether a deployment has entered another phase.

        `drained`: workers of which nothing is left.
        """
        before, now = self._models.phases, time.monotonic()
        self._models.look()
        self._models.note_failing(self._failed.failing, self.healths())
        self._restarts.look(drained)
        for order_id in [one for one, question in self._questions.items() if question.is_over(now)]:
            question = self._questions.pop(order_id)
            self._answer(order_id, question.report(self.url, self.healths(), self._reports()))
        return self._models.phases != before

    def _reports(self) -> tuple[DeploymentReport, ...]:
        ended = {name: STARTS_AGAIN for name, one in self.healths().items() if one.state is ProcessState.ENDED}
        return tuple(self._models.reports({**ended, **self._failed.problems}))

    def _watched_healths(self) -> dict[str, Health]:
        return {name: Health() if one.state is ProcessState.ENDED else one for name, one in self.healths().items()}

    def _start_again(self, name: str) -> None:
        member = next(one for one in self._members.values() if name in self._actors[one.name])
        self.start_again(member.part_of(name), name)

    def _answer(self, order_id: str, answer: Answer) -> None:
        if self._channel is not None:
            self._channel.answer(order_id, answer)

    @override
    def _parts_beside(self, node: PreparedNode) -> Sequence[PreparedNode]:
        member = next(one for one in self._members.values() if one.name == node.share.node)
        return tuple(member.others.values())

    @override
    def _factory_of(self, part: PreparedNode) -> ActorFactory:
        model = self._joining.models.get(part.share.deployment_id)
        served = model.served if model is not None else self.served  # of which a node without it has gateways alone
        return self._factory.serving(served, self._models.announced)

    @override
    def _close_own(self) -> None:
        if self._channel is not None:
            self._channel.close()
        super()._close_own()
