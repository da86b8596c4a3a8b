"""A cluster on this host, whose models are added, replaced and removed while it serves."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from typing_extensions import override

from alignedserve.cluster.actor_factory import BATCHES, ActorFactory, PreparedNode
from alignedserve.cluster.deployments.admin_door import AdminDoor
from alignedserve.cluster.deployments.deployment import Deployment
from alignedserve.cluster.deployments.driver import DeploymentsDriver, Described
from alignedserve.cluster.deployments.leftovers import remove_files
from alignedserve.cluster.deployments.logic import DeploymentsLogic, Prepared
from alignedserve.cluster.deployments.orders import (
    AddModel,
    Answer,
    Models,
    ReplaceModel,
    RestartWorkers,
    ShowModels,
    ShowStatus,
)
from alignedserve.cluster.deployments.preparation import Preparing, in_background
from alignedserve.cluster.deployments.status_report import StatusQuestion
from alignedserve.cluster.deployments.transitions import Ending, Starting
from alignedserve.cluster.draining.drain_watch import DrainWatch
from alignedserve.cluster.draining.drains import Drains
from alignedserve.cluster.draining.worker_restarts import WorkerRestarts
from alignedserve.cluster.failed_processes import FailedProcesses
from alignedserve.cluster.process_health import Health, ProcessState
from alignedserve.cluster.running_cluster import RunningCluster
from alignedserve.cluster.start_observer import StartObserver
from alignedserve.core.errors import PeerLost
from alignedserve.process.loading_progress import read_progress
from alignedserve.runtime.model.served_deployment import DeploymentPhase, ServedDeployment

_LOOK_S = 0.1


class ClusterOfModels(RunningCluster):
    """A RunningCluster of deployments on this host. `check` carries orders out and never waits."""

    def __init__(self, deployments: Sequence[Deployment], preparing: Preparing, observer: StartObserver) -> None:
        """`deployments`: that serve from the start, the first with the gateways."""
        first = deployments[0]
        super().__init__(first.node, first.served, first.factory, observer)
        self._deployments = {one.deployment_id: one for one in deployments}
        self._preparing = preparing
        logic = DeploymentsLogic.of_start({one.deployment_id: one.served.name for one in deployments})
        self._driver = DeploymentsDriver(self, logic, self._answer)
        self._door: AdminDoor | None = None
        drains = Drains()
        self._drain_watch = DrainWatch(drains)
        self._restarts = WorkerRestarts(drains, self.actors, self._answer)
        self._failed = FailedProcesses(self._lasting_healths, self._start_again)
        self._questions: dict[str, StatusQuestion] = {}  # of status, by request

    @property
    def deployments(self) -> tuple[Deployment, ...]:
        """Return the deployments whose models are listed to clients, in that order."""
        return tuple(self._deployments[one] for one in self._driver.listed)

    @override
    def create(self, others: tuple[PreparedNode, ...] = ()) -> None:
        """See RunningCluster."""
        super().create(others)
        if len(self._deployments) > 1:
            self._driver.announce()

    @override
    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """See RunningCluster; of every model."""
        super().wait_ready(timeout_s)
        ends_s = time.monotonic() + timeout_s
        while len(self._deployments) > 1 and not self._driver.are_all_ready():
            self.check_start()
            if time.monotonic() > ends_s:
                raise PeerLost(f"not every model was ready within {timeout_s:.0f} s; see {self.folder / 'logs'}")
            time.sleep(_LOOK_S)

    @override
    def check(self) -> bool:
        """Carry orders about models out, as far as they have come. They are taken from the first call on.

        Raises NodeLost.
        """
        super().check()
        if self._door is None:
            self._door = AdminDoor(self.folder)
        for request_id, request in self._door.take():
            if isinstance(request, ShowModels):
                self._answer(request_id, Models(self.url, tuple(self._driver.reports())))
            elif isinstance(request, ShowStatus):
                actors, (gateway, *_) = self.actors(), self._node.share.gateways
                self._questions[request_id] = StatusQuestion(actors, actors[gateway[0]], time.monotonic())
            elif isinstance(request, RestartWorkers):
                self._restarts.order(request_id, request, self._driver.reports())
            else:
                self._driver.order(request_id, request)
        self._driver.look()
        self._restarts.look(self._drain_watch.look(self.actors()))
        self._failed.look()
        self._answer_questions()
        return True

    def _lasting_healths(self) -> dict[str, Health]:
        """Return the healths of all processes; those that Ray starts again by itself count as starting."""
        return {name: Health() if one.state is ProcessState.ENDED else one for name, one in self.healths().items()}

    def _start_again(self, name: str) -> None:
        """Start a process again whose start has failed, as when shared memory was full."""
        of_it = (one.node for one in self._deployments.values() if name in one.process_names)
        self.start_again(next(of_it, self._node), name)

    def _answer_questions(self) -> None:
        now = time.monotonic()
        for request_id in [one for one, question in self._questions.items() if question.is_over(now)]:
            question = self._questions.pop(request_id)
            self._answer(request_id, question.report(self.url, self.healths(), tuple(self._driver.reports())))

    def _answer(self, order_id: str, answer: Answer) -> None:
        if self._door is not None:
            self._door.answer(order_id, answer)

    # --- as a Site

    def begin_preparing(
        self, deployment_id: str, order: AddModel | ReplaceModel, replaced: str | None
    ) -> "Future[Any]":
        """See Site."""
        holdings = [one.holding for one in self._deployments.values()]
        return in_background(
            lambda: self._preparing.prepare(deployment_id, order, replaced, holdings), f"preparing {deployment_id}"
        )

    def note_prepared(self, deployment_id: str, prepared: Deployment) -> Prepared:
        """See Site."""
        self._deployments[deployment_id] = prepared
        self._observer.sizes_chosen(prepared.choice, has_others=True)
        return Prepared(deployment_id, prepared.served.name, prepared.remarks)

    def start_deployment(self, deployment_id: str) -> Starting:
        """See Site."""
        deployment = self._deployments[deployment_id]
        actors = self.add_part(deployment.node)
        book = deployment.node.book
        return Starting(actors, lambda: [read_progress(book.progress_of(name)) for name in deployment.workers])

    def end_deployment(self, deployment_id: str) -> Ending:
        """See Site; gateways and batch worker, which came with the first, stay."""
        deployment = self._deployments[deployment_id]
        ended = self.take_out(self._node.share.node, deployment.process_names)
        self._preparing.settings.forget(deployment_id)
        names = deployment.process_names
        return Ending(deployment.served.name, ended, lambda: remove_files(deployment.node.folder, names))

    def forget_deployment(self, deployment_id: str) -> None:
        """See Site."""
        self._deployments.pop(deployment_id, None)
        self._preparing.settings.forget(deployment_id)

    def settle_adapters(self, replaced: str, deployment_id: str) -> tuple[str, ...]:
        """See Site."""
        return self._preparing.settings.settle_adapters(replaced, deployment_id)

    def announced(self, deployment_id: str, phase: DeploymentPhase) -> ServedDeployment:
        """See Site."""
        return self._deployments[deployment_id].announced(phase)

    def described(self, deployment_id: str) -> Described | None:
        """See Site."""
        found = self._deployments.get(deployment_id)
        if found is None:
            return None
        topology = found.node.config.chosen_topology.value
        return Described(str(found.served.folder), found.workers, found.process_names, topology)

    def listeners(self) -> Iterator[Any]:
        """See Site."""
        of_node = self.actors_of(self._node.share.node)
        for name in (*(name for name, _ in self._node.share.gateways), BATCHES):
            if name in of_node:
                yield of_node[name]

    # --- the rest

    @override
    def _parts_beside(self, node: PreparedNode) -> Sequence[PreparedNode]:
        return [one.node for one in self._deployments.values() if one.deployment_id != node.share.deployment_id]

    @override
    def _factory_of(self, part: PreparedNode) -> ActorFactory:
        return self._deployments[part.share.deployment_id].factory

    @override
    def _close_own(self) -> None:
        if self._door is not None:
            self._door.close()
        super()._close_own()
