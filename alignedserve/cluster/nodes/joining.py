"""Prepares nodes that join a running cluster, beside the loop of its driver: nothing here waits."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError

from alignedserve.cluster.deployments.logic import DeploymentsLogic, DeploymentStage
from alignedserve.cluster.deployments.planning import PlannedModel, devices_of, divided, models_for_node, planned_again
from alignedserve.cluster.desired import Host, WantedCluster
from alignedserve.cluster.hosts.record import own_versions
from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.nodes.admission import (
    NODE_ANSWER_S,
    Agent,
    JoiningDevice,
    NodeAdmission,
    NodeReport,
    agent_of,
    create_agent,
    differences,
    missing_copies,
    require,
    warn_of_clocks,
)
from alignedserve.cluster.nodes.members import HostedModel, Member, group_for, member_of, resources_of
from alignedserve.cluster.nodes.plan import ClusterPlan, NodePart, NodeResources, node_config, plan_joining
from alignedserve.cluster.nodes.ray_nodes import NodeGroup, RayNode, release
from alignedserve.cluster.placement import NodeShare
from alignedserve.cluster.ray_node import have_all_ended, kill_actors
from alignedserve.core.errors import PeerLost, ResourceError

logger = logging.getLogger(__name__)

Steps = Generator[Sequence[Any], Sequence[Any], Member]  # from Ray's references to what they refer to


Shares = tuple[NodeShare, ...]  # of one node: first the share with gateways, then further deployments


class Joining:
    """Gives nodes their shares: those of a former node of the same host, or of their own. Outlives a driver."""

    def __init__(self, plan: ClusterPlan, models: Mapping[str, HostedModel], cluster_id: str, num_nodes: int) -> None:
        """`plan`: of the first deployment, by which gateways are placed, also when its model is gone. `num_nodes`: that
        the cluster was started with."""
        self.plan = plan
        self.models = dict(models)
        self.device = JoiningDevice(self.plan.config.engine.device)
        self.logic = DeploymentsLogic.of_start({key: model.served.name for key, model in models.items()})
        self.wholes: dict[str, Machine] = {}  # what each node had before the first model, by its name
        self.cluster_id = cluster_id
        self.vacant: dict[Host, list[Shares]] = {}  # of hosts that are gone, for when they come back
        self.num_nodes = self.num_folders = num_nodes
        self.wanted = WantedCluster()

    def vacate(self, member: Member) -> None:
        self.keep_share(member)
        kill_actors([member.agent.actor])

    def keep_share(self, member: Member) -> None:
        """Keep the share of a node that is gone with its agent for the next one of its host, and no more in Ray."""
        release(member.prepared.folder.name)
        self.vacant.setdefault(member.ray_node.host, []).append(tuple(part.share for part in member.parts))

    def begin(self, node: RayNode, members: Iterable[Member] = ()) -> "Preparation":
        """Begin to examine a node and to make it ready for its actors. `members`: that there are."""
        return Preparation(node, self._steps(node, tuple(members)))

    def _steps(self, node: RayNode, members: Sequence[Member]) -> Steps:
        models = self.lasting_models()  # a model added meanwhile does without this node
        with NodeAdmission([node]) as admission:
            asked_s = time.time()
            folders = [model.folder for model in models.values()]
            (report,) = yield [admission.ask_report(node, self.device.asked, folders)]
            warn_of_clocks({node: report}, asked_s, time.time())
            head = NodeReport(own_versions(), digests=tuple(model.digest for model in models.values()))
            problems = differences({node: report}, head)
            refusal = problems.get(node) or self.device.refusal(report)
            if refusal is not None:
                raise ResourceError(refusal)
            missing = {list(models)[missing_copy] for missing_copy in missing_copies(report, head.digests)}
            resources = resources_of(f"node-{self.num_nodes}", node, report)
            able = {key: model for key, model in models.items() if key not in missing}
            planned, shares = self._take_shares(node, resources, needed_first(able, members))
            self.num_folders += 1
            folder_name = f"{self.cluster_id}-{self.num_folders}"
            try:
                agent = create_agent(node, folder_name)
            except (RayError, ValueError) as error:
                self.vacant.setdefault(node.host, []).append(shares)
                # A driver that died before it had told anyone has used the name; the next attempt has another.
                raise PeerLost(f"its agent cannot be started: {error}") from error
            try:
                failure, folder = yield [agent.failure.remote(), agent.folder.remote()]
                require(node, failure)
                prepared_agent = agent_of(node, agent, folder, self.cluster_id, self.plan.config.links)
                member = self._member(node, prepared_agent, planned, shares, resources)
                for part in member.models.values():
                    if part.share.num_workers:
                        served = models[part.share.deployment_id].served
                        (failure,) = yield [admission.ask_check(node, part, served)]
                        require(node, failure)
                group = group_for(member)
                yield from _placed(node, group)
                member.use(group)
            except BaseException:
                self.vacant.setdefault(node.host, []).append(shares)
                release(folder_name)
                kill_actors([agent])
                raise
        self.wholes[member.name] = resources.machine
        return member

    def lasting_models(self) -> dict[str, HostedModel]:
        """Return the models that a node may begin to work for: models that neither drain nor end."""
        ends = (DeploymentStage.DRAINING, DeploymentStage.ENDING)
        leaving = {row.deployment_id for row in self.logic.rows if row.phase in ends}
        return {key: model for key, model in self.models.items() if key not in leaving}

    def _take_shares(
        self, node: RayNode, resources: NodeResources, able: Mapping[str, HostedModel]
    ) -> tuple[list[PlannedModel], Shares]:
        """Return the models of a node with its shares. `able`: models that it has a copy of, the neediest first. A
        returning node keeps its former models and gets further models up to its room."""
        vacant = self.vacant.get(node.host)
        if vacant:
            shares = {share.deployment_id: share for share in vacant.pop()}
        else:
            self.num_nodes += 1
            shares = {}
        first = self.plan.placement.deployment_id
        wanted = {key: planned_again(key, model.plan, {resources.capacity.name}) for key, model in able.items()}
        former = [wanted[key] for key, share in shares.items() if key in wanted and share.has_model]
        others = [model for key, model in wanted.items() if model not in former]
        if len(wanted) == 1 and not former:  # refused by name where it does not fit
            chosen = others
        else:
            chosen = [*former, *models_for_node(others, resources, beside=former)]
        devices = devices_of(chosen, resources)
        for model in chosen:
            deployment_id = model.deployment_id
            if deployment_id not in shares or not shares[deployment_id].has_model:
                capacity = replace(resources.capacity, gpus=devices[deployment_id])
                joined = able[deployment_id].plan.placement.join(capacity)
                gateways = shares[deployment_id].gateways if deployment_id in shares else joined.gateways
                shares[deployment_id] = replace(joined, gateways=gateways)
        if first not in shares:
            shares[first] = self.plan.placement.join(resources.capacity)
        if first not in {model.deployment_id for model in chosen}:
            shares[first] = shares[first].without_model()
        kept_ids = {model.deployment_id for model in chosen} | {first}
        return chosen, (shares[first], *(share for key, share in shares.items() if key in kept_ids - {first}))

    def _member(
        self, node: RayNode, agent: Agent, planned: Sequence[PlannedModel], shares: Shares, resources: NodeResources
    ) -> Member:
        by_id = {share.deployment_id: share for share in shares}
        machines = divided(planned, [by_id[model.deployment_id] for model in planned], resources)
        devices = devices_of(planned, resources)
        parts = []
        for key, share in by_id.items():
            plan = self.models[key].plan if key in self.models else self.plan
            sized = plan_joining(plan, share, machines.get(key, resources.machine))
            capacity = replace(resources.capacity, name=share.node, gpus=devices.get(key, ()))
            parts.append(NodePart(share, capacity, node_config(sized, share, node.address)))
        return member_of(node, parts, agent)


def needed_first(models: Mapping[str, HostedModel], members: Sequence[Member]) -> dict[str, HostedModel]:
    counts = Counter(key for member in members for key, part in member.models.items() if part.share.num_workers)
    return dict(sorted(models.items(), key=lambda pair: counts[pair[0]]))


class Preparation:
    """A node that is being prepared: steps between its answers. `close` once, unless it has ended."""

    def __init__(
        self,
        node: RayNode,
        steps: Steps,
        answers: "Callable[[Sequence[Any]], Sequence[Any] | None] | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`answers`: returns the references' results; None while one is missing. Unset: from Ray."""
        self.node = node
        self._steps = steps
        self._answers = answers or _answers
        self._clock = clock
        self._asked = next(steps)
        self._ends_s = clock() + NODE_ANSWER_S

    def advance(self) -> Member | None:
        """Go on as far as the answers have come; return the member when it is ready. Raises an error of the tree when
        the node cannot be used: PeerLost when it has not answered."""
        try:
            array = self._answers(self._asked)
        except RayError as error:
            self._fail(str(error).splitlines()[0])
        if array is None:
            if self._clock() < self._ends_s:
                return None
            self._fail("no answer")
        try:
            self._asked = self._steps.send(array)
        except StopIteration as ended:
            member: Member = ended.value
            return member
        self._ends_s = self._clock() + NODE_ANSWER_S
        return None

    def close(self) -> None:
        self._steps.close()

    def _fail(self, reason: str) -> NoReturn:
        self.close()
        raise PeerLost(f"{self.node} does not answer: {reason}")


def _placed(node: RayNode, group: NodeGroup) -> Generator[Sequence[Any], Sequence[Any], None]:
    try:
        yield [group.group.ready()]
    except GeneratorExit:
        logger.warning("%s: Ray has not had %s free there (`ray status`)", node, group)
        raise


def _answers(calls: Sequence[Any]) -> Sequence[Any] | None:
    return ray.get(list(calls)) if have_all_ended(calls) else None
