"""The nodes of a cluster as the place where its deployments run."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from ray.exceptions import RayError

from alignedserve.cluster.actor_factory import BATCHES, PreparedNode
from alignedserve.cluster.deployments.logic import Prepared
from alignedserve.cluster.deployments.on_demand import ModelOnDemand
from alignedserve.cluster.deployments.orders import AddModel, ReplaceModel
from alignedserve.cluster.deployments.preparing import Asleep, HostedPlan, HostedPreparing, Surroundings, in_background
from alignedserve.cluster.desired import Health, ProcessState
from alignedserve.cluster.nodes.admission import Agent
from alignedserve.cluster.nodes.joining import Joining
from alignedserve.cluster.nodes.members import HostedModel, Member
from alignedserve.cluster.ray_node import answers_so_far, have_all_ended, kill_actors
from alignedserve.cluster.run_folder import remove_files
from alignedserve.cluster.starting import START_TIMEOUT_S, LoggingObserver, Patience, Starting, StartObserver
from alignedserve.core.request import LoraAdapter
from alignedserve.process.addresses import ROUTER, deployed_name
from alignedserve.process.loading_progress import LoadedShare
from alignedserve.runtime.model.served_model import DeploymentPhase, ServedDeployment

logger = logging.getLogger(__name__)

_STOP_S = 5.0  # for processes to free their memory
_GONE_S = 10.0  # for killed processes


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


_SERVE_NOTHING = (ProcessState.FAILED, ProcessState.DEAD)


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
        return in_background(
            lambda: self._preparing.prepare(deployment_id, order, replaced, around), f"preparing {deployment_id}"
        )

    def note_prepared(self, deployment_id: str, prepared: HostedPlan) -> Prepared:
        self._planned[deployment_id] = prepared
        self._observer.sizes_chosen(next(iter(prepared.model.plan.choices.values())), has_others=True)
        nodes = ", ".join(name for name, part in prepared.parts.items() if part.share.num_workers)
        where = (f"workers on {nodes}",) if len(self._members) > 1 else ()
        return Prepared(deployment_id, prepared.model.served.name, (*where, *prepared.remarks))

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
        self._preparing.settings.forget(deployment_id)
        return EndingDeployment(model.served.name, ended, _Cleaning(left).is_over)

    def forget_deployment(self, deployment_id: str) -> None:
        """Forget a deployment that has ended, or was not started after all. Until then its memory counts, and a next
        driver finds its processes."""
        self._planned.pop(deployment_id, None)
        self._joining.models.pop(deployment_id, None)
        for member in self._members.values():
            member.remove_model(deployment_id)
        self._preparing.settings.forget(deployment_id)

    def settle_adapters(self, replaced: str, deployment_id: str) -> tuple[str, ...]:
        """Unload from a replacement what was unloaded since it was planned; return the adapters that it lacks."""
        return self._preparing.settings.settle_adapters(replaced, deployment_id)

    def loaded_adapters(self, deployment_id: str) -> tuple[LoraAdapter, ...]:
        return self._preparing.settings.loaded_adapters(deployment_id)

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
        self._left = dict(left)
        self._asked: dict[Any, str] = {}  # nodes by the calls of their agents

    def is_over(self) -> bool:
        for call, is_gone in answers_so_far(list(self._asked)).items():
            node = self._asked.pop(call)
            if is_gone is not False:
                del self._left[node]
        asked_nodes = set(self._asked.values())
        for node, (agent, names) in tuple(self._left.items()):
            if agent.actor is None:
                if remove_files(agent.book.folder, names):
                    del self._left[node]
            elif node not in asked_nodes:
                self._asked[agent.actor.remove_files.remote(names)] = node
        return not self._left
