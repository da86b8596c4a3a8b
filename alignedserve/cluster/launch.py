"""Starts a cluster: Ray places, supervises and restarts the actors, which communicate over their own links."""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import psutil
import ray
from ray.exceptions import RayError

from alignedserve.batches.location import BatchLocation
from alignedserve.cluster import preflight
from alignedserve.cluster.batch_storage import StateLock, open_batch_storage
from alignedserve.cluster.machine import this_machine
from alignedserve.cluster.private_redis import PrivateRedis
from alignedserve.cluster.ray_node import join_ray, start_ray
from alignedserve.cluster.recording_folder import prepare_recording
from alignedserve.cluster.signals import signals_ignored
from alignedserve.cluster.sizing import SizeChoice, choose_sizes
from alignedserve.cluster.start_observer import LoggingObserver, Patience, StartObserver
from alignedserve.cluster.watchdog import Watchdog
from alignedserve.config.environment import RUN_DIR_VARIABLE, api_keys, ray_address, run_root
from alignedserve.config.sections import ClusterConfig, EngineConfig, Topology
from alignedserve.core.errors import AlignedServeError, PeerLost, ResourceError
from alignedserve.messages.handshake import Role
from alignedserve.runtime.device.cores import threads_per_worker
from alignedserve.runtime.device.devices import worker_devices
from alignedserve.runtime.engine.model_executor import hidden_block_tokens, recomputing_bytes
from alignedserve.runtime.kv.shm_arena import ARENA_PREFIX, arena_folder, remove_stale_arenas
from alignedserve.runtime.model.hub.local_model import with_local_model
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from alignedserve.runtime.process.addresses import ROUTER, AddressBook
from alignedserve.runtime.process.process_spec import POOL, ProcessSpec
from alignedserve.scheduling.factory import resolve_policy
from decode_worker.actor import ColocatedWorkerActor, DecodeWorkerActor
from kvpool.actor import KvPoolActor
from prefill_worker.actor import PrefillWorkerActor
from router.actor import RouterActor

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 600.0  # without progress
_POLL_S = 0.1
_STOP_TIMEOUT_S = 5.0
_RAY_EXIT_S = 3.0
_KEPT_FOLDERS = 8  # of clusters that have ended, for their logs
_MAX_SOCKET_PATH = 107  # bytes; the system's limit
_LONGEST_NAME = "prefill-1023"


class ActorClasses(NamedTuple):
    """Ray actor classes of sibling packages, passed in because siblings do not import each other."""

    gateway: Any
    batches: Any  # drives files and batches


class RunningCluster:
    """A started cluster. Stops everything it started on `stop`, and when used as a context manager at its end."""

    def __init__(
        self,
        config: ClusterConfig,
        served: ServedModel,
        folder: Path,
        actor_classes: ActorClasses,
        observer: StartObserver,
    ) -> None:
        self.config = config
        self._observer = observer
        self._actor_classes = actor_classes
        self._batch_location: BatchLocation | None = None
        self._redis: PrivateRedis | None = None
        self._state_lock: StateLock | None = None
        self._watchdog: Watchdog | None = None
        self.served = served
        self.folder = folder
        self._actors: dict[str, Any] = {}
        self._cluster_id = folder.name
        self._secret = secrets.token_bytes(32)

    @property
    def url(self) -> str:
        """Base URL of the first gateway."""
        host = self.config.gateway.host
        reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104
        return f"http://{reachable}:{self.config.gateway.port}"

    def start(self) -> None:
        """Create every actor and wait until each is up. Raises the error of the first failing one."""
        if self.config.batches.enabled:
            self._batch_location, self._redis, self._state_lock = open_batch_storage(self.config, self.folder)
        self._start_ray()
        self._create_actors()
        self._wait_for_actors()
        self._watchdog = Watchdog(self._actors, self.config.links.hang_timeout_s)
        self._watchdog.start()

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until a token has passed through the whole system.

        Raises PeerLost if none does within `timeout_s`, or within that of the last progress of a model that is loaded.
        """
        patience = self._patience(timeout_s)
        while not patience.is_over():
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

    def __enter__(self) -> "RunningCluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _end_everything(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
        started = psutil.Process().children(recursive=True)
        if ray.is_initialized() and self._actors:
            stops = [actor.stop.remote() for actor in self._actors.values()]
            try:
                ray.wait(stops, num_returns=len(stops), timeout=_STOP_TIMEOUT_S)
            except (RayError, ValueError):
                logger.debug("an actor was gone before it was stopped")
        ray.shutdown()
        self._actors.clear()
        if self._redis is not None:
            self._redis.stop()
        if self._state_lock is not None:
            self._state_lock.release()
        _end_survivors(started)
        remove_stale_arenas(arena_folder(), f"{ARENA_PREFIX}{self._cluster_id}-")
        for path in (*self.folder.glob("*.sock"), *self.folder.glob("*.progress")):
            path.unlink(missing_ok=True)

    def _wait_for_actors(self) -> None:
        """Wait until every actor is up, as long as models load. Raises the error of the first failing one."""
        starting = {actor.failure.remote(): name for name, actor in self._actors.items()}
        patience = self._patience(_START_TIMEOUT_S)
        while starting:
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
        files = [AddressBook(self.folder).progress_of(name) for name in self._actors]
        return Patience(files, timeout_s, self._observer)

    def _start_ray(self) -> None:
        namespace = f"alignedserve-{self._cluster_id}"
        address = ray_address()
        if address is None:
            start_ray(self.folder, namespace)
        else:
            join_ray(address, namespace)

    def _create_actors(self) -> None:
        config, served, block_size = self.config, self.served, self.config.engine.block_size
        engines = iter(_engines(config))
        self._create(RouterActor, Role.ROUTER, ROUTER, config.router, config.batching, served)
        if config.chosen_topology is Topology.DISAGGREGATED:
            self._create(KvPoolActor, Role.KV_POOL, POOL, config.pool, config.batching, served.block_layout(block_size))
            for index in range(config.prefill.count):
                name = f"prefill-{index}"
                prefill = (config.prefill, config.scheduling, next(engines), config.decode.count, served)
                self._create(PrefillWorkerActor, Role.PREFILL_WORKER, name, *prefill)
        prefillers = tuple(f"prefill-{index}" for index in range(config.prefill.count))
        for index in range(config.decode.count):
            name = f"decode-{index}"
            if config.chosen_topology is Topology.COLOCATED:
                colocated = (config.decode, config.scheduling, next(engines), served)
                self._create(ColocatedWorkerActor, Role.DECODE_WORKER, name, *colocated)
            else:
                decode = (config.decode, config.batching, config.scheduling, next(engines), prefillers, served)
                self._create(DecodeWorkerActor, Role.DECODE_WORKER, name, *decode)
        for index in range(config.gateway.count):
            gateway = (config.gateway, config.gateway.port + index, served, api_keys(), self._batch_location)
            self._create(self._actor_classes.gateway, Role.GATEWAY, f"gateway-{index}", *gateway)
        if self._batch_location is not None:
            driver = (config.gateway, served, self._batch_location, _max_lines_in_flight(config))
            self._create(self._actor_classes.batches, Role.GATEWAY, "batches-0", *driver)

    def _create(self, actor_class: Any, role: Role, name: str, *arguments: object) -> None:
        process_spec = ProcessSpec(
            role=role,
            name=name,
            cluster_id=self._cluster_id,
            secret=self._secret,
            peer_timeout_s=self.config.links.peer_timeout_s,
            addresses=AddressBook(self.folder),
            log_folder=self.folder / "logs",
            recording=self.config.recording,
        )
        # Placement is by node, not by CPU shares; a dead actor is restarted for as long as the cluster lives.
        options = actor_class.options(name=name, num_cpus=0, max_restarts=-1, max_task_retries=0)
        self._actors[name] = options.remote(*arguments, process_spec)


def launch_cluster(
    config: ClusterConfig, actor_classes: ActorClasses, observer: StartObserver | None = None
) -> RunningCluster:
    """Start a cluster on this machine (or, with RAY_ADDRESS set, on that Ray cluster) and return it when it is up.

    Unset sizes are worked out, which the observer is told before anything starts. Raises an error of the tree, with
    nothing left running, when it cannot.
    """
    observer = observer or LoggingObserver()
    config = msgspec.structs.replace(config, model=with_local_model(config.model))
    choice = _choose(resolve_policy(config))
    config, served = choice.config, choice.served
    preflight.check(config, served)
    config = prepare_recording(config, served)
    remove_stale_arenas(arena_folder(), ARENA_PREFIX)
    folder = _make_folder()
    observer.sizes_chosen(choice)  # when nothing is left that refuses the start in one line
    cluster = RunningCluster(config, served, folder, actor_classes, observer)
    try:
        cluster.start()
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _choose(config: ClusterConfig) -> SizeChoice:
    machine = this_machine(config.engine.device)
    served = resolve_model(
        config.model,
        config.engine.device,
        config.engine.kv_cache_dtype,
        has_bfloat16=machine.has_bfloat16,
        has_float8=machine.has_float8,
    )
    block_tokens = hidden_block_tokens(served, config.scheduling, config.engine.block_size)
    beside = recomputing_bytes(served.block_layout(config.engine.block_size), block_tokens)
    return choose_sizes(config, served, machine, recomputing_bytes=beside)


def _max_lines_in_flight(config: ClusterConfig) -> int:
    """Return the batch lines in the cluster at a time: those that decode workers run, and as many on their way."""
    return config.batches.max_in_flight or 2 * config.decode.count * config.decode.max_running_requests


def _engines(config: ClusterConfig) -> list[EngineConfig]:
    """Return each worker's engine section with its threads and device: prefill workers first, then the others."""
    is_disaggregated = config.chosen_topology is Topology.DISAGGREGATED
    num_workers = config.decode.count + (config.prefill.count if is_disaggregated else 0)
    threads = config.engine.threads_per_worker or threads_per_worker(num_workers)
    return [
        msgspec.structs.replace(config.engine, threads_per_worker=threads, device=device)
        for device in worker_devices(config.engine.device, num_workers)
    ]


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


def _make_folder() -> Path:
    """Create a private folder for sockets and logs, and remove those of old clusters."""
    root = run_root()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.stat().st_uid != os.getuid() or root.stat().st_mode & 0o077:
            raise ResourceError(f"{root} must belong to you and be closed to others (mode 700); it holds the sockets")
        folder = root / secrets.token_hex(4)
        if len(os.fsencode(AddressBook(folder).of(_LONGEST_NAME).removeprefix("unix:"))) > _MAX_SOCKET_PATH:
            raise ResourceError(f"{root} is too long a path for Unix sockets; set {RUN_DIR_VARIABLE} to a shorter one")
        _remove_old_folders(root)
        folder.mkdir(mode=0o700)
    except OSError as error:
        problem = f"{root} cannot hold sockets and logs: {error.strerror}"
        raise ResourceError(f"{problem}; set {RUN_DIR_VARIABLE} to another folder") from error
    # Locked until this process ends, however it ends: the folder is in use.
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_EX)
    return folder


def _remove_old_folders(root: Path) -> None:
    """Remove all but the latest few folders of ended clusters, and the sockets of those few; their logs stay."""
    folders = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in folders:
        file_descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for socket_path in path.glob("*.sock"):
                socket_path.unlink(missing_ok=True)
            if path not in folders[-_KEPT_FOLDERS:]:
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue  # its cluster runs
        finally:
            os.close(file_descriptor)
