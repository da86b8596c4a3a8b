"""The nodes of a cluster as the place where its deployments run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

from alignedserve.cluster.actor_factory import BATCHES, PreparedNode
from alignedserve.cluster.deployments.driver import Described
from alignedserve.cluster.deployments.logic import Prepared
from alignedserve.cluster.deployments.orders import AddModel, ReplaceModel
from alignedserve.cluster.deployments.preparation import in_background
from alignedserve.cluster.deployments.transitions import Ending, Starting
from alignedserve.cluster.hosts.admission import Keeper
from alignedserve.cluster.hosts.joining import Joining
from alignedserve.cluster.hosts.members import HostedModel, Member
from alignedserve.cluster.hosts.models.preparing import HostedPlan, HostedPreparing, Surroundings
from alignedserve.cluster.ray_polls import answers_so_far
from alignedserve.cluster.run_folder import remove_files
from alignedserve.cluster.start_observer import StartObserver
from alignedserve.process.addresses import ROUTER, deployed_name
from alignedserve.process.loading_progress import Progress
from alignedserve.runtime.model.served_deployment import DeploymentPhase, ServedDeployment


class PartActors(NamedTuple):
    """The actors of the nodes' parts, as the cluster creates and ends them."""

    create: Callable[[PreparedNode], dict[str, Any]]  # of a part of a node
    remove: Callable[[str, Sequence[str]], dict[str, Any]]  # of a node, by names; they are watched no more
    of_node: Callable[[str], Mapping[str, Any]]
    progress: Callable[[], list[Progress | None]]


class HostedDeployments:
    """A Site over the members of a cluster."""

    def __init__(
        self,
        members: Mapping[str, Member],
        joining: Joining,
        preparing: HostedPreparing,
        actors: PartActors,
        observer: StartObserver,
    ) -> None:
        """`members`: by Ray's id, as they come and go, the head first."""
        self._members = members
        self._joining = joining
        self._preparing = preparing
        self._actors = actors
        self._observer = observer
        self._planned: dict[str, HostedPlan] = {}  # that have no processes yet

    def begin_preparing(
        self, deployment_id: str, order: AddModel | ReplaceModel, replaced: str | None
    ) -> "Future[Any]":
        """See Site."""
        members = [one for one in self._members.values() if one.name not in self._joining.drains]
        able = tuple(replace(one, others=dict(one.others)) for one in members)  # for a thread, as they are now
        around = Surroundings(able, dict(self._joining.models), dict(self._joining.wholes))
        return in_background(
            lambda: self._preparing.prepare(deployment_id, order, replaced, around), f"preparing {deployment_id}"
        )

    def note_prepared(self, deployment_id: str, prepared: HostedPlan) -> Prepared:
        """See Site."""
        self._planned[deployment_id] = prepared
        self._observer.sizes_chosen(next(iter(prepared.model.plan.choices.values())), has_others=True)
        nodes = ", ".join(name for name, part in prepared.parts.items() if part.share.num_workers)
        where = (f"workers on {nodes}",) if len(self._members) > 1 else ()
        return Prepared(deployment_id, prepared.model.served.name, (*where, *prepared.remarks))

    def start_deployment(self, deployment_id: str) -> Starting:
        """See Site. Nodes that have gone meanwhile are left out."""
        planned = self._planned.pop(deployment_id)
        self._joining.models[deployment_id] = planned.model
        made: dict[str, Any] = {}
        for member in self._members.values():
            part = planned.parts.get(member.name)
            if part is not None and part.folder == member.prepared.folder:  # not one that has come back since
                member.set_part(part)
                made |= self._actors.create(part)
        return Starting(made, self._actors.progress)

    def end_deployment(self, deployment_id: str) -> Ending:
        """See Site."""
        model = self._joining.models[deployment_id]
        ended: dict[str, Any] = {}
        left: dict[str, tuple[Keeper, tuple[str, ...]]] = {}
        for member in self._members.values():
            part = member.models.get(deployment_id)
            if part is None:
                continue
            share = part.share
            names = (share.router, share.pool_name, *share.workers)
            ended |= self._actors.remove(member.name, names)
            left[member.name] = member.keeper, names
        self._preparing.settings.forget(deployment_id)
        return Ending(model.served.name, ended, _Cleaning(left).is_over)

    def forget_deployment(self, deployment_id: str) -> None:
        """See Site. Until then its memory counts, and a next driver finds its processes."""
        self._planned.pop(deployment_id, None)
        self._joining.models.pop(deployment_id, None)
        for member in self._members.values():
            member.remove_model(deployment_id)
        self._preparing.settings.forget(deployment_id)

    def settle_adapters(self, replaced: str, deployment_id: str) -> tuple[str, ...]:
        """See Site."""
        return self._preparing.settings.settle_adapters(replaced, deployment_id)

    def announced(self, deployment_id: str, phase: DeploymentPhase) -> ServedDeployment:
        """See Site. All that it says is the same on every node."""
        plan = self._joining.models[deployment_id].plan
        config = next(iter(plan.choices.values())).config
        return ServedDeployment(
            served=plan.served,
            block_size=config.engine.block_size,
            prefix_cache=config.prefix_cache,
            deployment_id=deployment_id,
            router=deployed_name(ROUTER, deployment_id),
            phase=phase,
        )

    def described(self, deployment_id: str) -> Described | None:
        """See Site."""
        planned, model = self._planned.get(deployment_id), self._joining.models.get(deployment_id)
        if planned is not None:
            return _described(planned.model, planned.parts.values())
        if model is None:
            return None
        parts = (member.models.get(deployment_id) for member in self._members.values())
        return _described(model, [part for part in parts if part is not None])

    def listeners(self) -> Iterator[Any]:
        """See Site."""
        for member in self._members.values():
            actors = self._actors.of_node(member.name)
            for name in (*(name for name, _ in member.prepared.share.gateways), BATCHES):
                if name in actors:
                    yield actors[name]


def _described(model: HostedModel, parts: Iterable[PreparedNode]) -> Described:
    found = list(parts)
    workers = tuple(name for part in found for name in part.share.workers)
    routers = (part.share.router for part in found if part.share.is_head)
    pools = (part.share.pool_name for part in found if part.share.num_workers and part.config.node_pool is not None)
    topology = model.plan.config.chosen_topology.value
    return Described(str(model.folder), workers, (*routers, *pools, *workers), topology)


class _Cleaning:
    """Removes what ended processes leave, once these have been killed: on this host, or through the nodes' keepers."""

    def __init__(self, left: Mapping[str, tuple[Keeper, Sequence[str]]]) -> None:
        """`left`: the names of processes, by node."""
        self._left = dict(left)
        self._asked: dict[Any, str] = {}  # nodes by the calls of their keepers

    def is_over(self) -> bool:
        """Return whether nobody knows of memory that is held any more; keepers that are gone know of none."""
        for call, is_gone in answers_so_far(list(self._asked)).items():
            node = self._asked.pop(call)
            if is_gone is not False:
                del self._left[node]
        asked = set(self._asked.values())
        for node, (keeper, names) in tuple(self._left.items()):
            if keeper.actor is None:
                if remove_files(keeper.book.folder, names):
                    del self._left[node]
            elif node not in asked:
                self._asked[keeper.actor.remove_files.remote(names)] = node
        return not self._left
