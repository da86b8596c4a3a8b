"""More and fewer workers of a cluster that serves, on one host or on several."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from alignedserve.cluster.actor_factory import PreparedNode
from alignedserve.cluster.deployments.division import worker_bytes
from alignedserve.cluster.deployments.logic import DeploymentStage
from alignedserve.cluster.deployments.orders import ScaleWorkers
from alignedserve.cluster.draining.drains import ProcessDrain
from alignedserve.cluster.hosts.resizing import Resize, RunningNode, plan_resize
from alignedserve.cluster.machine import this_machine
from alignedserve.cluster.nodes.joining import Joining
from alignedserve.cluster.nodes.members import Member
from alignedserve.cluster.nodes.plan import ClusterPlan
from alignedserve.cluster.placement import NodeShare, engines_of
from alignedserve.cluster.ray_node import answer_of
from alignedserve.config.sections import MIB
from alignedserve.core.errors import ConfigError, NotEnoughMemory, ResourceError
from alignedserve.process.addresses import ROUTER, deployed_name
from alignedserve.runtime.device.devices import CPU

logger = logging.getLogger(__name__)

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
        self._require_no_standby(deployment_id)
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
            self._begin_drain(name, _LEAVING_S)
        return _said(started, leaving)

    def drain(self, name: str, within_s: float) -> str:
        """Begin to take one worker out; return a sentence about it. Raises an error of the tree."""
        shares = [share.without(self._drains.workers) for member in self._members.values() for share in member.shares]
        share = next((share for share in shares if name in share.workers), None)
        if share is None:
            known = ", ".join(worker for share in shares for worker in share.workers)
            raise ResourceError(f"there is no worker {name}, or it drains already; there are {known}")
        self._require_no_standby(share.deployment_id)
        if (name,) in (share.decode, share.prefill):
            raise ResourceError(f"{name} is the last worker of its kind: nothing of its model would be served")
        self._begin_drain(name, within_s)
        return f"{name} gets nothing new; what it still has in {within_s:.0f} s goes elsewhere."

    def undo(self, name: str) -> str:
        """End the drain of a worker; return a sentence about it. Raises ResourceError."""
        if name not in self._drains:
            raise ResourceError(f"{name} does not drain; `alignedserve scale decode=N` starts more workers")
        self._drains.end(name)
        return f"{name} is used again."

    def _begin_drain(self, name: str, within_s: float) -> None:
        self._drains.begin(name, ProcessDrain((name,), (), time.monotonic() + within_s))
        logger.info("%s drains, to be fewer", name)

    def _require_no_standby(self, deployment_id: str) -> None:
        if self._joining.models[deployment_id].plan.config.decode.standby:
            raise ConfigError("workers that others stand by for (decode.standby) keep their number; serve anew with it")

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
        self._drains.end(name)
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
            available = self._available_bytes(member)
            if num_bytes > available:
                count = sum(name == node for _, name in change.added)
                raise NotEnoughMemory(
                    f"{node} has no room for {count} more workers: {num_bytes // MIB} MiB are needed, "
                    f"{available // MIB} MiB are available, which is enough for {count * available // num_bytes}"
                )

    def _available_bytes(self, member: Member) -> int:
        if member.agent.actor is None:
            return this_machine(CPU).available_bytes
        reference = member.agent.actor.available_bytes.remote()
        return int(answer_of(f"the agent of {member.name}", reference, _ANSWER_S))

    def _choose_leaving(self, change: Resize, shares: Mapping[str, NodeShare], router: Any) -> list[str]:
        if not change.removed:
            return []
        able = {(kind, node): getattr(shares[node], kind) for kind, node in set(change.removed)}
        names = tuple(name for workers in able.values() for name in workers)
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
