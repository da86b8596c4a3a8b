"""Changes the numbers of workers of a running cluster, as resizing.py plans it."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from alignedserve.cluster.actor_factory import PreparedNode
from alignedserve.cluster.hosts.members import Member
from alignedserve.cluster.hosts.operations.drains import Draining, Drains
from alignedserve.cluster.hosts.operations.orders import ScaleWorkers
from alignedserve.cluster.hosts.operations.resizing import Resize, RunningNode, plan_resize
from alignedserve.cluster.hosts.plan import ClusterPlan
from alignedserve.cluster.hosts.ray_calls import answer_of
from alignedserve.cluster.placement import NodeShare, engines_of
from alignedserve.config.sections import MIB
from alignedserve.core.errors import NotEnoughMemory

logger = logging.getLogger(__name__)

_ANSWER_S = 3.0
_WITHIN_S = 60.0  # in which requests of a worker that is to go may finish there


class WorkerActors(NamedTuple):
    """The actors of the workers, as the cluster creates and ends them."""

    create: Callable[[PreparedNode, str], None]
    end: Callable[[str, str], None]  # by the names of node and worker


class WorkerScaling:
    """The workers of one cluster, more and fewer."""

    def __init__(self, members: Mapping[str, Member], plan: ClusterPlan, drains: Drains, workers: WorkerActors) -> None:
        """`members`: by Ray's id, as they come and go."""
        self._members = members
        self._plan = plan
        self._drains = drains
        self._workers = workers

    def scale(self, order: ScaleWorkers, router: Any) -> str:
        """Begin the changes; return what is said of them. Raises an error of the tree, with nothing changed."""
        able = [member for member in self._members.values() if member.name not in self._drains]
        nodes = [RunningNode(self._without_leaving(member), member.prepared.capacity) for member in able]
        is_separate = self._plan.config.chosen_topology.is_separate
        change = plan_resize(nodes, order.counts, is_separate=is_separate)
        by_name = {member.name: member for member in able}
        self._require_room(change, by_name)
        leaving = self._choose_leaving(change, by_name, router)
        started = [self._add(kind, by_name[node]) for kind, node in change.added]
        for name in leaving:
            self._drains.begin(name, Draining((name,), (), time.monotonic() + _WITHIN_S))
            logger.info("%s drains, to be fewer", name)
        return _said(started, leaving)

    def end(self, name: str) -> None:
        """End a worker of which nothing is left."""
        for member in self._members.values():
            share = member.prepared.share
            if name not in (*share.prefill, *share.decode):
                continue
            member.prepared = replace(member.prepared, share=share.without([name]))
            self._workers.end(share.node, name)
            logger.info("%s has drained and ended", name)

    def _without_leaving(self, member: Member) -> NodeShare:
        share = member.prepared.share
        return share.without([name for name in (*share.prefill, *share.decode) if name in self._drains])

    def _require_room(self, change: Resize, members: Mapping[str, Member]) -> None:
        """Raise NotEnoughMemory when a node has not the memory for what is added there, or PeerLost."""
        needed: Counter[str] = Counter()
        for kind, node in change.added:
            section = getattr(members[node].prepared.config, kind)
            needed[node] += self._plan.served.weight_bytes + section.kv_cache_bytes
        for node, num_bytes in needed.items():
            member = members[node]
            if member.prepared.capacity.gpus:
                continue  # a worker checks the memory of its GPU itself
            available = answer_of(f"the keeper of {node}", member.keeper.actor.available_bytes.remote(), _ANSWER_S)
            if num_bytes > available:
                count = sum(name == node for _, name in change.added)
                raise NotEnoughMemory(
                    f"{node} has no room for {count} workers more: {num_bytes // MIB} MiB are needed, "
                    f"{available // MIB} MiB are available, which is enough for {count * available // num_bytes}; "
                    "a node that joins brings workers of its own"
                )

    def _choose_leaving(self, change: Resize, members: Mapping[str, Member], router: Any) -> list[str]:
        """Return the workers with the least work where some are to go; of equals the last."""
        if not change.removed:
            return []
        able = {(kind, node): getattr(self._without_leaving(members[node]), kind) for kind, node in set(change.removed)}
        names = tuple(name for found in able.values() for name in found)
        left: Mapping[str, int] = answer_of("the router", router.num_left.remote(names), _ANSWER_S)
        leaving: list[str] = []
        for kind, node in change.removed:
            idle = [name for name in reversed(able[kind, node]) if name not in leaving]
            leaving.append(min(idle, key=lambda name: left.get(name, 0)))
        return leaving

    def _add(self, kind: str, member: Member) -> str:
        prepared, share = member.prepared, member.prepared.share
        threads = next(iter(engines_of(share, prepared.config.engine, prepared.capacity).values())).threads_per_worker
        # As many as those beside it have, whose threads stay as they are.
        engine = msgspec.structs.replace(prepared.config.engine, threads_per_worker=threads)
        (name,) = self._plan.placement.names(kind, 1)
        config = msgspec.structs.replace(prepared.config, engine=engine)
        changed = replace(prepared, share=share.with_worker(kind, name), config=config)
        self._workers.create(changed, name)
        member.prepared = changed
        logger.info("%s starts on %s", name, member.ray_node)
        return f"{name} starts on {share.node}"


def _said(started: list[str], leaving: list[str]) -> str:
    if not started and not leaving:
        return "There are as many already."
    ends = [f"{name} gets nothing new and ends when its requests have" for name in leaving]
    return "; ".join((*started, *ends)) + "."
