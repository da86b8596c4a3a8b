"""Orders about nodes and workers become wishes, rows of `WantedCluster`, or are refused in one sentence."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from alignedserve.cluster.actor_factory import PreparedNode
from alignedserve.cluster.deployments.orders import DeploymentReport, DrainNode, RestartWorkers, ScaleWorkers
from alignedserve.cluster.deployments.planning import worker_bytes
from alignedserve.cluster.desired import ProcessDrain, RollingRestart
from alignedserve.cluster.hosts.record import DRAINED, NodeRecord
from alignedserve.cluster.hosts.resizing import Resize, RunningNode, node_called, plan_resize, require_drainable
from alignedserve.cluster.machine import this_machine
from alignedserve.cluster.nodes.joining import Joining
from alignedserve.cluster.nodes.members import Member
from alignedserve.cluster.nodes.plan import ClusterPlan
from alignedserve.cluster.placement import NodeShare, engines_of
from alignedserve.cluster.ray_node import answer_of
from alignedserve.config.sections import MIB
from alignedserve.core.errors import ConfigError, NotEnoughMemory, ResourceError
from alignedserve.process.addresses import ROUTER, deployed_name, deployment_of
from alignedserve.runtime.device.devices import CPU

logger = logging.getLogger(__name__)

_ANSWER_S = 3.0
_LEAVING_S = 60.0  # in which requests of a worker that is to go may finish there
_GIVEN_BACK_WITHIN_S = 60.0  # the same of a node that the load does not need


class Wishes:
    """The wishes about one cluster's nodes and workers. All but `scale` are carried out by `reconcile` alone; that
    creates workers at once, as a giver wants to know whether there is room."""

    def __init__(
        self, members: Mapping[str, Member], joining: Joining, create: Callable[[PreparedNode, str], None]
    ) -> None:
        """`members`: by Ray's id, as they come and go. `create`: creates a worker of this name; raises PeerLost."""
        self._members = members
        self._joining = joining
        self._wanted = joining.wanted
        self._create = create

    # --- nodes

    @property
    def draining(self) -> tuple[str, ...]:
        return tuple(node_id for node_id, member in self._members.items() if member.name in self._wanted.drains)

    @property
    def released(self) -> tuple[str, ...]:
        """Return the nodes that are, or have been, given back to Ray."""
        drains = self._wanted.drains
        going = (node_id for node_id in self.draining if drains[self._members[node_id].name].is_given_back)
        return (*self._wanted.given_back, *going)

    def drain_node(self, order: DrainNode, nodes: Sequence[NodeRecord]) -> str:
        """Begin a drain, or give it another time; return what is said of it. Raises ResourceError."""
        node = node_called(nodes, order.node)
        member = self._members.get(node.node_id)
        left = {*self.draining, node.node_id}
        others = [member.shares for node_id, member in self._members.items() if node_id not in left]
        require_drainable(node, member.shares if member is not None else None, others, is_forced=order.is_forced)
        assert member is not None, "a node that cannot be drained"
        self._begin_drain(member, order.within_s)
        return f"{member.name} gets nothing new; what it still has in {order.within_s:.0f} s goes elsewhere."

    def undo_node(self, name: str, nodes: Sequence[NodeRecord]) -> str:
        """Use a node again; return what is said of it. Raises ResourceError."""
        node = node_called(nodes, name)
        if not node.drain:
            raise ResourceError(f"{node.name or node.hostname} neither drains nor has drained")
        self.take_again(node.node_id, node.name)
        return f"{node.name} is used again" + ("; its processes start now." if node.drain == DRAINED else ".")

    def give_back(self, node_id: str) -> None:
        """Drain a node that the load does not need; it is left to Ray then."""
        self._begin_drain(self._members[node_id], _GIVEN_BACK_WITHIN_S, is_given_back=True)

    def take_again(self, node_id: str, name: str | None = None) -> None:
        """Use a node again that drains or has drained. `name`: in the cluster; None: that of the member, if it is."""
        known = self._members.get(node_id)
        name = known.name if known is not None else name
        self._wanted.use_again(node_id, name)
        logger.info("%s is used again", name or node_id)

    def _begin_drain(self, member: Member, within_s: float, *, is_given_back: bool = False) -> None:
        # Workers that do both phases have no pool.
        pools = (share.pool_name for share in member.shares if share.prefill)
        gateways = tuple(name for name, _ in member.prepared.share.gateways)
        moves_s = time.monotonic() + within_s
        self._wanted.drains[member.name] = ProcessDrain((*member.workers, *pools), gateways, moves_s, is_given_back)
        logger.info("%s drains; what is left after %.0f s goes elsewhere", member.name, within_s)

    # --- workers

    def drain_worker(self, name: str, within_s: float) -> str:
        """Begin to take one worker out; return a sentence about it. Raises an error of the tree."""
        shares = [share.without(self._wanted.workers) for member in self._members.values() for share in member.shares]
        share = next((share for share in shares if name in share.workers), None)
        if share is None:
            known = ", ".join(worker for share in shares for worker in share.workers)
            raise ResourceError(f"there is no worker {name}, or it drains already; there are {known}")
        self._require_no_standby(share.deployment_id)
        if (name,) in (share.decode, share.prefill):
            raise ResourceError(f"{name} is the last worker of its kind: nothing of its model would be served")
        self._end_later(name, within_s)
        return f"{name} gets nothing new; what it still has in {within_s:.0f} s goes elsewhere."

    def undo_worker(self, name: str) -> str:
        """End the drain of a worker; return a sentence about it. Raises ResourceError."""
        if self._wanted.drains.pop(name, None) is None:
            raise ResourceError(f"{name} does not drain; `alignedserve scale decode=N` starts more workers")
        return f"{name} is used again."

    def restart(self, order_id: str, order: RestartWorkers, deployments: Iterable[DeploymentReport]) -> None:
        """Begin to start workers anew. Raises ResourceError."""
        if self._wanted.restart is not None:
            raise ResourceError("the workers are being restarted already")
        names = [
            name for deployment in deployments if order.model in (None, deployment.name) for name in deployment.workers
        ]
        able = [name for name in names if name not in self._wanted.workers]
        if not able:
            model = "" if order.model is None else f" of a model that is served as {order.model}"
            raise ResourceError(f"there are no workers{model}, or all of them drain")
        logger.info("ordered: restart %s", ", ".join(able))
        num_alike = Counter(map(_kind_of, names))
        # Nobody takes what the only worker of its kind has.
        within_s = {name: order.drains_within_s if num_alike[_kind_of(name)] > 1 else 0.0 for name in able}
        self._wanted.restart = RollingRestart(order_id, able, within_s)

    def scale(self, order: ScaleWorkers, actors: Mapping[str, Any]) -> str:
        """Begin the changes; return what is said of them. Raises an error of the tree, with nothing changed. `actors`:
        all of the cluster, by name."""
        deployment_id = self._deployment_of(order.model)
        self._require_no_standby(deployment_id)
        able = {
            member.name: member
            for member in self._members.values()
            if member.name not in self._wanted.drains and deployment_id in member.models
        }
        parts = {name: member.models[deployment_id] for name, member in able.items()}
        shares = {name: part.share.without(self._wanted.drains) for name, part in parts.items()}
        nodes = [RunningNode(share, parts[name].capacity) for name, share in shares.items()]
        plan = self._joining.models[deployment_id].plan
        change = plan_resize(nodes, order.counts, is_separate=plan.config.chosen_topology.is_separate)
        self._require_room(change, able, plan)
        leaving = self._choose_leaving(change, shares, actors[deployed_name(ROUTER, deployment_id)])
        started = [self._add(kind, able[node], deployment_id) for kind, node in change.added]
        for name in leaving:
            self._end_later(name, _LEAVING_S)
        if not started and not leaving:
            return "There are as many already."
        ends = [f"{name} gets nothing new and ends when its requests have" for name in leaving]
        return "; ".join((*started, *ends)) + "."

    def _end_later(self, name: str, within_s: float) -> None:
        self._wanted.drains[name] = ProcessDrain((name,), (), time.monotonic() + within_s)
        logger.info("%s drains, to be fewer", name)

    def _require_no_standby(self, deployment_id: str) -> None:
        if self._joining.models[deployment_id].plan.config.decode.standby:
            raise ConfigError("workers that others stand by for (decode.standby) keep their number; serve anew with it")

    def _deployment_of(self, model: str | None) -> str:
        serving = self._joining.logic.serving
        matching = [deployment_id for name, deployment_id in serving.items() if model in (None, name)]
        if len(matching) == 1:
            return matching[0]
        names = ", ".join(serving)
        if model is None:
            raise ConfigError(f"several models are served ({names}); say whose workers are meant with --model NAME")
        raise ConfigError(f"no model is served as {model}; there are {names}")

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
        self._create(changed, name)
        member.set_part(changed)
        logger.info("%s starts on %s", name, member.ray_node)
        return f"{name} starts on {share.node}"


def _kind_of(worker: str) -> tuple[str, str]:
    return worker.partition("-")[0], deployment_of(worker)
