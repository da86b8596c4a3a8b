"""Drains whole nodes of a running cluster: by order, or because the load does not need them."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from alignedserve.cluster.actor_factory import PreparedNode
from alignedserve.cluster.deployments.division import worker_bytes
from alignedserve.cluster.deployments.logic import DeploymentStage
from alignedserve.cluster.deployments.orders import DrainNode, ScaleWorkers
from alignedserve.cluster.draining.drain_watch import DrainWatch
from alignedserve.cluster.draining.drains import ProcessDrain
from alignedserve.cluster.hosts.membership import DrainAsked, DrainUndone, Membership, MembershipEvent, NodeDrained
from alignedserve.cluster.hosts.record import DRAINED, NodeRecord
from alignedserve.cluster.hosts.resizing import Resize, RunningNode, node_called, plan_resize, require_drainable
from alignedserve.cluster.nodes.joining import Joining
from alignedserve.cluster.nodes.members import DrainedNode, Member
from alignedserve.cluster.nodes.plan import ClusterPlan
from alignedserve.cluster.placement import NodeShare, engines_of
from alignedserve.cluster.ray_node import answer_of
from alignedserve.config.sections import MIB
from alignedserve.core.errors import ConfigError, NotEnoughMemory, ResourceError
from alignedserve.process.addresses import ROUTER, deployed_name

logger = logging.getLogger(__name__)

_GIVEN_BACK_WITHIN_S = 60.0  # in which requests of a node that the load does not need may finish there


class NodeDrains:
    """The drains of one cluster's nodes. What goes on, or has ended, outlives its driver (see Joining)."""

    def __init__(
        self,
        members: Mapping[str, Member],
        membership: Membership,
        joining: Joining,
        decide: Callable[[MembershipEvent], None],
    ) -> None:
        """`members`: by Ray's id, as they come and go; `decide`: passes an event to the membership."""
        self._members = members
        self._membership = membership
        self._joining = joining
        self._drains = joining.drains
        self._decide = decide
        self._drains.resume(time.monotonic())
        self._watch = DrainWatch(self._drains)
        for node_id, drained in joining.drained.items():
            membership.keep_out(node_id, drained.ray_node.host)
        for node_id, member in members.items():
            if member.name in self._drains:
                drain_asked = DrainAsked(node_id, self._drains.is_given_back(member.name))
                membership.on_event(drain_asked, time.monotonic())

    def drain(self, order: DrainNode, nodes: Sequence[NodeRecord]) -> str:
        """Begin a drain, or give it another time; return what is said of it. Raises ResourceError."""
        node = node_called(nodes, order.node)
        member = self._members.get(node.node_id)
        left = {*self._membership.draining, node.node_id}
        others = [one.shares for node_id, one in self._members.items() if node_id not in left]
        require_drainable(node, member.shares if member is not None else None, others, is_forced=order.is_forced)
        assert member is not None, "a node that cannot be drained"
        self._begin(member, order.within_s)
        self._decide(DrainAsked(node.node_id))
        return f"{member.name} gets nothing new; what it still has in {order.within_s:.0f} s goes elsewhere."

    def undo(self, name: str, nodes: Sequence[NodeRecord]) -> str:
        """Use a node again; return what is said of it. Raises ResourceError."""
        node = node_called(nodes, name)
        if not node.drain:
            raise ResourceError(f"{node.name or node.hostname} neither drains nor has drained")
        self._joining.drained.pop(node.node_id, None)
        self.take_again(node.node_id, node.name)
        return f"{node.name} is used again" + ("; its processes start now." if node.drain == DRAINED else ".")

    def give_back(self, node_id: str) -> None:
        """Drain a node that the load does not need; it is left to Ray then."""
        self._begin(self._members[node_id], _GIVEN_BACK_WITHIN_S, is_given_back=True)
        self._decide(DrainAsked(node_id, is_given_back=True))

    def take_again(self, node_id: str, name: str | None = None) -> None:
        """Use a node again that drains or has drained. `name`: in the cluster; None: that of the member, if it is."""
        known = self._members.get(node_id)
        name = known.name if known is not None else name
        if name is not None:
            self._drains.end(name)
        logger.info("%s is used again", name or node_id)
        self._decide(DrainUndone(node_id))

    def look(self, actors: Mapping[str, Any]) -> list[str]:
        """Go on with the drains: inform routers and gateways, and end nodes whose work is gone. Returns the names of
        single workers whose work is gone."""
        workers = []
        for name in self._watch.look(actors):
            self._drains.end(name)
            node_id = next((node_id for node_id, member in self._members.items() if member.name == name), None)
            if node_id is None:
                workers.append(name)
                continue
            logger.info("%s has drained", name)
            self._decide(NodeDrained(node_id))
        return workers

    def gone(self, member: Member) -> None:
        for name in (member.name, *member.workers):
            self._drains.end(name)
        if member.ray_node.node_id in self._membership.drained:
            self._joining.drained[member.ray_node.node_id] = DrainedNode(member.name, member.ray_node)

    def _begin(self, member: Member, within_s: float, *, is_given_back: bool = False) -> None:
        # Workers that do both phases have no pool.
        pools = (share.pool_name for share in member.shares if share.prefill)
        gateways = tuple(name for name, _ in member.prepared.share.gateways)
        moves_s = time.monotonic() + within_s
        workers = (*member.workers, *pools)
        self._drains.begin(member.name, ProcessDrain(workers, gateways, moves_s, is_given_back))
        logger.info("%s drains; what is left after %.0f s goes elsewhere", member.name, within_s)


_ANSWER_S = 3.0
_LEAVING_S = 60.0  # in which requests of a worker that is to go may finish there


class WorkerActors(NamedTuple):
    """The actors of the workers, as the cluster creates and ends them."""

    create: Callable[[PreparedNode, str], None]
    end: Callable[[str, str], None]  # by the names of node and worker


class WorkerScaling:
    """The workers of one cluster, more and fewer."""

    def __init__(self, members: Mapping[str, Member], joining: Joining, workers: WorkerActors) -> None:
        self._members = members
        self._joining = joining
        self._drains = joining.drains
        self._workers = workers

    def scale(self, order: ScaleWorkers, actors: Mapping[str, Any]) -> str:
        """Begin the changes; return what is said of them. Raises an error of the tree, with nothing changed. `actors`:
        all of the cluster, by name."""
        deployment_id = self._deployment_of(order.model)
        if self._joining.models[deployment_id].plan.config.decode.standby:
            raise ConfigError("workers that others stand by for (decode.standby) keep their number; serve anew with it")
        able = {
            member.name: member
            for member in self._members.values()
            if member.name not in self._drains and deployment_id in member.models
        }
        shares = {
            name: share.without([worker for worker in share.workers if worker in self._drains])
            for name, share in ((name, member.models[deployment_id].share) for name, member in able.items())
        }
        nodes = [RunningNode(share, able[name].models[deployment_id].capacity) for name, share in shares.items()]
        plan = self._joining.models[deployment_id].plan
        change = plan_resize(nodes, order.counts, is_separate=plan.config.chosen_topology.is_separate)
        self._require_room(change, able, plan)
        leaving = self._choose_leaving(change, shares, actors[deployed_name(ROUTER, deployment_id)])
        started = [self._add(kind, able[node], deployment_id) for kind, node in change.added]
        for name in leaving:
            self._drains.begin(name, ProcessDrain((name,), (), time.monotonic() + _LEAVING_S))
            logger.info("%s drains, to be fewer", name)
        return _said(started, leaving)

    def _deployment_of(self, model: str | None) -> str:
        standings = [
            standing for standing in self._joining.logic.standings if standing.phase is DeploymentStage.SERVING
        ]
        matching = [standing for standing in standings if model in (None, standing.name)]
        if len(matching) == 1:
            return matching[0].deployment_id
        names = ", ".join(standing.name for standing in standings)
        if model is None:
            raise ConfigError(f"several models are served ({names}); say whose workers are meant with --model NAME")
        raise ConfigError(f"no model is served as {model}; there are {names}")

    def end(self, name: str) -> None:
        for member in self._members.values():
            if name not in member.workers:
                continue
            part = member.part_of(name)
            member.set_part(replace(part, share=part.share.without([name])))
            self._workers.end(member.name, name)
            logger.info("%s has drained and ended", name)

    def _require_room(self, change: Resize, members: Mapping[str, Member], plan: ClusterPlan) -> None:
        needed: Counter[str] = Counter()
        for kind, node in change.added:
            config = members[node].models[plan.deployment_id].config
            needed[node] += worker_bytes(config, plan.served) + getattr(config, kind).kv_cache_bytes
        for node, num_bytes in needed.items():
            member = members[node]
            if member.models[plan.deployment_id].capacity.gpus:
                continue  # a worker checks the memory of its GPU itself
            available = answer_of(f"the agent of {node}", member.agent.actor.available_bytes.remote(), _ANSWER_S)
            if num_bytes > available:
                count = sum(name == node for _, name in change.added)
                raise NotEnoughMemory(
                    f"{node} has no room for {count} workers more: {num_bytes // MIB} MiB are needed, "
                    f"{available // MIB} MiB are available, which is enough for {count * available // num_bytes}; "
                    "a node that joins brings workers of its own"
                )

    def _choose_leaving(self, change: Resize, shares: Mapping[str, NodeShare], router: Any) -> list[str]:
        if not change.removed:
            return []
        able = {(kind, node): getattr(shares[node], kind) for kind, node in set(change.removed)}
        names = tuple(name for found in able.values() for name in found)
        left: Mapping[str, int] = answer_of("the router", router.num_left.remote(names), _ANSWER_S)
        leaving: list[str] = []
        for kind, node in change.removed:
            idle = [name for name in reversed(able[kind, node]) if name not in leaving]
            leaving.append(min(idle, key=lambda name: left.get(name, 0)))
        return leaving

    def _add(self, kind: str, member: Member, deployment_id: str) -> str:
        prepared = member.models[deployment_id]
        share = prepared.share
        threads = next(iter(engines_of(share, prepared.config.engine, prepared.capacity).values())).threads_per_worker
        # As many threads as each present worker keeps.
        engine = msgspec.structs.replace(prepared.config.engine, threads_per_worker=threads)
        (name,) = self._joining.models[deployment_id].plan.placement.names(kind, 1)
        config = msgspec.structs.replace(prepared.config, engine=engine)
        changed = replace(prepared, share=share.with_worker(kind, name), config=config)
        self._workers.create(changed, name)
        member.set_part(changed)
        logger.info("%s starts on %s", name, member.ray_node)
        return f"{name} starts on {share.node}"


def _said(started: list[str], leaving: list[str]) -> str:
    if not started and not leaving:
        return "There are as many already."
    ends = [f"{name} gets nothing new and ends when its requests have" for name in leaving]
    return "; ".join((*started, *ends)) + "."
