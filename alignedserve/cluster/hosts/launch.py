"""Starts a cluster on the nodes of a Ray cluster."""

import contextlib
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import ray

from alignedserve.cluster import preflight
from alignedserve.cluster.actor_factory import ActorClasses, ActorFactory, ClusterSecrets
from alignedserve.cluster.hosts.admission import Admission, differences, end_keepers, start_keepers
from alignedserve.cluster.hosts.adoption import adopt_cluster
from alignedserve.cluster.hosts.cluster import ClusterOnHosts, Driving
from alignedserve.cluster.hosts.joining import Joining
from alignedserve.cluster.hosts.members import Member, expect_handoffs, member_of, reserve_for, resources_of
from alignedserve.cluster.hosts.nodes.placement_group import release, release_former
from alignedserve.cluster.hosts.nodes.ray_nodes import RayNode, alive_nodes, require_head, wait_for_nodes
from alignedserve.cluster.hosts.plan import ClusterPlan, NodeResources, plan_cluster
from alignedserve.cluster.hosts.ray_directory import NAMESPACE
from alignedserve.cluster.hosts.scaling.scaler import make_scaler
from alignedserve.cluster.hosts.succession import Succession, digest_of
from alignedserve.cluster.ray_node import join_ray
from alignedserve.cluster.recording_folder import remove_unserved, with_absolute_folder, write_run_file
from alignedserve.cluster.start_observer import LoggingObserver, StartObserver
from alignedserve.config.sections import ClusterConfig
from alignedserve.core.errors import ResourceError
from alignedserve.messages.recording import RunMetadata
from alignedserve.runtime.engine.model_executor import bytes_beside_blocks
from alignedserve.runtime.model.hub.local_model import with_local_model
from alignedserve.runtime.model.served_model import resolve_model
from alignedserve.runtime.process.addresses import ROUTER
from alignedserve.runtime.process.tls import CertificateAuthority
from alignedserve.scheduling.factory import resolve_policy
from alignedserve.scheduling.topology import require_effect

logger = logging.getLogger(__name__)

_FORMER_ENDS_S = 75.0  # its keepers end it when they have had no driver for a minute


@dataclass(frozen=True, slots=True)
class Hosts:
    """The Ray cluster to serve on."""

    address: str
    num_nodes: int = 1  # to wait for
    wait_s: float = 120.0  # at most; then with those that there are


def launch_on_hosts(
    config: ClusterConfig, hosts: Hosts, actor_classes: ActorClasses, observer: StartObserver | None = None
) -> ClusterOnHosts:
    """Start a cluster on the nodes of that Ray cluster and return it when it is up.

    One that a former driver with the same configuration has left goes on instead, and one of another is ended first.
    Raises an error of the tree, with nothing left running, when it cannot.
    """
    observer, asked = observer or LoggingObserver(), digest_of(config)
    require_effect(config)
    config = resolve_policy(msgspec.structs.replace(config, model=with_local_model(config.model)))
    config = with_absolute_folder(config)
    join_ray(hosts.address, NAMESPACE)
    try:
        context = ray.get_runtime_context()
        require_head(alive_nodes(), context.get_node_id())
        scaler = make_scaler(config, context.gcs_address)
        cluster = adopt_cluster(asked, actor_classes, observer, scaler)
        is_adopted = cluster is not None
        if cluster is None:
            driving = Driving(observer, Succession(asked), scaler)
            cluster = _prepare_cluster(config, hosts, actor_classes, driving)
    except BaseException:
        ray.shutdown()
        raise
    try:
        cluster.start_all()
    except BaseException:
        cluster.stop()
        if config.recording.folder is not None and not is_adopted:
            remove_unserved(Path(config.recording.folder))
        raise
    return cluster


def _prepare_cluster(
    config: ClusterConfig, hosts: Hosts, actor_classes: ActorClasses, driving: Driving
) -> ClusterOnHosts:
    _wait_for_former()
    nodes = wait_for_nodes(hosts.num_nodes, hosts.wait_s)
    if len(nodes) < hosts.num_nodes:
        logger.warning("%d of %d nodes are there after %.0f s", len(nodes), hosts.num_nodes, hosts.wait_s)
    with contextlib.ExitStack() as if_it_fails, Admission(nodes) as admission:
        folder = resolve_model(config.model, config.engine.device, config.engine.kv_cache_dtype).folder
        reports = admission.reports(config.engine.device, folder)
        refused = admission.apart() | differences(reports, reports[nodes[0]])
        if nodes[0] in refused:
            raise ResourceError(f"{nodes[0]}: {refused[nodes[0]]}")
        found = {
            node: resources_of(f"node-{index}", node, reports[node])
            for index, node in enumerate(node for node in nodes if node not in refused)
        }
        plan = _plan(config, found)
        cluster_id = secrets.token_hex(4)
        names = {node: f"{cluster_id}-{index}" for index, node in enumerate(found)}
        keepers = start_keepers(names, cluster_id, config.links)
        if_it_fails.callback(end_keepers, [keeper.actor for keeper in keepers.values()])
        members = [
            member_of(node, share, one.capacity, plan.config_of(share, node.address), keepers[node])
            for (node, one), share in zip(found.items(), plan.shares, strict=True)
        ]
        expect_handoffs(members)
        admission.check({member.ray_node: member.prepared for member in members}, plan.served)
        release_former()
        for member in members:
            if_it_fails.callback(release, member.prepared.folder.name)
        reserve_for(members)
        if config.recording.folder is not None:
            write_run_file(_run_metadata(plan, members))
        if_it_fails.pop_all()
    driving.observer.sizes_chosen(next(iter(plan.choices.values())))
    authority = CertificateAuthority(cluster_id) if config.links.tls else None
    joining = Joining(plan, reports[nodes[0]], cluster_id, len(members))
    factory = ActorFactory(plan.served, actor_classes, ClusterSecrets(authority=authority), is_detached=True)
    cluster = ClusterOnHosts(joining, members, factory, driving)
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
    plan = plan_cluster(
        config,
        served,
        list(found.values()),
        recomputing_bytes=bytes_beside_blocks(served, config.scheduling, config.engine.block_size),
    )
    for choice in plan.choices.values():
        preflight.check_configuration(choice.config, plan.served)
    return plan


def _run_metadata(plan: ClusterPlan, members: Sequence[Member]) -> RunMetadata:
    shares = [member.prepared.share for member in members]
    head = members[0].prepared.config
    counts = {
        "prefill": sum(len(share.prefill) for share in shares) or head.prefill.count,
        "decode": sum(len(share.decode) for share in shares),
    }
    sections = {name: msgspec.structs.replace(getattr(head, name), count=count) for name, count in counts.items()}
    return RunMetadata(
        config=msgspec.structs.replace(head, **sections),
        layout=plan.served.block_layout(head.engine.block_size),
        num_nodes=len(members),
    )


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
