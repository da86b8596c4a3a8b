"""Lets the workers of a machine share a device: documents give way to chats, and keep a share of the time.

Each worker has a slot on a board, a small file in shared memory. From the arrival of a chat until its end, a worker
posts a time there until which other workers give way. A worker that computes for documents alone stands still as long
as another model's post holds, before its iteration and, where its engine can, between two layers. Prompts of chats of
the same model hold it as well, where the model's workers have more threads than the machine has cores. Documents keep a
share of the time: what they may stand still is in proportion to what they have computed. Posts of a process that dies
expire by themselves, and so does its claim to the slot, a lock."""

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from alignedserve.disk.durable import open_private
from alignedserve.runtime.device.cores import num_cores

_NUM_SLOTS = 64
_SLOT = np.dtype([("until_s", "<f8"), ("prompt_until_s", "<f8"), ("deployment", "<u4"), ("num_threads", "<u4")])
_POSTED_S = 2.0  # for which an iteration may last unseen; a post of a process that died is as old at most
_BETWEEN_S = 0.02  # from one iteration to the next
_LOOK_S = 0.001
_LOCK = struct.Struct("hhqqi4x")  # the system's record of a lock: of this opened file, not of the process
_MAX_WAIT_S = 2.0


class DeviceBoard:
    """The board of one device, with a slot of this process."""

    def __init__(self, path: Path, deployment_id: str, num_threads: int = 0) -> None:
        """`path`: of the board, made by the first worker. Without a free slot nothing is posted, and posts are seen.

        `num_threads`: that its worker computes with, on cores; 0: on a device of another kind."""
        self._file = open_private(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._file, _NUM_SLOTS * _SLOT.itemsize)
        self._memory = mmap.mmap(self._file, _NUM_SLOTS * _SLOT.itemsize)
        self._slots = np.frombuffer(self._memory, _SLOT)
        self._deployment, self._num_threads = zlib.crc32(deployment_id.encode()), num_threads
        self._num_cores = num_cores()
        self._own = self._claim()

    def post(self, until_s: float, *, is_prompt: bool = False) -> None:
        """Ask others to give way until then, by the system's monotonic clock; 0.0: no more.

        `is_prompt`: workers of the same model too, where threads want more cores than there are."""
        if self._own is not None:
            self._slots["prompt_until_s"][self._own] = until_s if is_prompt else 0.0
            self._slots["until_s"][self._own] = until_s

    def is_posted(self, now: float) -> bool:
        slots = self._slots
        is_like = slots["deployment"] == self._deployment
        if ((slots["until_s"] > now) & ~is_like).any():
            return True
        if int(slots["num_threads"][is_like].sum()) <= self._num_cores:
            return False
        asking = slots["prompt_until_s"] > now
        if self._own is not None:
            asking[self._own] = False
        return bool((asking & is_like).any())

    def close(self) -> None:
        slot, self._own = self._own, None
        if slot is not None:
            self._slots[slot] = (0.0, 0.0, self._deployment, 0)
        del self._slots
        self._memory.close()
        os.close(self._file)

    def _claim(self) -> int | None:
        for index in range(_NUM_SLOTS):
            try:
                lock = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)
            except OSError:
                continue
            self._slots[index] = (0.0, 0.0, self._deployment, self._num_threads)
            return index
        return None


class SharedDevice:
    """A worker's conduct on a device that others use too. For its compute thread, except `on_arrival`."""

    def __init__(self, board: DeviceBoard, best_effort_share: float) -> None:
        """`best_effort_share`: of the time, that iterations without a person waiting keep at least."""
        self._board = board
        self._patience = 1.0 / best_effort_share - 1.0  # seconds of standing still for each of computing
        self._credit_s = 0.0  # for which they may stand still now
        self._computes_since_s: float | None = None  # start of a best-effort iteration; None: none is in progress
        self._may_stop = True  # between layers
        self._stopped_s = 0.0
        self._has_arrival = threading.Event()

    @classmethod
    def of(
        cls, folder: Path, device: str, deployment_id: str, best_effort_share: float, num_threads: int = 0
    ) -> "SharedDevice | None":
        """Return the conduct of a worker of this deployment; None: it gives way to none.

        `folder`: private, of the cluster on this host. `device`: as torch spells it. `num_threads`: see DeviceBoard."""
        if best_effort_share >= 1.0:
            return None
        board = DeviceBoard(folder / f"turns-{device.replace(':', '-')}", deployment_id, num_threads)
        return cls(board, best_effort_share)

    def on_arrival(self) -> None:
        """Ask others to give way to a chat that has just come, and end an own wait. From any thread."""
        self._board.post(time.monotonic() + _POSTED_S, is_prompt=True)
        self._has_arrival.set()

    def is_alone(self) -> bool:
        return not self._board.is_posted(time.monotonic())

    def begin(self, *, is_real_time: bool, has_prompt: bool = False, may_stop: bool = True) -> None:
        """Begin an iteration, which gives way first if it is for documents alone (not `is_real_time`).

        `has_prompt`: of a chat. `may_stop`: an iteration for documents alone, between its layers."""
        if is_real_time:
            self._has_arrival.clear()
            self._board.post(time.monotonic() + _POSTED_S, is_prompt=has_prompt)
            return
        self._give_way()
        self._has_arrival.clear()  # not before: what arrived since the last iteration began waits behind this one
        self._computes_since_s, self._may_stop = time.monotonic(), may_stop

    def between_layers(self) -> None:
        can_stop = self._computes_since_s is not None and self._may_stop
        if not can_stop or not self._board.is_posted(began_s := time.monotonic()):
            return
        self._earn(began_s)
        self._give_way()
        self._computes_since_s = time.monotonic()
        self._stopped_s += self._computes_since_s - began_s

    def take_stopped_s(self) -> float:
        stopped_s, self._stopped_s = self._stopped_s, 0.0
        return stopped_s

    @contextlib.contextmanager
    def taken_within(self) -> Iterator[None]:
        now, is_best_effort = time.monotonic(), self._computes_since_s is not None
        self._earn(now)
        self._board.post(now + _POSTED_S, is_prompt=True)
        try:
            yield
        finally:
            now = time.monotonic()
            self._board.post(now + (_BETWEEN_S if is_best_effort else _POSTED_S))
            self._computes_since_s = now if is_best_effort else None

    def end(self, *, is_real_time: bool) -> None:
        now = time.monotonic()
        if is_real_time:
            self._board.post(now + _BETWEEN_S)
        self._earn(now)

    def close(self) -> None:
        self._board.close()

    def _earn(self, now: float) -> None:
        if self._computes_since_s is not None:
            earned_s = self._patience * (now - self._computes_since_s)
            self._credit_s = min(self._credit_s + earned_s, _MAX_WAIT_S)
        self._computes_since_s = None

    def _give_way(self) -> None:
        began_s = now = time.monotonic()
        ends_s = began_s + self._credit_s
        while now < ends_s and self._board.is_posted(now) and not self._has_arrival.wait(_LOOK_S):
            now = time.monotonic()
        self._credit_s -= min(now - began_s, self._credit_s)
