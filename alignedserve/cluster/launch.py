"""Starts a cluster: on this host, as a cluster of one node, or on the nodes of a Ray cluster."""

import contextlib
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import ray

from alignedserve.cluster import preflight
from alignedserve.cluster.actor_factory import ActorClasses, ActorFactory, ClusterSecrets, PreparedNode
from alignedserve.cluster.deployments.on_demand import ModelOnDemand
from alignedserve.cluster.deployments.planning import PlannedModel, plan_models
from alignedserve.cluster.hosts.ray_directory import NAMESPACE
from alignedserve.cluster.hosts.record import read_record
from alignedserve.cluster.hosts.succession import ClusterState, Succession, digest_of, left_by_former
from alignedserve.cluster.local_ray.worker_template import WorkerTemplate
from alignedserve.cluster.machine import GpuClaims, GpusTaken, claim_gpus
from alignedserve.cluster.memory_planner import with_block_size
from alignedserve.cluster.nodes.admission import (
    Agent,
    NodeAdmission,
    NodeReport,
    OwnHost,
    agent_name,
    agreed_device,
    differences,
    joining_device,
    missing_copies,
    start_agents,
)
from alignedserve.cluster.nodes.agent import actor_called, end_by_name, end_cluster
from alignedserve.cluster.nodes.joining import Joining
from alignedserve.cluster.nodes.members import (
    DRIVER,
    HostedModel,
    Member,
    expect_handoffs,
    member_of,
    record_of,
    reserve_for,
    resources_of,
)
from alignedserve.cluster.nodes.plan import ClusterPlan, NodePart, NodeResources, resolve_for
from alignedserve.cluster.nodes.ray_nodes import (
    RayNode,
    alive_nodes,
    find_group,
    release,
    release_former,
    require_head,
    wait_for_nodes,
)
from alignedserve.cluster.ray_node import join_ray, kill_actors
from alignedserve.cluster.recording_folder import remove_unserved, with_absolute_folder, write_run_file
from alignedserve.cluster.run_folder import make_run_folder, make_run_root
from alignedserve.cluster.serving_cluster import DriverSetup, ServingCluster
from alignedserve.cluster.starting import LoggingObserver, StartObserver
from alignedserve.config.model_settings import ModelSettings
from alignedserve.config.sections import ClusterConfig
from alignedserve.core.errors import AlignedServeError, ConfigError, PeerLost, ProtocolError, ResourceError
from alignedserve.core.plugins import load_plugin
from alignedserve.process.addresses import FIRST_DEPLOYMENT, ROUTER, AddressBook, numbered_deployment
from alignedserve.process.recording import RunMetadata
from alignedserve.process.tls import CertificateAuthority
from alignedserve.runtime.device.devices import AUTO, CPU, gpu_names
from alignedserve.runtime.device_check.choice import DeviceChoice, choose_device, with_device
from alignedserve.runtime.kv.arena_files import ARENA_PREFIX, arena_folder, remove_stale_arenas
from alignedserve.runtime.lora.loaded_adapters import with_adapters
from alignedserve.runtime.model.hub.local_models import with_local_model
from alignedserve.runtime.model.named_models import model_path
from alignedserve.scheduling.factory import require_effect, resolve_policy

_STEP_S = 0.1
_SETTLED_S = 30.0


def adopt_cluster(digest: str, actor_classes: ActorClasses, setup: DriverSetup) -> ServingCluster | None:
    """Take over what a former driver has left; None: there is nothing, or it was of another kind and has been ended.
    `digest`: what this driver is to serve, by `digest_of`. Raises ResourceError when the former driver still runs, or
    its processes do not end."""
    try:
        record = read_record()
    except ProtocolError as error:  # of another version; its agents end it
        logger.warning("the former cluster cannot be taken over: %s", error)
        return None
    if record is None:
        return None
    state = left_by_former(record)
    if state is not None and state.asked == digest:
        try:
            return _adopt(state, actor_classes, replace(setup, succession=Succession(digest, state)))
        except AlignedServeError as error:
            logger.warning("the former cluster cannot be taken over, and is ended: %s", error)
    end_cluster(record)
    return None


def _adopt(state: ClusterState, actor_classes: ActorClasses, setup: DriverSetup) -> ServingCluster:
    nodes = _settled_nodes()
    alive = {node.node_id for node in nodes}
    lost = [member for member in state.members if member.ray_node.node_id not in alive]
    for member in lost:
        logger.warning("%s was lost with the former driver", member.ray_node)
        names = [actor.name for actor in record_of(member).actors if actor.name != DRIVER]
        end_by_name([*names, agent_name(member.prepared.folder.name)])
        release(member.prepared.folder.name)
        state.joining.keep_share(member)
    members = [_found_again(member) for member in state.members if member not in lost]
    if not any(member.prepared.share.is_head for member in members):
        members.insert(0, _prepared_head(state.joining, nodes[0]))
    served = state.joining.plan.served
    factory = ActorFactory(served, actor_classes, state.secrets, is_detached=True)
    logger.warning("the cluster of a former driver goes on, on %d nodes", len(members))
    return ServingCluster(state.joining, members, factory, setup)


def _settled_nodes() -> list[RayNode]:
    ends_s = time.monotonic() + _SETTLED_S
    while sum(node.is_head for node in alive_nodes()) > 1:
        if time.monotonic() > ends_s:
            raise PeerLost("Ray still counts a former head among its nodes")
        time.sleep(_STEP_S)
    return alive_nodes()


def _found_again(member: Member) -> Member:
    folder_name = member.prepared.folder.name
    try:
        agent = ray.get_actor(agent_name(folder_name), NAMESPACE)
    except ValueError as error:
        raise PeerLost(f"the agent of {member.ray_node} is gone") from error
    adopted = replace(member, agent=replace(member.agent, actor=agent))
    adopted.use(find_group(folder_name, member.placed))
    return adopted


def _prepared_head(joining: Joining, node: RayNode) -> Member:
    preparation = joining.begin(node)
    while (member := preparation.advance()) is None:
        time.sleep(_STEP_S)
    if not member.prepared.share.is_head:
        joining.vacate(member)
        raise ResourceError("Ray's head is on another host than before")
    return member


logger = logging.getLogger(__name__)

_FORMER_ENDS_S = 75.0  # its agents end it when they have had no driver for a minute

_ALWAYS_THERE = (ROUTER, "gateway-0")  # one of them, of any cluster: the first model's router may have ended


@dataclass(frozen=True, slots=True)
class Hosts:
    """The Ray cluster to serve on."""

    address: str
    num_nodes: int = 1  # to wait for
    wait_s: float = 120.0  # at most; the start goes on with fewer nodes


def launch_cluster(
    settings: ModelSettings,
    actor_classes: ActorClasses,
    observer: StartObserver | None = None,
    template: WorkerTemplate | None = None,
) -> ServingCluster:
    """Start a cluster on this host alone and return it when it is up. `template`: forks its processes, and ends with
    the cluster; None: Ray starts them. Unset sizes are worked out, which the observer is told before anything starts.
    Raises an error of the tree, with nothing left running, when it cannot."""
    observer = observer or LoggingObserver()
    configs = [_checked(config, len(settings.own)) for config in settings.configs]
    if configs[0].scaling.max_nodes is not None:
        raise ConfigError("scaling.max_nodes is for a cluster of several hosts (RAY_ADDRESS); leave it out")
    choice, claims = _claimed(configs[0].engine.device)
    observer.device_chosen(choice)
    configs, host = [with_device(config, choice) for config in configs], OwnHost(claims)
    lasting = [index for index, config in enumerate(configs) if not index or config.model.keep_alive is None]
    settings, on_demand = _on_demand(settings, configs, lasting, host)
    configs = [configs[index] for index in lasting]
    reports = host.reports_that_come(choice.device, [model_path(config.model.path) for config in configs])
    resources = {node: resources_of("node-0", node, report) for node, report in reports.items()}
    plans = _plan(configs, resources, reports)
    for plan in plans.values():
        host.check({host.node: plan.part(0, "")}, plan.served)
    first = plans[FIRST_DEPLOYMENT]
    _record_run(first, [first.part(0, "")])
    book = AddressBook(make_run_folder())  # when nothing is left that refuses the start in one line
    members = _members(plans, resources, {host.node: Agent(None, book)})
    remove_stale_arenas(arena_folder(), ARENA_PREFIX)
    setup = DriverSetup(settings, lambda nodes: host, observer, on_demand, template)
    joining = _joining(plans, resources, setup, reports[host.node].digests, book.folder.name)
    cluster = ServingCluster(joining, members, ActorFactory(joining.plan.served, actor_classes), setup)
    try:
        cluster.start()
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _on_demand(
    settings: ModelSettings, configs: Sequence[ClusterConfig], lasting: Sequence[int], host: OwnHost
) -> tuple[ModelSettings, tuple[ModelOnDemand, ...]]:
    """Return the settings of the models that are loaded at the start, and the others, each sized as if it were alone.
    Raises NotEnoughMemory for one that does not fit alone."""
    sleeping = []
    for index, config in enumerate(configs):
        if index in lasting:
            continue
        reports = host.reports_that_come(config.engine.device, [model_path(config.model.path)])
        resources = {node: resources_of("node-0", node, report) for node, report in reports.items()}
        plan = _plan([config], resources, reports)[FIRST_DEPLOYMENT]
        sized = next(iter(plan.choices.values())).config
        sleeping.append(ModelOnDemand.of(plan, sized, settings.own[index]))
    return settings.with_models([settings.own[index] for index in lasting]), tuple(sleeping)


def _claimed(device: str) -> tuple[DeviceChoice, GpuClaims]:
    """Choose the device of engine.device and claim the GPUs; `auto` falls back to the CPU when other clusters hold
    every GPU. Raises ConfigError, or ResourceError where GPUs that were asked for are another cluster's."""
    choice = choose_device(device)
    try:
        return choice, claim_gpus(gpu_names(choice.device), make_run_root())
    except GpusTaken as error:
        if device != AUTO:
            raise
        return DeviceChoice(CPU, f"{error}; workers compute on the CPU", is_warning=True), GpuClaims()


def launch_on_hosts(
    settings: ModelSettings, hosts: Hosts, actor_classes: ActorClasses, observer: StartObserver | None = None
) -> ServingCluster:
    """Start a cluster on the nodes of that Ray cluster and return it when it is up. One that a former driver with the
    same configuration has left goes on instead, and one of another is ended first. Raises an error of the tree, with
    nothing left running, when it cannot."""
    observer, digest = observer or LoggingObserver(), digest_of(*settings.configs)
    configs = [_checked(config, len(settings.own)) for config in settings.configs]
    if any(config.model.keep_alive is not None for config in configs):
        raise ConfigError("model.keep_alive is for a cluster of one host; leave it out")
    join_ray(hosts.address, NAMESPACE)
    try:
        context = ray.get_runtime_context()
        require_head(alive_nodes(), context.get_node_id())
        scales = configs[0].scaling.max_nodes is not None
        scaling = load_plugin("autoscaler").scaling_of(configs, context.gcs_address) if scales else None
        succession = Succession(digest)
        setup = DriverSetup(settings, NodeAdmission, observer, succession=succession, make_scaling=scaling)
        cluster = adopt_cluster(digest, actor_classes, setup)
        is_adopted = cluster is not None
        if cluster is None:
            cluster = _prepare_cluster(configs, hosts, actor_classes, setup)
    except BaseException:
        ray.shutdown()
        raise
    try:
        cluster.start()
    except BaseException:
        cluster.stop()
        if configs[0].recording.folder is not None and not is_adopted:
            remove_unserved(Path(configs[0].recording.folder))
        raise
    return cluster


def _checked(config: ClusterConfig, num_models: int) -> ClusterConfig:
    if config.recording.folder is not None and num_models > 1:
        raise ConfigError("recording.folder is for a cluster of one model; leave it out")
    config = msgspec.structs.replace(config, model=with_local_model(config.model))
    require_effect(config)
    return with_absolute_folder(resolve_policy(config))


def _prepare_cluster(
    configs: Sequence[ClusterConfig], hosts: Hosts, actor_classes: ActorClasses, setup: DriverSetup
) -> ServingCluster:
    _wait_for_former()
    nodes = wait_for_nodes(hosts.num_nodes, hosts.wait_s)
    if len(nodes) < hosts.num_nodes:
        logger.warning("%d of %d nodes are there after %.0f s", len(nodes), hosts.num_nodes, hosts.wait_s)
    with contextlib.ExitStack() as if_it_fails, NodeAdmission(nodes) as admission:
        device = configs[0].engine.device
        choice, reports = agreed_device(
            device, admission.reports(device, [resolve_for([], config).folder for config in configs])
        )
        setup.observer.device_chosen(choice)
        configs = [with_device(config, choice) for config in configs]
        head = reports[nodes[0]]
        refused = admission.apart() | differences(reports, head)
        if nodes[0] in refused or (missing := missing_copies(head, head.digests)):
            raise ResourceError(f"{nodes[0]}: {refused.get(nodes[0]) or next(iter(missing.values()))}")
        resources = {
            node: resources_of(f"node-{index}", node, reports[node])
            for index, node in enumerate(node for node in nodes if node not in refused)
        }
        plans = _plan(configs, resources, reports)
        cluster_id = secrets.token_hex(4)
        names = {node: f"{cluster_id}-{index}" for index, node in enumerate(resources)}
        agents = start_agents(names, cluster_id, configs[0].links)
        if_it_fails.callback(kill_actors, [agent.actor for agent in agents.values()])
        members = _members(plans, resources, agents)
        expect_handoffs(members)
        for key, plan in plans.items():
            parts = {member.ray_node: member.models[key] for member in members if key in member.models}
            admission.check(parts, plan.served)
        release_former()
        for member in members:
            if_it_fails.callback(release, member.prepared.folder.name)
        reserve_for(members)
        _record_run(plans[FIRST_DEPLOYMENT], [member.prepared for member in members])
        if_it_fails.pop_all()
    authority = CertificateAuthority.new(cluster_id) if configs[0].links.tls else None
    joining = _joining(plans, resources, setup, head.digests, cluster_id)
    joining.device = joining_device(device, choice)
    cluster_secrets = ClusterSecrets(authority=authority)
    factory = ActorFactory(plans[FIRST_DEPLOYMENT].served, actor_classes, cluster_secrets, is_detached=True)
    cluster = ServingCluster(joining, members, factory, setup)
    for node, problem in refused.items():
        cluster.refuse(node, problem)
    return cluster


def _plan(
    configs: Sequence[ClusterConfig], by_node: Mapping[RayNode, NodeResources], reports: Mapping[RayNode, NodeReport]
) -> dict[str, ClusterPlan]:
    machines, head = [resources.machine for resources in by_node.values()], next(iter(reports.values()))
    missing = {node: missing_copies(reports[node], head.digests) for node in by_node}
    models = []
    for index, config in enumerate(configs):
        served = with_adapters(resolve_for(machines, config), config.lora)
        nodes = frozenset(resources.capacity.name for node, resources in by_node.items() if index not in missing[node])
        models.append(PlannedModel(numbered_deployment(index + 1), with_block_size(config, served), served, nodes))
    plans = plan_models(models, list(by_node.values()))
    for plan in plans.values():
        for choice in plan.choices.values():
            preflight.check_configuration(choice.config, plan.served)
    return plans


def _members(
    plans: Mapping[str, ClusterPlan], by_node: Mapping[RayNode, NodeResources], agents: Mapping[RayNode, Agent]
) -> list[Member]:
    members = []
    for index, node in enumerate(by_node):
        parts = [plan.part(index, node.address) for plan in plans.values()]
        used = [part for part in parts if part.share.num_workers or part.share.is_head or part.share.gateways]
        members.append(member_of(node, used or parts[:1], agents[node]))
    return members


def _joining(
    plans: Mapping[str, ClusterPlan],
    by_node: Mapping[RayNode, NodeResources],
    setup: DriverSetup,
    digests: Sequence[str | None],
    cluster_id: str,
) -> Joining:
    for plan in plans.values():
        setup.observer.sizes_chosen(next(iter(plan.choices.values())), has_others=len(plans) > 1)
    models = {
        key: HostedModel(plan, sections, digest)
        for (key, plan), sections, digest in zip(plans.items(), setup.settings.own, digests, strict=True)
    }
    joining = Joining(plans[FIRST_DEPLOYMENT], models, cluster_id, len(by_node))
    joining.wholes = {resources.capacity.name: resources.machine for resources in by_node.values()}
    return joining


def _record_run(plan: ClusterPlan, parts: Sequence[NodePart | PreparedNode]) -> None:
    if plan.config.recording.folder is None:
        return
    shares = [part.share for part in parts]
    head = parts[0].config
    counts = {
        "prefill": sum(len(share.prefill) for share in shares) or head.prefill.count,
        "decode": sum(len(share.decode) - share.num_standby for share in shares),
    }
    sections = {name: msgspec.structs.replace(getattr(head, name), count=count) for name, count in counts.items()}
    config = msgspec.structs.replace(head, **sections)
    layout = plan.served.block_layout(head.engine.block_size)
    write_run_file(RunMetadata(config=config, layout=layout, num_nodes=len(parts)))


def _wait_for_former() -> None:
    ends_s = time.monotonic() + _FORMER_ENDS_S
    while True:
        if all(actor_called(name) is None for name in _ALWAYS_THERE):
            return
        if time.monotonic() > ends_s:
            raise ResourceError("a cluster serves on these hosts already; end it with `alignedserve stop`")
        time.sleep(0.5)
