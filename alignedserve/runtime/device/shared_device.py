"""Lets the workers of several models share a device by objective: work that nobody waits for gives way, but never ends.

Each worker has a slot on a board, a small file in shared memory. While it computes for a person who waits it posts a
time there until which others are to give way. A worker whose next iteration is for documents alone waits as long as
another model's post holds, for a bounded time, so that documents keep a share of the device. Posts of a process that
dies expire by themselves, and so does its claim to the slot, which is a lock.
"""

import fcntl
import mmap
import os
import struct
import threading
import time
import zlib
from pathlib import Path

import numpy as np

_NUM_SLOTS = 64
_SLOT = np.dtype([("until_s", "<f8"), ("deployment", "<u4"), ("unused", "<u4")])
_POSTED_S = 2.0  # for which an iteration may last unseen; a post of a process that died is as old at most
_BETWEEN_S = 0.02  # from one iteration to the next
_LOOK_S = 0.001
_LOCK = struct.Struct("hhqqi4x")  # the system's record of a lock: of this opened file, not of the process
_MAX_WAIT_S = 2.0


class DeviceBoard:
    """The board of one device, with a slot of this process."""

    def __init__(self, path: Path, deployment_id: str) -> None:
        """`path`: of the board, made by the first worker. Without a free slot nothing is posted, and posts are seen."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.ftruncate(self._file, _NUM_SLOTS * _SLOT.itemsize)
        self._memory = mmap.mmap(self._file, _NUM_SLOTS * _SLOT.itemsize)
        self._slots = np.frombuffer(self._memory, _SLOT)
        self._deployment = zlib.crc32(deployment_id.encode())
        self._own = self._claim()

    def post(self, until_s: float) -> None:
        """Ask others to give way until then, by the system's monotonic clock; 0.0: no more."""
        if self._own is not None:
            self._slots["until_s"][self._own] = until_s

    def is_posted(self, now: float) -> bool:
        """Return whether a worker of another model asks to give way."""
        others = self._slots["deployment"] != self._deployment
        return bool(((self._slots["until_s"] > now) & others).any())

    def close(self) -> None:
        """Give the slot back."""
        self.post(0.0)
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
            self._slots["until_s"][index] = 0.0
            self._slots["deployment"][index] = self._deployment
            return index
        return None


class SharedDevice:
    """A worker's conduct on a device that other models use too. For its compute thread, except `on_arrival`."""

    def __init__(self, board: DeviceBoard, best_effort_share: float) -> None:
        """`best_effort_share`: of the time, that iterations without a person waiting keep at least."""
        self._board = board
        self._patience = 1.0 / best_effort_share - 1.0  # seconds of waiting for each of computing
        self._last_s = 0.0  # how long the last such iteration took
        self._began_s = 0.0
        self._has_arrival = threading.Event()

    @classmethod
    def of(cls, folder: Path, device: str, deployment_id: str, best_effort_share: float) -> "SharedDevice | None":
        """Return the conduct of a worker of this deployment; None: its model gives way to none.

        `folder`: private, of the cluster on this host. `device`: as torch spells it.
        """
        if best_effort_share >= 1.0:
            return None
        return cls(DeviceBoard(folder / f"turns-{device.replace(':', '-')}", deployment_id), best_effort_share)

    def on_arrival(self) -> None:
        """End a wait: there is a request now that somebody waits for. From any thread."""
        self._has_arrival.set()

    def is_alone(self) -> bool:
        """Return whether no worker of another model asks to give way."""
        return not self._board.is_posted(time.monotonic())

    def begin(self, *, is_real_time: bool) -> None:
        """Begin an iteration, after giving way if it is for nobody who waits."""
        self._began_s = time.monotonic()
        if is_real_time:
            self._has_arrival.clear()
            self._board.post(self._began_s + _POSTED_S)
            return
        ends_s = self._began_s + min(self._last_s * self._patience, _MAX_WAIT_S)
        while self._board.is_posted(now := time.monotonic()) and now < ends_s and not self._has_arrival.wait(_LOOK_S):
            pass
        self._has_arrival.clear()  # not before: what arrived since the last iteration began waits behind this one
        self._began_s = time.monotonic()

    def end(self, *, is_real_time: bool) -> None:
        """End an iteration."""
        now = time.monotonic()
        if is_real_time:
            self._board.post(now + _BETWEEN_S)
        else:
            self._last_s = now - self._began_s

    def close(self) -> None:
        """Leave the board."""
        self._board.close()
