"""Creates the actors of a node with their arguments and Ray options."""

import contextlib
import copy
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from alignedserve.batches.location import SharedState
from alignedserve.batches.remote.state_client import STATE
from alignedserve.cluster.placement import NodeCapacity, NodeShare, engines_of
from alignedserve.cluster.ray_node import kill_actors
from alignedserve.config.environment import api_keys, log_format, trace_headers
from alignedserve.config.sections import ClusterConfig, EngineConfig, Observing, RouterConfig, Topology
from alignedserve.messages.handshake import Role
from alignedserve.process.addresses import AddressBook
from alignedserve.process.logs import require_format
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.process.tls import CertificateAuthority
from alignedserve.runtime.model.served_model import ServedDeployment, ServedModel
from alignedserve.worker_core.actor import ColocatedWorkerActor, StageActor
from alignedserve.worker_core.handoff import Lending
from decode_worker.actor import DecodeWorkerActor
from kvpool.actor import KvPoolActor
from prefill_worker.actor import PrefillWorkerActor
from router.actor import RouterActor

BATCHES = "batches-0"  # the driver of files and batches, beside the router
_WAIT_SHARE = 0.75  # of the time after which gateways give a chat up: the longest that the router lets one wait


class ActorClasses(NamedTuple):
    """Ray actor classes of sibling packages, passed in because siblings do not import each other."""

    gateway: Any
    batches: Any  # drives files and batches


def _on_this_host(name: str) -> Mapping[str, Any]:
    return {"num_cpus": 0}  # Ray has no other use there


@dataclass(frozen=True, slots=True)
class ClusterSecrets:
    """Secrets of one cluster: its processes accept no others."""

    secret: bytes = field(repr=False, default_factory=partial(secrets.token_bytes, 32))
    authority: CertificateAuthority | None = None  # of processes on several hosts; None: all are on one


@dataclass(frozen=True, slots=True)
class PreparedNode:
    """A node that is ready for its actors."""

    share: NodeShare
    capacity: NodeCapacity
    config: ClusterConfig  # with the sizes and counts of this node
    book: AddressBook  # as its processes see it
    options_of: Callable[[str], Mapping[str, Any]] = _on_this_host  # Ray's, of a process by its name
    num_far_decode: int = 0  # decode workers of other nodes at the start, which take requests from its prefill workers
    joins_others: bool = False  # its model is added while others serve

    @property
    def folder(self) -> Path:
        return self.book.folder


class _Process(NamedTuple):
    actor_class: Any
    role: Role
    name: str
    arguments: tuple[object, ...]  # of the class, before its ProcessSpec


class ActorFactory:
    """Creates the actors of one cluster with the secret and the model."""

    def __init__(
        self,
        served: ServedModel,
        actor_classes: ActorClasses,
        cluster_secrets: ClusterSecrets | None = None,
        *,
        is_detached: bool = False,
    ) -> None:
        """`is_detached`: the actors outlive this process, until the next driver adopts them."""
        self._served = served
        self._listed: tuple[ServedDeployment, ...] | None = None
        self._actor_classes = actor_classes
        self._secrets = cluster_secrets or ClusterSecrets()
        self._options = {"lifetime": "detached"} if is_detached else {}
        self.is_adopting = False  # see `adopting`

    def serving(self, served: ServedModel, listed: tuple[ServedDeployment, ...] | None = None) -> "ActorFactory":
        """Return a factory of the same cluster for another model. `listed`: what gateways are told at first; None: that
        it serves alone."""
        other = copy.copy(self)
        other._served, other._listed = served, listed
        return other

    @property
    def secrets(self) -> ClusterSecrets:
        return self._secrets

    @contextlib.contextmanager
    def adopting(self) -> Iterator[None]:
        """Let `create` find living actors by their names, and create missing ones."""
        self.is_adopting = True
        try:
            yield
        finally:
            self.is_adopting = False

    def create(self, node: PreparedNode, state: SharedState, *, drives_batches: bool = False) -> dict[str, Any]:
        """Create all of a node's actors; return them by name. `state`: as this node finds it. `drives_batches`: whether
        the driver of batches is to run there."""
        actors: dict[str, Any] = {}
        try:
            for process in self._processes(node, state, drives_batches=drives_batches):
                self._add(actors, node, process)
        except BaseException:
            kill_actors(actors.values())  # those that are detached would stay
            raise
        return actors

    def create_again(self, node: PreparedNode, name: str, state: SharedState, *, drives_batches: bool = False) -> Any:
        """Create one process of a node anew, whose former actor is dead; return its actor. Arguments as of `create`."""
        actors: dict[str, Any] = {}
        processes = self._processes(node, state, drives_batches=drives_batches)
        self._add(actors, node, next(process for process in processes if process.name == name))
        return actors[name]

    def create_worker(self, node: PreparedNode, name: str) -> Any:
        """Create one more worker of a running node; return its actor."""
        return self.create_again(node, name, SharedState())

    def _processes(self, node: PreparedNode, state: SharedState, *, drives_batches: bool) -> Iterator[_Process]:
        config = node.config
        if node.share.is_head and node.share.has_model:
            batches = state.batches
            router, state_folder = node.share.router, None
            if batches is not None and batches.folder is not None:
                state_folder = batches.folder / router
            arguments = (_router_config(config), config.batching, self._served, state_folder)
            yield _Process(RouterActor, Role.ROUTER, router, arguments)
        yield from self._workers(node)
        alone = (ServedDeployment(self._served, config.engine.block_size, config.prefix_cache),)
        deployments = self._listed if self._listed is not None else alone
        observing = Observing(config.explain, config.tracing, trace_headers())
        keys = config.gateway.keys_path
        settings = msgspec.structs.replace(config.gateway, keys_file=str(keys) if keys is not None else None)
        for name, port in node.share.gateways:
            gateway = (settings, port, deployments, api_keys(), state, observing)
            yield _Process(self._actor_classes.gateway, Role.GATEWAY, name, gateway)
        if state.batches is not None and drives_batches:
            serving = (state.gateways, api_keys(), self._spec(node, Role.STATE_SERVER, STATE), observing)
            driver = (settings, deployments, state.batches, *serving)
            yield _Process(self._actor_classes.batches, Role.GATEWAY, BATCHES, driver)

    def _workers(self, node: PreparedNode) -> Iterator[_Process]:
        config, share = node.config, node.share
        if share.num_workers and config.node_pool is not None:
            layout = self._served.block_layout(config.engine.block_size)
            pool = (config.node_pool, config.batching, layout, config.chosen_topology.is_separate)
            yield _Process(KvPoolActor, Role.KV_POOL, share.pool_name, pool)
        for name, engine in engines_of(share, config.engine, node.capacity).items():
            yield self._worker(node, name, engine)
        for name in share.stages:
            yield _Process(StageActor, Role.DECODE_WORKER, name, ())

    def _worker(self, node: PreparedNode, name: str, engine: EngineConfig) -> _Process:
        config, share, served = node.config, node.share, self._served
        if not config.chosen_topology.is_separate:
            lending = None
            if config.chosen_topology is Topology.ELASTIC:
                peers = tuple(other for other in share.decode if other != name)
                lending = Lending(config.prefill.candidate_buffer_bytes, peers)
            colocated = (config.decode, config.scheduling, engine, served, lending, config.prefix_cache)
            return _Process(ColocatedWorkerActor, Role.DECODE_WORKER, name, colocated)
        if name in share.prefill:
            prefill = (config.prefill, config.scheduling, engine, share.decode, node.num_far_decode, served)
            return _Process(PrefillWorkerActor, Role.PREFILL_WORKER, name, (*prefill, config.prefix_cache))
        decode = (config.decode, config.batching, config.scheduling, engine, served)
        return _Process(DecodeWorkerActor, Role.DECODE_WORKER, name, decode)

    def _add(self, actors: dict[str, Any], node: PreparedNode, process: _Process) -> None:
        # Ray restarts a dead actor while its node lives.
        name = process.name
        options = {"name": name, "get_if_exists": self.is_adopting, **self._options, **node.options_of(name)}
        made = process.actor_class.options(max_restarts=-1, max_task_retries=0, **options)
        actors[name] = made.remote(*process.arguments, self._spec(node, process.role, name))

    def _spec(self, node: PreparedNode, role: Role, name: str) -> ProcessSpec:
        authority = self._secrets.authority
        return ProcessSpec(
            role=role,
            name=name,
            cluster_id=node.folder.name,
            secret=self._secrets.secret,
            peer_timeout_s=node.config.links.peer_timeout_s,
            addresses=node.book,
            log_folder=node.folder / "logs",
            recording=node.config.recording,
            pool_name=node.share.pool_name,
            credentials=authority.issue(name) if authority is not None else None,
            deployment_id=node.share.deployment_id,
            joins_others=node.joins_others,
            log_format=require_format(log_format()),
            logs_steps=node.config.gateway.log_steps,
            notes_requests=Observing(node.config.explain, node.config.tracing).is_on,
        )


def _router_config(config: ClusterConfig) -> RouterConfig:
    longest_s = config.router.max_real_time_wait_s or _WAIT_SHARE * config.gateway.first_token_timeout_s
    return msgspec.structs.replace(config.router, max_real_time_wait_s=longest_s)
