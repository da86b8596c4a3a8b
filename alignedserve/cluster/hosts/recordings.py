"""Copies what other nodes record into the folder of the run, on the head, while it is written.

Each node's processes record into its private folder. Its part of the run is a folder of its own beside RUN_FILE, named
by the node and by how many nodes had come before; the next driver goes on with it. The last second of a lost node is
lost.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from alignedserve.cluster.nodes.members import Member
from alignedserve.cluster.recording_folder import MAX_PART_BYTES, is_name
from alignedserve.disk.durable import open_private
from alignedserve.process.recording import PART_FILE, RecordedPart

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_ANSWER_S = 5.0
_NUM_ASKED = 5  # for a node's clock: the answer that took the least time counts
_FINISH_S = 20.0  # for what is left at the end, of all nodes together: a driver that stops may not take for ever

Ask = Callable[..., Any]  # a method of a agent by its name, with its arguments; raises RayError or TimeoutError


class RecordedNode:
    """The part of one node. Used by one thread at a time."""

    def __init__(self, ask: Ask, folder: Path, part: RecordedPart) -> None:
        """Create the folder, or go on with it. Raises OSError, and what `ask` raises."""
        self._ask = ask
        self._folder = folder
        self._part = part
        self.lock = threading.Lock()
        folder.mkdir(mode=0o700, exist_ok=True)
        self._note(is_whole=False)

    def copy(self, ends_s: float) -> bool:
        """Copy what has been written since; return whether that was all. Raises OSError, and what `ask` raises."""
        for name, size in self._ask("recordings").items():
            if not is_name(name):
                continue
            with open(self._folder / name, "ab", opener=open_private) as file:
                while file.tell() < size:
                    if time.monotonic() > ends_s:
                        return False
                    content: bytes = self._ask("read_recording", name, file.tell())
                    if not 0 < len(content) <= MAX_PART_BYTES:
                        return False
                    file.write(content)
        return True

    def finish(self, ends_s: float) -> None:
        """Copy the rest, after which the node needs it no more. Raises as `copy`."""
        if self.copy(ends_s):
            self._note(is_whole=True)
            self._ask("remove_recordings")

    def _note(self, *, is_whole: bool) -> None:
        content = msgspec.json.encode(msgspec.structs.replace(self._part, is_whole=is_whole))
        written = self._folder / f"{PART_FILE}.new"  # a driver that ends meanwhile leaves the former one
        with open(written, "wb", opener=open_private) as file:
            file.write(content)
        written.replace(self._folder / PART_FILE)


class Recordings:
    """The recorded parts of one cluster's nodes."""

    def __init__(self, folder: str | None) -> None:
        self._folder = Path(folder) if folder is not None else None
        self._nodes: dict[str, RecordedNode] = {}  # by the names of the nodes
        self._unfollowed: dict[str, Member] = {}  # nodes that did not answer; asked again every second
        self._changing = threading.Lock()  # of both, each replaced as a whole, as others read them meanwhile
        self._uncopied: set[str] = set()  # nodes of which it was said that they cannot be copied now
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recordings", daemon=True)
        if folder is not None:
            self._thread.start()

    def follow(self, member: Member) -> None:
        if self._folder is None or member.prepared.share.is_head:
            return
        try:
            node = _recorded_node(self._folder, member)
        except (RayError, TimeoutError, OSError) as error:
            logger.warning("what %s records cannot be copied now: %s", member.ray_node, error)
            with self._changing:
                self._unfollowed = {**self._unfollowed, member.name: member}
            return
        with self._changing:
            self._nodes = {**self._nodes, member.name: node}

    def _follow_again(self, folder: Path) -> None:
        for name, member in self._unfollowed.items():
            try:
                node = _recorded_node(folder, member)
            except (RayError, TimeoutError, OSError):
                continue
            with self._changing:
                if self._unfollowed.get(name) is not member:
                    continue  # lost meanwhile
                self._unfollowed = {other: member for other, member in self._unfollowed.items() if other != name}
                self._nodes = {**self._nodes, name: node}
            logger.info("what %s records is copied", member.ray_node)

    def forget(self, node: str) -> None:
        with self._changing:
            self._nodes = {name: recorded for name, recorded in self._nodes.items() if name != node}
            self._unfollowed = {name: member for name, member in self._unfollowed.items() if name != node}

    def finish(self, node: str) -> None:
        self._finish(node, time.monotonic() + _FINISH_S)

    def close(self, *, is_end: bool) -> None:
        """Copy no more; at the end of the run after the rest of all nodes. May be repeated."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join(_ANSWER_S)
        ends_s = time.monotonic() + _FINISH_S
        for node in self._nodes if is_end else ():
            self._finish(node, ends_s)
        self._nodes = {}

    def _finish(self, node: str, ends_s: float) -> None:
        recorded = self._nodes.get(node)
        self.forget(node)
        if recorded is not None:
            self._perform(node, recorded.lock, partial(recorded.finish, ends_s))

    def _run(self) -> None:
        while not self._is_closing.wait(_PERIOD_S):
            if self._folder is not None:
                self._follow_again(self._folder)
            for node, recorded in self._nodes.items():
                self._perform(node, recorded.lock, partial(recorded.copy, time.monotonic() + _PERIOD_S))

    def _perform(self, node: str, lock: threading.Lock, copy: Callable[[], object]) -> None:
        try:
            with lock:
                copy()
        except OSError as error:  # TimeoutError is one: a agent that is busy
            if node not in self._uncopied:  # said once, and not every second, of a disk that is full
                logger.warning("what %s records cannot be copied now: %s", node, error)
            self._uncopied.add(node)
        except (RayError, ValueError):  # its node is lost, of which others say more
            logger.debug("what %s records cannot be copied now", node, exc_info=True)
        else:
            self._uncopied.discard(node)


def _recorded_node(folder: Path, member: Member) -> RecordedNode:
    def ask(method: str, *arguments: object) -> Any:
        return ray.get(getattr(member.agent.actor, method).remote(*arguments), timeout=_ANSWER_S)

    node, number = member.ray_node, member.prepared.folder.name.rpartition("-")[2]
    part = RecordedPart(
        node=member.name,
        hostname=node.hostname,
        address=node.address,
        clock_ahead_s=clock_ahead_s(lambda: ask("clock_s")),
        is_whole=False,
    )
    return RecordedNode(ask, folder / f"{member.name}.{number}", part)


def clock_ahead_s(ask: Callable[[], float]) -> float:
    measured = []
    for _ in range(_NUM_ASKED):
        asked_s = time.monotonic()
        theirs_s = ask()
        answered_s = time.monotonic()
        measured.append((answered_s - asked_s, (asked_s + answered_s) / 2 - theirs_s))
    return min(measured)[1]
