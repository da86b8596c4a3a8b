"""Lists of blocks to page-locked host memory and back, against one plain copy of as many bytes.

On a GPU both go on streams of their own, as a worker's offload and prefetch do.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alignedserve.runtime.device.accelerator import use_device
from alignedserve.runtime.device.streams import DeviceStreams, Event
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.staged_copies import StagedCopies, exact_codec
from benchmarks.measuring.turns import medians_by_turns

OFFLOAD, PREFETCH = "offload", "prefetch"


class PinnedSpeed(NamedTuple):
    """Seconds of one direction, medians."""

    lists_s: float
    plain_s: float


class PinnedLists:
    """The same list of blocks in each direction, again and again."""

    def __init__(
        self,
        storage: BlockStorage,
        streams: DeviceStreams,
        outwards: npt.NDArray[np.int64],
        inwards: npt.NDArray[np.int64],
        *,
        is_listed: bool = False,
    ) -> None:
        """Both lists are equally long; their blocks are used by nothing else, and the inward ones are overwritten.

        `is_listed`: by one call of the driver, where it has that; otherwise gathered on the device first.
        """
        least = 0 if is_listed else None
        self._storage_bytes = storage.bytes
        self._ids = {OFFLOAD: outwards, PREFETCH: inwards}
        self._streams = {name: streams.stream(name) for name in self._ids}
        self._copies = {
            name: StagedCopies(exact_codec(storage.bytes), stream, storage.accelerator, least_listed_bytes=least)
            for name, stream in self._streams.items()
        }
        self._rows = {name: copies.pinned(len(self._ids[name])) for name, copies in self._copies.items()}
        self.device = storage.device
        self.num_bytes = self._rows[OFFLOAD].numel()

    def begin(self, name: str) -> Event:
        if name == OFFLOAD:
            self._copies[name].copy_out(self._ids[name], self._rows[name])
        else:
            self._copies[name].copy_in(self._rows[name], self._ids[name])
        return self._streams[name].record()

    def measure(self, name: str, num_rounds: int) -> PinnedSpeed:
        seconds = medians_by_turns(num_rounds, _awaited(lambda: self.begin(name)), _awaited(lambda: self._plain(name)))
        return PinnedSpeed(*seconds)

    def _plain(self, name: str) -> Event:
        rows, stream = self._rows[name], self._streams[name]
        first = int(min(ids.min() for ids in self._ids.values()))
        there = self._storage_bytes[first : first + len(rows)]
        if name == OFFLOAD:
            stream.copy_out(there, rows)
        else:
            stream.copy_in(rows, there)
        return stream.record()


class BackgroundCopies:
    """Offload and prefetch that go on beside something else, by a thread of their own, within a `with`."""

    def __init__(self, lists: PinnedLists, *, num_ahead: int) -> None:
        """`num_ahead`: lists of each direction that wait on its stream at any time."""
        self.num_copied = 0  # lists
        self._lists = lists
        self._num_ahead = num_ahead
        self._pending: dict[str, deque[Event]] = {OFFLOAD: deque(), PREFETCH: deque()}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> "BackgroundCopies":
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _go_on(self) -> None:
        use_device(self._lists.device)
        while not self._is_over.is_set():
            for name, pending in self._pending.items():
                while len(pending) < self._num_ahead:
                    pending.append(self._lists.begin(name))
            for pending in self._pending.values():
                pending.popleft().synchronize()
                self.num_copied += 1
        for pending in self._pending.values():
            while pending:
                pending.popleft().synchronize()


def _awaited(begin: Callable[[], Event]) -> Callable[[], None]:
    return lambda: begin().synchronize()


def lists_at_the_end(storage: BlockStorage, num_blocks: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    assert 2 * num_blocks <= storage.num_blocks, "fewer blocks than are listed"
    ids = np.arange(storage.num_blocks - 2 * num_blocks, storage.num_blocks)
    np.random.default_rng(0).shuffle(ids)
    return ids[:num_blocks].copy(), ids[num_blocks:].copy()
