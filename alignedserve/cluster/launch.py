"""Starts a cluster: Ray supervises and restarts the actors, which communicate over their own links."""

import contextlib
import logging
import time
import urllib.error
import urllib.request
from dataclasses import replace
from types import TracebackType
from typing import Any

import msgspec
import psutil
import ray
from ray.exceptions import RayError

from alignedserve.batches.location import SharedState
from alignedserve.cluster import preflight
from alignedserve.cluster.actor_factory import ActorClasses, ActorFactory, PreparedNode, max_lines_in_flight
from alignedserve.cluster.batch_storage import StateLock, open_batch_storage
from alignedserve.cluster.machine import this_machine
from alignedserve.cluster.placement import NodeCapacity, NodeShare, Placement
from alignedserve.cluster.private_redis import PrivateRedis
from alignedserve.cluster.process_health import Health, ProcessState
from alignedserve.cluster.ray_node import start_ray
from alignedserve.cluster.recording_folder import prepare_recording
from alignedserve.cluster.run_folder import make_run_folder
from alignedserve.cluster.signals import interrupts_kept, signals_ignored
from alignedserve.cluster.sizing import SizeChoice, choose_sizes
from alignedserve.cluster.start_observer import LoggingObserver, Patience, StartObserver
from alignedserve.cluster.watchdog import Watchdog
from alignedserve.config.sections import ClusterConfig
from alignedserve.core.errors import AlignedServeError, ConfigError, PeerLost, ResourceError
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.device.devices import gpu_names
from alignedserve.runtime.engine.model_executor import bytes_beside_blocks
from alignedserve.runtime.kv.arena_files import ARENA_PREFIX, arena_folder, remove_stale_arenas
from alignedserve.runtime.model.hub.local_model import with_local_model
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from alignedserve.runtime.process.addresses import AddressBook
from alignedserve.runtime.process.loading_progress import Progress, read_progress
from alignedserve.scheduling.factory import resolve_policy
from alignedserve.scheduling.topology import require_effect

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 600.0  # without progress
_POLL_S = 0.1
_STOP_TIMEOUT_S = 5.0
_RAY_EXIT_S = 3.0


class AskedToStop(Exception):
    """Raised by a start that somewhere else was asked to end."""


class RunningCluster:
    """A started cluster. Stops everything it started on `stop`, and when used as a context manager at its end.

    `node` is this host; more are added by `add_node` and removed by `remove_node`, all on one thread at a time.
    """

    def __init__(self, node: PreparedNode, served: ServedModel, factory: ActorFactory, observer: StartObserver) -> None:
        self.config = node.config
        self.served = served
        self.folder = node.folder
        self._node = node
        self._observer = observer
        # Those of the cluster's start share the limits of keys; None: those of the nodes that are created.
        self._first_gateways: tuple[str, ...] | None = None
        self._state = SharedState()
        self._max_lines = 0  # of batches, in the cluster at a time
        self._redis: PrivateRedis | None = None
        self._state_lock: StateLock | None = None
        self._watchdogs: dict[str, Watchdog] = {}  # by node
        self._actors: dict[str, dict[str, Any]] = {}  # by node and name
        self._factory = factory
        self._children_before = set(psutil.Process().children())  # whatever else this process has started

    @property
    def url(self) -> str:
        """Base URL of the first gateway."""
        host = self.config.gateway.host
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
        return f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{self.config.gateway.port}"

    def start(self, others: tuple[PreparedNode, ...] = ()) -> None:
        """Create every actor and wait until each is up. Raises the error of the first failing one."""
        self.create(others)
        self._wait_for_actors()
        for name in self._actors:
            self._watch(name)

    def create(self, others: tuple[PreparedNode, ...] = ()) -> None:
        """Create every actor; they come up by themselves, in any order."""
        nodes = (self._node, *others)
        gateways = self._first_gateways or tuple(name for node in nodes for name, _ in node.share.gateways)
        self._state = SharedState(gateways=gateways)
        if self.config.batches.enabled:
            with interrupts_kept():  # it starts a process
                location, self._redis, self._state_lock = open_batch_storage(self.config, self.folder)
            self._state = SharedState(location, gateways)
        if not ray.is_initialized():
            start_ray(self.folder, f"alignedserve-{self.folder.name}")
        num_decode = sum(len(node.share.decode) for node in nodes)
        self._max_lines = max_lines_in_flight(self.config, num_decode)
        self._actors[self._node.share.node] = self._factory.create(self._node, self._state, self._max_lines)
        for node in others:
            self._actors[node.share.node] = self._factory.create(node, self._state_of_others())

    def add_node(self, node: PreparedNode) -> None:
        """Create the actors of a node that has joined. They come up by themselves, in any order."""
        # A node that comes back has its former name, and what its gateway let in still counts.
        state = replace(self._state_of_others(), have_run=True)
        self._actors[node.share.node] = self._factory.create(node, state)
        self._watch(node.share.node)

    def remove_node(self, name: str) -> None:
        """Forget the actors of a node that is gone; those that are still there are killed."""
        watchdog = self._watchdogs.pop(name, None)
        if watchdog is not None:
            watchdog.stop()
        for actor in self._actors.pop(name, {}).values():
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)

    def add_worker(self, node: PreparedNode, name: str) -> None:
        """Create one more worker of a node, of which `node` has the new share. It comes up by itself."""
        of_node = node.share.node
        actor = self._actors[of_node][name] = self._factory.create_worker(node, name)
        self._watchdogs[of_node].watch(name, actor)

    def remove_worker(self, node: str, name: str) -> None:
        """End one worker of a node."""
        self._watchdogs[node].forget(name)
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actors[node].pop(name), no_restart=True)

    def healths(self) -> dict[str, Health]:
        """Return what is known of every process, by name."""
        return {name: health for watchdog in self._watchdogs.values() for name, health in watchdog.healths().items()}

    def start_again(self, node: PreparedNode, name: str) -> None:
        """Start a process of a node anew that serves nothing. Raises an error of Ray's while it holds the former one.

        It comes up by itself. `node`: with its share as it is now.
        """
        of_node = self._actors[node.share.node]
        if self.healths()[name].state is not ProcessState.DEAD:
            ray.kill(of_node[name], no_restart=False)
        elif node.share.is_head:
            of_node[name] = self._factory.create_again(node, name, self._state, self._max_lines)
        else:
            of_node[name] = self._factory.create_again(node, name, replace(self._state_of_others(), have_run=True))
        self._watchdogs[node.share.node].watch(name, of_node[name])

    def actors(self) -> dict[str, Any]:
        """Return all actors by name."""
        return {name: actor for actors in self._actors.values() for name, actor in actors.items()}

    def check(self) -> bool:
        """Look after the cluster; False: it was asked to stop. A cluster of one host needs nothing."""
        return True

    def check_start(self) -> None:
        """Raise AskedToStop when the start is to end. A cluster of one host is told by a signal."""

    def progress(self) -> list[Progress | None]:
        """Return how far the workers have loaded their model."""
        names = self._actors.get(self._node.share.node, {})
        return [read_progress(self._node.book.progress_of(name)) for name in names]

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until a token has passed through the whole system.

        Raises PeerLost if none does within `timeout_s`, or within that of the last progress of a model that is loaded;
        AskedToStop.
        """
        patience = self._patience(timeout_s)
        while not patience.is_over():
            self.check_start()
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=2.0) as response:  # noqa: S310
                    if response.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.05)
        raise PeerLost(f"the cluster was not ready within {timeout_s:.0f} s; its logs are in {self.folder / 'logs'}")

    def stop(self) -> None:
        """Stop every actor and Ray itself. May be repeated; never raises; ignores signals meanwhile."""
        with signals_ignored():
            self._end_everything()

    def leave(self) -> None:
        """End this process's part after an error that is a fault of its own; what can go on without it does.

        Stops a cluster of one host, whose actors belong to this process. May be followed by `stop`; never raises.
        """
        self.stop()

    def __enter__(self) -> "RunningCluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _watch(self, name: str) -> None:
        self._watchdogs[name] = Watchdog(self._actors[name], self.config.links.hang_timeout_s)
        self._watchdogs[name].start()

    def _state_of_others(self) -> SharedState:
        """Return what gateways of other nodes share, as they find it."""
        if self._state.batches is None:
            return self._state
        return replace(self._state, batches=self._state.batches.elsewhere())

    def _end_everything(self) -> None:
        for watchdog in self._watchdogs.values():
            watchdog.stop()
        started = self._started_processes()
        if ray.is_initialized() and self._actors:
            stops = [actor.stop.remote() for actor in self.actors().values()]
            try:
                ray.wait(stops, num_returns=len(stops), timeout=_STOP_TIMEOUT_S)
            except (RayError, ValueError):
                logger.debug("an actor was gone before it was stopped")
        self._leave_ray()
        self._actors.clear()
        self._close_own()
        _end_survivors(started)
        remove_stale_arenas(arena_folder(), f"{ARENA_PREFIX}{self.folder.name}-")
        for path in (*self.folder.glob("*.sock"), *self.folder.glob("*.progress")):
            path.unlink(missing_ok=True)

    def _started_processes(self) -> list[psutil.Process]:
        found = [child for child in psutil.Process().children() if child not in self._children_before]
        for child in tuple(found):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += child.children(recursive=True)
        return found

    def _close_own(self) -> None:
        """End what this process itself serves: the Redis of this cluster, and the lock on its folder."""
        if self._redis is not None:
            self._redis.stop()
        if self._state_lock is not None:
            self._state_lock.release()

    def _leave_ray(self) -> None:
        ray.shutdown()

    def _wait_for_actors(self) -> None:
        """Wait until every actor is up, as long as models load.

        Raises the error of the first failing one, or AskedToStop.
        """
        starting = {actor.failure.remote(): name for name, actor in self.actors().items()}
        patience = self._patience(_START_TIMEOUT_S)
        while starting:
            self.check_start()
            answered, _ = ray.wait(list(starting), timeout=_POLL_S)
            for reference in answered:
                failure = _result(reference, starting.pop(reference))
                if failure is not None:
                    raise failure
            if patience.is_over():
                raise ResourceError(
                    f"{', '.join(starting.values())} did not start, without progress for {_START_TIMEOUT_S:.0f} s; "
                    f"their logs are in {self.folder / 'logs'}"
                )

    def _patience(self, timeout_s: float) -> Patience:
        return Patience(self.progress, timeout_s, self._observer)


def launch_cluster(
    config: ClusterConfig, actor_classes: ActorClasses, observer: StartObserver | None = None
) -> RunningCluster:
    """Start a cluster on this host alone and return it when it is up.

    Unset sizes are worked out, which the observer is told before anything starts. Raises an error of the tree, with
    nothing left running, when it cannot.
    """
    observer = observer or LoggingObserver()
    if config.scaling.max_nodes is not None:
        raise ConfigError("scaling.max_nodes is for a cluster of several hosts (RAY_ADDRESS); leave it out")
    config = msgspec.structs.replace(config, model=with_local_model(config.model))
    require_effect(config)
    config, capacity, share = _placed(resolve_policy(config))
    choice = _choose(config)
    config, served = choice.config, choice.served
    preflight.check(config, served)
    config = prepare_recording(config, served)
    remove_stale_arenas(arena_folder(), ARENA_PREFIX)
    folder = make_run_folder()
    observer.sizes_chosen(choice)  # when nothing is left that refuses the start in one line
    factory = ActorFactory(served, actor_classes)
    node = PreparedNode(share, capacity, config, AddressBook(folder))
    cluster = RunningCluster(node, served, factory, observer)
    try:
        cluster.start()
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _placed(config: ClusterConfig) -> tuple[ClusterConfig, NodeCapacity, NodeShare]:
    """Return the configuration with the numbers of workers of this host, and what they are."""
    capacity = NodeCapacity("node-0", "", num_cores(), gpu_names(config.engine.device))
    (share,) = Placement(config).place([capacity])
    return share.config_of(config), capacity, share


def _choose(config: ClusterConfig) -> SizeChoice:
    machine = this_machine(config.engine.device)
    served = resolve_model(
        config.model,
        config.engine.device,
        config.engine.kv_cache_dtype,
        has_bfloat16=machine.has_bfloat16,
        has_float8=machine.has_float8,
    )
    beside = bytes_beside_blocks(served, config.scheduling, config.engine.block_size)
    return choose_sizes(config, served, machine, recomputing_bytes=beside)


def _end_survivors(processes: list[psutil.Process]) -> None:
    """Kill what is left: Ray's agents outlive an aborted start."""
    _, alive = psutil.wait_procs(processes, timeout=_RAY_EXIT_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _result(reference: Any, name: str) -> AlignedServeError | None:
    try:
        failure: AlignedServeError | None = ray.get(reference)
    except RayError as error:
        raise ResourceError(f"{name} did not start: {str(error).splitlines()[0]}") from error
    return failure
