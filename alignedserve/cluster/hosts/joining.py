"""Prepares nodes that join a running cluster, beside the loop of its driver: nothing here waits."""

import logging
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError

from alignedserve.cluster.hosts.admission import (
    Admission,
    create_keeper,
    differences,
    end_keepers,
    keeper_of,
    require,
    warn_of_clocks,
)
from alignedserve.cluster.hosts.members import Member, group_for, member_of, resources_of
from alignedserve.cluster.hosts.nodes.placement_group import NodeGroup, release
from alignedserve.cluster.hosts.nodes.ray_nodes import RayNode
from alignedserve.cluster.hosts.nodes.report import NodeReport
from alignedserve.cluster.hosts.operations.drains import Drains
from alignedserve.cluster.hosts.plan import ClusterPlan, NodeResources, node_config, plan_joining
from alignedserve.cluster.placement import NodeShare
from alignedserve.core.errors import PeerLost, ResourceError
from alignedserve.runtime.engine.model_executor import bytes_beside_blocks

logger = logging.getLogger(__name__)

_ANSWER_S = 180.0  # of a node that loads PyTorch from a cold disk

Steps = Generator[Sequence[Any], Sequence[Any], Member]  # from Ray's references to what they refer to


class Joining:
    """Gives nodes their shares: that of a former node of the same host, or one of their own. Outlives a driver."""

    def __init__(self, plan: ClusterPlan, head: NodeReport, cluster_id: str, num_nodes: int) -> None:
        """`head`: what the head reported of itself. `num_nodes`: that the cluster was started with."""
        self.plan = plan
        self.cluster_id = cluster_id
        self._head = head
        self._vacant: dict[tuple[str, str], list[NodeShare]] = {}  # of hosts that are gone, for when they come back
        self._num_nodes = self._num_folders = num_nodes
        self.drains = Drains()
        self.drained: dict[str, Member] = {}  # nodes that stay out, by the ids under which they were members

    def vacate(self, member: Member) -> None:
        """Keep the share of a node that has not, or no more, its actors for the next one of its host."""
        self.keep_share(member)
        end_keepers([member.keeper.actor])

    def keep_share(self, member: Member) -> None:
        """Keep the share of a node that is gone with its keeper for the next one of its host, and no more in Ray."""
        release(member.prepared.folder.name)
        self._vacant.setdefault(member.ray_node.host, []).append(member.prepared.share)

    def begin(self, node: RayNode) -> "Preparation":
        """Begin to examine a node and to make it ready for its actors."""
        return Preparation(node, self._steps(node))

    def _steps(self, node: RayNode) -> Steps:
        """Examine the node. Raises an error of the tree when it cannot be used."""
        engine, served = self.plan.config.engine, self.plan.served
        with Admission([node]) as admission:
            asked_s = time.time()
            (report,) = yield [admission.ask_report(node, engine.device, served.folder)]
            warn_of_clocks({node: report}, asked_s, time.time())
            found = differences({node: report}, self._head)
            if found:
                raise ResourceError(found[node])
            resources = resources_of(f"node-{self._num_nodes}", node, report)
            share = self._take_share(node, resources)
            self._num_folders += 1
            folder_name = f"{self.cluster_id}-{self._num_folders}"
            try:
                keeper = create_keeper(node, folder_name)
            except (RayError, ValueError) as error:
                self._vacant.setdefault(node.host, []).append(share)
                # A driver that died before it had told anyone has used the name; the next attempt has another.
                raise PeerLost(f"its keeper cannot be started: {error}") from error
            try:
                failure, folder = yield [keeper.failure.remote(), keeper.folder.remote()]
                require(node, failure)
                kept = keeper_of(node, keeper, folder, self.cluster_id, self.plan.config.links)
                beside = bytes_beside_blocks(served, self.plan.config.scheduling, engine.block_size)
                sized = plan_joining(self.plan, share, resources.machine, beside)
                config = node_config(sized, share, node.address)
                member = member_of(node, share, resources.capacity, config, kept)
                if share.num_workers:
                    (failure,) = yield [admission.ask_check(node, member.prepared, served)]
                    require(node, failure)
                group = group_for(member)
                yield from _placed(node, group)
                member.use(group)
            except BaseException:
                self._vacant.setdefault(node.host, []).append(share)
                release(folder_name)
                end_keepers([keeper])
                raise
        return member

    def _take_share(self, node: RayNode, resources: NodeResources) -> NodeShare:
        vacant = self._vacant.get(node.host)
        if vacant:
            return vacant.pop()
        self._num_nodes += 1
        return self.plan.placement.join(resources.capacity)


class Preparation:
    """A node that is being prepared: steps between its answers. `close` once, unless it has ended."""

    def __init__(
        self,
        node: RayNode,
        steps: Steps,
        answers: "Callable[[Sequence[Any]], Sequence[Any] | None] | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`answers`: returns what the references refer to; None while one is missing. Unset: Ray is asked."""
        self.node = node
        self._steps = steps
        self._answers = answers or _answers
        self._clock = clock
        self._asked = next(steps)
        self._ends_s = clock() + _ANSWER_S

    def advance(self) -> Member | None:
        """Go on as far as the answers have come; return the member when it is ready.

        Raises an error of the tree when the node cannot be used: PeerLost when it has not answered.
        """
        try:
            found = self._answers(self._asked)
        except RayError as error:
            self._fail(str(error).splitlines()[0])
        if found is None:
            if self._clock() < self._ends_s:
                return None
            self._fail("no answer")
        try:
            self._asked = self._steps.send(found)
        except StopIteration as ended:
            member: Member = ended.value
            return member
        self._ends_s = self._clock() + _ANSWER_S
        return None

    def close(self) -> None:
        """Give up; what was made on the node ends."""
        self._steps.close()

    def _fail(self, reason: str) -> NoReturn:
        self.close()
        raise PeerLost(f"{self.node} does not answer: {reason}")


def _placed(node: RayNode, group: NodeGroup) -> Generator[Sequence[Any], Sequence[Any], None]:
    """Wait until Ray has reserved what the node's workers take."""
    try:
        yield [group.group.ready()]
    except GeneratorExit:
        logger.warning("%s: Ray has not had %s free there (`ray status`)", node, group)
        raise


def _answers(asked: Sequence[Any]) -> Sequence[Any] | None:
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
    return ray.get(list(asked)) if len(answered) == len(asked) else None
