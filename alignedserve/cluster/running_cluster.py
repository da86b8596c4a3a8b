"""A running cluster: its actors, which Ray supervises and restarts, and which communicate over their own links."""

import atexit
import contextlib
import json
import logging
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple

import psutil
import ray
from ray.exceptions import RayError

from alignedserve.batches.location import SharedState
from alignedserve.cluster.actor_factory import ActorFactory, PreparedNode
from alignedserve.cluster.batch_storage import StateLock, open_batch_storage
from alignedserve.cluster.local_ray.node_watch import NodeWatch, kill_all, orphans_of
from alignedserve.cluster.local_ray.start import start_ray
from alignedserve.cluster.local_ray.worker_template import WorkerTemplate
from alignedserve.cluster.ray_polls import Starting, answer_of, kill_actors
from alignedserve.cluster.restarts import Health, ProcessState
from alignedserve.cluster.signals import signals_ignored
from alignedserve.cluster.start_observer import Patience, StartObserver
from alignedserve.cluster.watchdog import Watchdog
from alignedserve.core.errors import ModelError, NodeLost, PeerLost
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.process.addresses import is_gateway
from alignedserve.process.loading_progress import Progress, read_progress
from alignedserve.runtime.kv.arena_files import ARENA_PREFIX, arena_folder, remove_stale_arenas
from alignedserve.runtime.model.served_model import ServedModel

MODEL_FAILS = "model_fails"  # the code of a gateway's answer where waiting does not help
_TIMEOUT_S = 2.0


class NotReady(NamedTuple):
    """Why there is no token yet, as the gateway says it."""

    reason: str
    is_lasting: bool = False  # the model itself fails at every try


def ask_ready(url: str) -> NotReady | None:
    # Its own gateway, which it asks by an address that the certificate need not name; nothing secret is sent.
    unverified_context = ssl._create_unverified_context() if url.startswith("https:") else None  # noqa: S323
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=_TIMEOUT_S, context=unverified_context):  # noqa: S310
            return None
    except urllib.error.HTTPError as error:
        return _as_said(error)
    except OSError as error:
        return NotReady(f"the gateway does not answer ({error})")


def _as_said(answer: urllib.error.HTTPError) -> NotReady:
    try:
        said = json.loads(answer.read())["error"]
        return NotReady(str(said["message"]).removeprefix("Not ready: ").rstrip("."), said["code"] == MODEL_FAILS)
    except (OSError, ValueError, LookupError, TypeError):
        return NotReady(f"the gateway answers {answer.code}")


logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0  # without progress
_POLL_S = 0.1
_STOP_TIMEOUT_S = 5.0
_RAY_EXIT_S = 3.0
_ANSWER_S = 5.0


class AskedToStop(Exception):
    """Raised by a start that somewhere else was asked to end."""


class RunningCluster:
    """A started cluster. Stops everything it started on `stop`, and when used as a context manager at its end.

    `node` is this host; more are added by `add_node` and removed by `remove_node`, all on one thread at a time.
    """

    def __init__(
        self,
        node: PreparedNode,
        served: ServedModel,
        factory: ActorFactory,
        observer: StartObserver,
        template: WorkerTemplate | None = None,
    ) -> None:
        """`template`: forks the processes of this host; it ends with the cluster."""
        self.config = node.config
        self.served = served
        self.folder = node.folder
        self._node = node
        self._observer = observer
        # Those of the cluster's start share the limits of keys; None: those of the nodes that are created.
        self._first_gateways: tuple[str, ...] | None = None
        self._state = SharedState()
        self._state_lock: StateLock | None = None
        self._node_watch: NodeWatch | None = None  # of the Ray that this process has started
        self._watchdogs: dict[str, Watchdog] = {}  # by node
        self._actors: dict[str, dict[str, Any]] = {}  # by node and name
        self._factory = factory
        self._template = template
        pid = template.pid if template is not None else None
        self._children_before = {
            child for child in psutil.Process().children() if child.pid != pid
        }  # started for others

    @property
    def url(self) -> str:
        """Base URL of the first gateway."""
        host = self.config.gateway.host
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
        gateway, name = self.config.gateway, f"[{reachable}]" if ":" in reachable else reachable
        return f"{gateway.scheme}://{name}:{gateway.port}"

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
            location, self._state_lock = open_batch_storage(self.config, is_adopted=self._factory.is_adopting)
            self._state = SharedState(location, gateways)
        if not ray.is_initialized():
            processes = start_ray(self.folder, f"alignedserve-{self.folder.name}", self._template)
            self._node_watch = NodeWatch(processes, self._end_unheeded)
            self._node_watch.start()
        self._create_on(self._node, self._state, drives_batches=True)
        for node in others:
            self._create_on(node, self._state_of_others())

    def _create_on(self, node: PreparedNode, state: SharedState, *, drives_batches: bool = False) -> None:
        made: dict[str, Any] = {}
        try:
            made |= self._factory_of(node).create(node, state, drives_batches=drives_batches)
            for part in self._parts_beside(node):
                made |= self._factory_of(part).create(part, state)
        except BaseException:
            kill_actors(made.values())
            raise
        self._actors[node.share.node] = made

    def _parts_beside(self, node: PreparedNode) -> Sequence[PreparedNode]:
        return ()

    def _factory_of(self, part: PreparedNode) -> ActorFactory:
        return self._factory

    def add_node(self, node: PreparedNode) -> None:
        """Create the actors of a node that has joined. They come up by themselves, in any order."""
        # A node that comes back has its former name, and what its gateway let in still counts.
        state = replace(self._state_of_others(), have_run=True)
        self._create_on(node, state)
        self._watch(node.share.node)

    def remove_node(self, name: str) -> None:
        """Forget the actors of a lost node, and kill those that still live."""
        watchdog = self._watchdogs.pop(name, None)
        if watchdog is not None:
            watchdog.stop()
        kill_actors(self._actors.pop(name, {}).values())

    def add_worker(self, node: PreparedNode, name: str) -> None:
        """Create one more worker on a node; `node` has the new share. The worker comes up by itself."""
        of_node = node.share.node
        actor = self._actors[of_node][name] = self._factory_of(node).create_worker(node, name)
        self._watchdogs[of_node].watch(name, actor)

    def remove_worker(self, node: str, name: str) -> None:
        """End one worker of a node."""
        self._watchdogs[node].forget(name)
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actors[node].pop(name), no_restart=True)

    def add_part(self, part: PreparedNode) -> dict[str, Any]:
        """Create what a further deployment has on a node that serves; return its actors. They come up by themselves.

        Raises an error of Ray's, with none of them left.
        """
        node = part.share.node
        state = self._state if part.share.is_head else self._state_of_others()
        actors = self._factory_of(part).create(part, state)
        self._actors[node].update(actors)
        for name, actor in actors.items():
            self._watchdogs[node].watch(name, actor)
        return actors

    def take_out(self, node: str, names: Iterable[str]) -> dict[str, Any]:
        """Return those actors of a node that have these names, which are of the cluster no more and end elsewhere."""
        of_node = self._actors.get(node, {})
        found = {name: of_node.pop(name) for name in names if name in of_node}
        for name in found:
            self._watchdogs[node].forget(name)
        return found

    def actors_of(self, node: str) -> Mapping[str, Any]:
        """Return the actors of a node by name."""
        return self._actors.get(node, {})

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
            of_node[name] = self._factory_of(node).create_again(node, name, self._state, drives_batches=True)
        else:
            of_node[name] = self._factory_of(node).create_again(
                node, name, replace(self._state_of_others(), have_run=True)
            )
        self._watchdogs[node.share.node].watch(name, of_node[name])

    def actors(self) -> dict[str, Any]:
        return {name: actor for actors in self._actors.values() for name, actor in actors.items()}

    def statuses(self) -> dict[str, ClusterStatus]:
        """Return the last report of each deployment's router, from a gateway that has any; empty: none answers."""
        for name, actor in self.actors().items():
            with contextlib.suppress(PeerLost):
                found = answer_of(name, actor.cluster_statuses.remote(), _ANSWER_S) if is_gateway(name) else None
                if found:
                    return dict(found)
        return {}

    def read_again(self) -> None:
        """Let every gateway read again what may change while it serves. Does not wait."""
        for name, actor in self.actors().items():
            if is_gateway(name):
                actor.read_again.remote()

    def check(self) -> bool:
        """Look after the cluster; False: it was asked to stop. Raises NodeLost."""
        self._require_node()
        return True

    def check_start(self) -> None:
        """Raise AskedToStop when the start is to end, which a cluster of one host is told by a signal, or NodeLost."""
        self._require_node()

    def ends_at_once(self) -> bool:
        """Return whether it was asked to stop without waiting for anything; by a signal alone is not known here."""
        return False

    def progress(self) -> list[Progress | None]:
        """Return how far the workers have loaded their model."""
        names = self._actors.get(self._node.share.node, {})
        return [read_progress(self._node.book.progress_of(name)) for name in names]

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until a token has passed through the whole system.

        Raises PeerLost if none does within `timeout_s`, or within that of the last progress of a model that is loaded;
        ModelError at once for a model of a new cluster that gives no tokens; AskedToStop.
        """
        patience = self._patience(timeout_s)
        not_ready = NotReady("nothing was asked")
        while not patience.is_over():
            self.check_start()
            answer = ask_ready(self.url)
            if answer is None:
                return
            not_ready = answer
            if not_ready.is_lasting and not self._served_before():
                raise ModelError(
                    f"the model gives no answer: {not_ready.reason}; the logs are in {self.folder / 'logs'}"
                )
            time.sleep(0.05)
        raise PeerLost(
            f"the cluster was not ready within {timeout_s:.0f} s: {not_ready.reason}; "
            f"its logs are in {self.folder / 'logs'}"
        )

    def stop(self) -> None:
        """Stop every actor and Ray itself. May be repeated; never raises; ignores signals meanwhile."""
        with signals_ignored():
            self._end_everything()

    def leave(self) -> None:
        """Shut down after an internal error; whatever can run without this process keeps running.

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
        if self._state.batches is None:
            return self._state
        return replace(self._state, batches=self._state.batches.elsewhere())

    def _require_node(self) -> None:
        problem = self._node_watch.problem if self._node_watch is not None else None
        if problem is not None:
            raise NodeLost(f"{problem}; without it no process is started again")

    def _end_unheeded(self, problem: str) -> None:
        logger.critical("%s, and a call of Ray's hangs; everything is ended", problem)
        self._end_without_ray()
        os._exit(os.EX_TEMPFAIL)

    def _end_without_ray(self) -> None:
        assert self._node_watch is not None, "Ray was lost that this process has not started"
        atexit.unregister(ray.shutdown)
        kill_all([*self._started_processes(), *self._node_watch.children])
        self._close_own()
        self._remove_files()

    def _end_everything(self) -> None:
        if self._node_watch is not None:
            self._node_watch.stop()
            if self._node_watch.problem is not None:
                self._end_without_ray()
                return
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
        if self._template is not None:
            self._template.stop()
        self._actors.clear()
        self._close_own()
        _end_survivors(started)
        kill_all(orphans_of(self.folder))
        self._remove_files()

    def _remove_files(self) -> None:
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
        if self._state_lock is not None:
            self._state_lock.release()

    def _leave_ray(self) -> None:
        ray.shutdown()

    def _wait_for_actors(self) -> None:
        """Wait until every actor is up, as long as models load.

        Raises the error of the first failing one, or AskedToStop.
        """
        starting = Starting(self.actors(), self._patience(START_TIMEOUT_S))
        while not starting.is_over:
            self.check_start()
            starting.look(_POLL_S)

    def _served_before(self) -> bool:
        return False

    def _patience(self, timeout_s: float) -> Patience:
        return Patience(self.progress, timeout_s, self._observer)


def _end_survivors(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=_RAY_EXIT_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
