"""Starts a cluster on the nodes of a Ray cluster, and looks after it: nodes join, and are lost."""

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import ray

from alignedserve.cluster import preflight
from alignedserve.cluster.actor_factory import BATCHES, ActorClasses, ActorFactory, PreparedNode
from alignedserve.cluster.hosts.admission import Admission, Keeper, differences, keeper_name, start_keepers
from alignedserve.cluster.hosts.node_report import NodeReport, own_versions
from alignedserve.cluster.hosts.plan import ClusterPlan, NodeResources, node_config, plan_cluster, plan_joining
from alignedserve.cluster.hosts.ray_directory import NAMESPACE
from alignedserve.cluster.hosts.ray_nodes import RayNode, alive_nodes, require_head, wait_for_nodes
from alignedserve.cluster.hosts.record import (
    ActorRecord,
    ClusterRecord,
    NodeRecord,
    is_asked_to_stop,
    remove_record,
    write_record,
)
from alignedserve.cluster.launch import RunningCluster
from alignedserve.cluster.placement import NodeCapacity, NodeShare, engines_of
from alignedserve.cluster.ray_node import join_ray
from alignedserve.cluster.start_observer import LoggingObserver, StartObserver
from alignedserve.config.sections import ClusterConfig
from alignedserve.core.errors import AlignedServeError, ConfigError, PeerLost, ResourceError
from alignedserve.runtime.engine.model_executor import hidden_block_tokens, recomputing_bytes
from alignedserve.runtime.model.hub.local_model import with_local_model
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from alignedserve.runtime.process.addresses import ROUTER
from alignedserve.runtime.process.tls import CertificateAuthority
from alignedserve.scheduling.factory import resolve_policy

logger = logging.getLogger(__name__)

_HEAD_SILENT_S = 20.0
_DRIVER = "driver"
_ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104
_FORMER_ENDS_S = 15.0  # Ray ends the actors of a driver that has died


@dataclass(frozen=True, slots=True)
class Hosts:
    """The Ray cluster to serve on."""

    address: str
    num_nodes: int = 1  # to wait for
    wait_s: float = 120.0  # at most; then with those that there are


@dataclass(slots=True)
class _Member:
    """A node of the cluster."""

    ray_node: RayNode
    prepared: PreparedNode
    keeper: Keeper


class ClusterOnHosts(RunningCluster):
    """A started cluster of several nodes, for a driver that calls `check` about once a second."""

    def __init__(
        self, plan: ClusterPlan, members: Sequence[_Member], factory: ActorFactory, observer: StartObserver
    ) -> None:
        super().__init__(members[0].prepared, plan.served, factory, observer)
        self._plan = plan
        self._members = {member.ray_node.node_id: member for member in members}
        self._vacant: dict[tuple[str, str], NodeShare] = {}  # of hosts that are gone, for when they come back
        self._refused: dict[str, NodeRecord] = {}
        self._starting: dict[Any, str] = {}  # actors of nodes that joined, by the call that says how it went
        self._num_nodes = self._num_folders = len(members)
        self._cluster_id = self.folder.name.partition("-")[0]
        self._started = time.time()
        self._is_ready = False
        self._heard_s = time.monotonic()  # from Ray's head
        self._log = _log_to(self.folder / "logs")

    def refuse(self, node: RayNode, problem: str) -> None:
        """Note a node that is not used, and why."""
        logger.error("%s is not used: %s", node, problem)
        self._refused[node.node_id] = NodeRecord("", node.node_id, node.address, node.hostname, problem=problem)

    def start_all(self) -> None:
        """Start the actors of all nodes. Raises the error of the first failing one."""
        self._announce()
        self.start(tuple(member.prepared for member in self._members.values())[1:])

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """See RunningCluster; then every command finds the cluster."""
        super().wait_ready(timeout_s)
        self._is_ready = True
        self._announce()
        self._heard_s = time.monotonic()

    def check(self) -> bool:
        """Take in nodes that have come and give up those that are gone; False: the cluster was asked to stop.

        Raises PeerLost when Ray's head has not answered for long.
        """
        try:
            goes_on = self._look_around()
        except PeerLost:
            if time.monotonic() - self._heard_s > _HEAD_SILENT_S:
                raise
            return True
        self._heard_s = time.monotonic()
        return goes_on

    def _look_around(self) -> bool:
        if is_asked_to_stop(self._cluster_id):
            return False
        alive = {node.node_id: node for node in alive_nodes()}
        gone = [node_id for node_id in self._members if node_id not in alive]
        for node_id in gone:
            member = self._members.pop(node_id)
            logger.warning("%s is lost, and with it %s", member.ray_node, member.prepared.share.node)
            self.remove_node(member.prepared.share.node)
            self._vacant[_host(member.ray_node)] = member.prepared.share
        left = [node_id for node_id in self._refused if node_id not in alive]
        for node_id in left:
            del self._refused[node_id]
        known = {*self._members, *self._refused}
        come = [node for node_id, node in alive.items() if node_id not in known]
        for node in come:
            self._join(node)
        self._look_at_starting()
        if gone or left or come:
            self._announce()
        return True

    def _leave_ray(self) -> None:
        if ray.is_initialized():
            try:
                remove_record(self._cluster_id)
            except PeerLost:
                logger.warning("Ray's head is gone, and with it the record of this cluster")
        super()._leave_ray()
        logging.getLogger("alignedserve").removeHandler(self._log)
        self._log.close()

    def _join(self, node: RayNode) -> None:
        try:
            member = self._prepare_joining(node)
        except AlignedServeError as error:
            self.refuse(node, str(error))
            return
        share = member.prepared.share
        try:
            self.add_node(member.prepared)
        except ValueError as error:  # Ray has not yet given up the actors that had these names
            logger.info("%s joins later: %s", node, error)
            return
        self._members[node.node_id] = member
        del self._vacant[_host(node)]
        actors = self._actors[share.node]
        self._starting |= {actor.failure.remote(): f"{name} on {node}" for name, actor in actors.items()}
        logger.info("%s has joined as %s with %s", node, share.node, ", ".join(actors))

    def _prepare_joining(self, node: RayNode) -> _Member:
        config, served = self._plan.config, self._plan.served
        head = next(iter(self._members.values())).ray_node
        with Admission((head, node)) as admission:
            reports = admission.reports(config.engine.device, served.folder)
            found = differences({node: reports[node]}, reports[head])
            if found:
                raise ResourceError(found[node])
            resources = _resources(f"node-{self._num_nodes}", node, reports[node])
            share = self._vacant.get(_host(node))
            if share is None:
                share = self._vacant[_host(node)] = self._plan.placement.join(resources.capacity)
                self._num_nodes += 1
            sized = plan_joining(self._plan, share, resources.machine, _beside(config, served))
            self._num_folders += 1
            folder_name = f"{self._cluster_id}-{self._num_folders}"
            keeper = start_keepers({node: folder_name}, self._cluster_id, config.links)[node]
            member = _member(node, share, resources.capacity, node_config(sized, share, node.address), keeper)
            admission.check({node: member.prepared}, served)
        return member

    def _look_at_starting(self) -> None:
        if not self._starting:
            return
        answered, _ = ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)
        for reference in answered:
            name = self._starting.pop(reference)
            try:
                failure = ray.get(reference)
            except ray.exceptions.RayError as error:
                failure = error
            if failure is not None:
                logger.error("%s did not start: %s", name, str(failure).splitlines()[0])

    def record(self) -> ClusterRecord:
        """Return what the cluster consists of now."""
        members = (_record_of(member) for member in self._members.values())
        return ClusterRecord(
            cluster_id=self._cluster_id,
            version=own_versions(),
            model=self.served.name,
            topology=self.config.chosen_topology.value,
            started=self._started,
            is_ready=self._is_ready,
            nodes=(*members, *self._refused.values()),
        )

    def _announce(self) -> None:
        write_record(self.record())


def launch_on_hosts(
    config: ClusterConfig, hosts: Hosts, actor_classes: ActorClasses, observer: StartObserver | None = None
) -> ClusterOnHosts:
    """Start a cluster on the nodes of that Ray cluster and return it when it is up.

    Raises an error of the tree, with nothing left running, when it cannot.
    """
    observer = observer or LoggingObserver()
    if config.recording.folder is not None:
        raise ConfigError("recording.folder is for a cluster of one host so far; leave it out")
    config = resolve_policy(msgspec.structs.replace(config, model=with_local_model(config.model)))
    join_ray(hosts.address, NAMESPACE)
    try:
        cluster = _prepare_cluster(config, hosts, actor_classes, observer)
    except BaseException:
        ray.shutdown()
        raise
    try:
        cluster.start_all()
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _prepare_cluster(
    config: ClusterConfig, hosts: Hosts, actor_classes: ActorClasses, observer: StartObserver
) -> ClusterOnHosts:
    require_head(alive_nodes(), ray.get_runtime_context().get_node_id())
    _wait_for_former()
    nodes = wait_for_nodes(hosts.num_nodes, hosts.wait_s)
    if len(nodes) < hosts.num_nodes:
        logger.warning("%d of %d nodes are there after %.0f s", len(nodes), hosts.num_nodes, hosts.wait_s)
    with Admission(nodes) as admission:
        folder = resolve_model(config.model, config.engine.device, config.engine.kv_cache_dtype).folder
        reports = admission.reports(config.engine.device, folder)
        refused = differences(reports, reports[nodes[0]])
        if nodes[0] in refused:
            raise ResourceError(f"{nodes[0]}: {refused[nodes[0]]}")
        found = {
            node: _resources(f"node-{index}", node, reports[node])
            for index, node in enumerate(node for node in nodes if node not in refused)
        }
        plan = _plan(config, found)
        cluster_id = secrets.token_hex(4)
        names = {node: f"{cluster_id}-{index}" for index, node in enumerate(found)}
        keepers = start_keepers(names, cluster_id, config.links)
        members = [
            _member(node, share, one.capacity, plan.config_of(share, node.address), keepers[node])
            for (node, one), share in zip(found.items(), plan.shares, strict=True)
        ]
        _expect_handoffs(members)
        admission.check({member.ray_node: member.prepared for member in members}, plan.served)
    observer.sizes_chosen(next(iter(plan.choices.values())))
    authority = CertificateAuthority(cluster_id) if config.links.tls else None
    cluster = ClusterOnHosts(plan, members, ActorFactory(plan.served, actor_classes, authority), observer)
    for node, problem in refused.items():
        cluster.refuse(node, problem)
    return cluster


def _plan(config: ClusterConfig, found: Mapping[RayNode, NodeResources]) -> ClusterPlan:
    served = resolve_model(
        config.model,
        config.engine.device,
        config.engine.kv_cache_dtype,
        has_bfloat16=all(one.machine.has_bfloat16 for one in found.values()),
        has_float8=all(one.machine.has_float8 for one in found.values()),
    )
    plan = plan_cluster(config, served, list(found.values()), recomputing_bytes=_beside(config, served))
    for choice in plan.choices.values():
        preflight.check_configuration(choice.config, plan.served)
    return plan


def _member(node: RayNode, share: NodeShare, capacity: NodeCapacity, config: ClusterConfig, keeper: Keeper) -> _Member:
    return _Member(node, PreparedNode(share, capacity, config, keeper.book, node.options), keeper)


def _expect_handoffs(members: Sequence[_Member]) -> None:
    """Tell each node's prefill workers how many decode workers the others have, to lend each as much memory."""
    shares = [member.prepared.share for member in members]
    for member in members:
        num_far_decode = sum(len(share.decode) for share in shares if share is not member.prepared.share)
        member.prepared = replace(member.prepared, num_far_decode=num_far_decode)


def _wait_for_former() -> None:
    """Wait until the actors of a driver that has died are gone. Raises ResourceError when a cluster runs."""
    ends_s = time.monotonic() + _FORMER_ENDS_S
    while True:
        try:
            ray.get_actor(ROUTER, NAMESPACE)
        except ValueError:
            return
        if time.monotonic() > ends_s:
            raise ResourceError("a cluster serves on these hosts already; end it with `alignedserve stop`")
        time.sleep(0.5)


def _resources(name: str, node: RayNode, report: NodeReport) -> NodeResources:
    assert report.machine is not None, "a node without a report of its memory"
    return NodeResources(NodeCapacity(name, node.address, report.machine.num_cores, report.gpus), report.machine)


def _beside(config: ClusterConfig, served: ServedModel) -> int:
    """Return the bytes beside each decode block, where the policy keeps hidden caches."""
    block_tokens = hidden_block_tokens(served, config.scheduling, config.engine.block_size)
    return recomputing_bytes(served.block_layout(config.engine.block_size), block_tokens)


def _log_to(folder: Path) -> logging.Handler:
    """Write what the driver says beside the logs of the head's other processes, until the handler is removed."""
    folder.mkdir(exist_ok=True)
    handler = logging.FileHandler(folder / f"{_DRIVER}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("alignedserve")
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    return handler


def _host(node: RayNode) -> tuple[str, str]:
    return node.hostname, node.address


def _record_of(member: _Member) -> NodeRecord:
    node, share, config = member.ray_node, member.prepared.share, member.prepared.config
    engines = engines_of(share, config.engine, member.prepared.capacity)
    workers = (
        ActorRecord(name, engine.device if engine.device != "cpu" else f"{engine.threads_per_worker} threads")
        for name, engine in engines.items()
    )
    has_pool = bool(share.prefill)
    of_head = [_DRIVER, ROUTER, *([BATCHES] if config.batches.enabled else [])]
    others = [*(of_head if share.is_head else []), *([share.pool_name] if has_pool else [])]
    host = node.address if config.gateway.host in _ALL_ADDRESSES else config.gateway.host
    reachable = f"[{host}]" if ":" in host else host
    return NodeRecord(
        name=share.node,
        node_id=node.node_id,
        address=node.address,
        hostname=node.hostname,
        keeper=keeper_name(member.prepared.folder.name),
        actors=(*(ActorRecord(name) for name in (*others, *(name for name, _ in share.gateways))), *workers),
        urls=tuple(f"http://{reachable}:{port}" for _, port in share.gateways),
    )
