"""The node agent: its private folder, its logs, and what is left behind when its processes are killed."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray.exceptions import RayError

from alignedserve.cluster import recording_folder
from alignedserve.cluster.hosts.ray_directory import NAMESPACE
from alignedserve.cluster.hosts.record import ClusterRecord, remove_record
from alignedserve.cluster.nodes.ray_nodes import release, release_former
from alignedserve.cluster.ray_node import answer_or_none, kill_actors
from alignedserve.cluster.run_folder import make_run_folder, remove_files
from alignedserve.cluster.sweeper import start_sweeper
from alignedserve.core.errors import AdapterError, AlignedServeError, ResourceError
from alignedserve.process.loading_progress import PROGRESS_SUFFIX, LoadedShare, read_progress
from alignedserve.process.logs import LogPart, read_log
from alignedserve.runtime.kv.arena_files import ARENA_PREFIX, arena_folder, remove_stale_arenas
from alignedserve.runtime.lora.loaded_adapters import AdapterChange, exchange, loaded_file

_WATCH_S = 1.0
_END_S = 3.0
_UNUSED_S = 600.0  # a driver examines slow nodes before the first handover


class KeptState(NamedTuple):
    """State that a driver handed over, and how long ago it last did."""

    number: int
    state: bytes
    age_s: float


class NodeAgent:
    """Started by Ray before the other actors of its node."""

    def __init__(self, folder_name: str) -> None:
        self._kept: KeptState | None = None
        self._actors: list[Any] = []
        self._heard_s, self._patience_s = time.monotonic(), _UNUSED_S
        self._failure: AlignedServeError | None = None
        self._folder = Path()
        try:
            remove_stale_arenas(arena_folder(), ARENA_PREFIX)
            self._folder = make_run_folder(folder_name)
            start_sweeper(self._folder, raylet_pid=os.getppid())
        except AlignedServeError as error:
            self._failure = error
        threading.Thread(target=self._watch, name="orphans", daemon=True).start()

    def failure(self) -> AlignedServeError | None:
        return self._failure

    def folder(self) -> Path:
        return self._folder

    @property
    def _recordings(self) -> Path:
        return recording_folder.parts_folder(self._folder)

    def read_log(self, name: str, offset: int) -> LogPart | None:
        return read_log(self._folder, name, offset)

    def recordings(self) -> dict[str, int]:
        return recording_folder.sizes(self._recordings)

    def read_recording(self, name: str, offset: int) -> bytes:
        return recording_folder.read_part(self._recordings, name, offset)

    def remove_recordings(self) -> None:
        recording_folder.remove(self._recordings)

    def clock_s(self) -> float:
        return time.monotonic()

    def available_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def remove_files(self, names: Sequence[str]) -> bool:
        """Remove what these processes have left, which have ended; return whether nothing is held any more."""
        return remove_files(self._folder, names)

    def exchange_adapters(
        self, others: Mapping[str, tuple[AdapterChange, ...]]
    ) -> dict[str, tuple[AdapterChange, ...]]:
        """Take what was loaded on other nodes, by deployment; return what is known here then."""
        known = {}
        for deployment_id, changes in others.items():
            with contextlib.suppress(AdapterError, OSError):
                known[deployment_id] = exchange(loaded_file(self._folder, deployment_id), changes)
        return known

    def progress(self) -> list[LoadedShare | None]:
        return [read_progress(path) for path in sorted(self._folder.glob(f"*{PROGRESS_SUFFIX}"))]

    def keep(self, number: int, state: bytes, actors: list[Any], patience_s: float) -> None:
        """Keep a driver's state for the next one, unless a later one is here. After `patience_s` without a driver the
        agent ends these actors and itself."""
        self._heard_s = time.monotonic()
        if self._kept is None or number >= self._kept.number:
            self._kept = KeptState(number, state, 0.0)
            self._actors, self._patience_s = actors, patience_s

    def hear(self, number: int) -> bool:
        """Note that the driver lives; return whether the state that it handed over last is here."""
        self._heard_s = time.monotonic()
        return self._kept is not None and self._kept.number == number

    def kept(self) -> KeptState | None:
        age_s = time.monotonic() - self._heard_s
        return self._kept._replace(age_s=age_s) if self._kept is not None else None

    def _watch(self) -> None:
        while time.monotonic() - self._heard_s < self._patience_s:
            time.sleep(_WATCH_S)
        end_actors(self._actors)
        releasing = threading.Thread(target=release, args=(self._folder.name,), daemon=True)  # asks Ray's head
        releasing.start()
        releasing.join(_END_S)
        end_actors([_own_handle()])

    def stop(self) -> None:
        """Do nothing: the sweeper works when this process has ended."""


NodeActor: Any = ray.remote(NodeAgent)


def _own_handle() -> Any:
    return ray.get_runtime_context().current_actor


def end_actors(actors: Sequence[Any]) -> None:
    stopped = [actor.stop.remote() for actor in actors]
    ended = [actor.__ray_terminate__.remote() for actor in actors]  # after what each was asked before
    with contextlib.suppress(RayError, ValueError):
        ray.wait([*stopped, *ended], num_returns=len(stopped) + len(ended), timeout=_END_S)


logger = logging.getLogger(__name__)

SILENT_S = 4.0  # after which a driver that hands over every second has ended
_ANSWER_S = 10.0
_POLL_S = 0.5
_PATIENCE_S = 15.0  # with processes that do not end


def end_cluster(record: ClusterRecord) -> None:
    """End all processes of a recorded cluster without a driver. Raises ResourceError when they do not end."""
    actors = [actor.name for node in record.nodes for actor in node.actors]  # the driver's name is no actor's
    end_by_name([*actors, *(node.agent for node in record.nodes if node.agent)])
    release_former()
    remove_record(record.cluster_id)


def has_driver(record: ClusterRecord) -> bool:
    copies = kept_by([node.agent for node in record.nodes if node.agent])
    return any(copy.age_s < SILENT_S for copy in copies)


def kept_by(agents: Sequence[str]) -> list[KeptState]:
    calls: list[Any] = []
    for name in agents:
        try:
            calls.append(ray.get_actor(name, NAMESPACE).kept.remote())
        except ValueError:
            logger.info("%s is gone", name)
    answered, _ = ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_S) if calls else ([], [])
    answers = (answer_or_none(reference) for reference in answered)
    return [answer for answer in answers if answer is not None]  # some nodes may be gone


def end_by_name(names: Sequence[str]) -> None:
    """End all actors with these names, and wait until others may have the names. Raises ResourceError."""
    ends_s = time.monotonic() + _PATIENCE_S
    while left := [actor for name in names if (actor := actor_called(name)) is not None]:
        if time.monotonic() > ends_s:
            raise ResourceError(f"{len(left)} processes of a former cluster do not end; see `ray list actors`")
        kill_actors(left)
        time.sleep(_POLL_S)


def actor_called(name: str) -> Any:
    """Return the named actor; None: there is none."""
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None
