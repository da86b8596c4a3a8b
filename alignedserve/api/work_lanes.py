"""Work on bodies and prompts that are not short, off the event loop: what streams wait for is never behind it."""

import asyncio
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

from pydantic import BaseModel

from alignedserve.api.errors import Overloaded

SHORT_LEN = 2048  # characters or bytes; work on less takes the loop less than a millisecond
LONG_LEN = 262_144
_MAX_WAITING = 64  # of a lane, each with up to a whole body
_SWITCH_INTERVAL_S = 0.0005
_RETRY_AFTER_S = 1.0

_NODE_LEN = 16  # what an object, a list, a number costs, in characters of text

ResultT = TypeVar("ResultT")


class WorkLanes:
    """Two lanes of threads, so that nothing waits behind what is much longer than itself.

    Work that holds the interpreter's lock for long must come in pieces: the loop waits for each of them.
    """

    def __init__(self) -> None:
        self._middle = Lane("middle", num_threads=2)
        self._long = Lane("long", num_threads=1)

    async def run(self, length: int, work: Callable[[], ResultT]) -> ResultT:
        """Return the result of work on this many characters or bytes; short work is done at once, on the loop.

        Raises Overloaded, and what the work raises.
        """
        if length <= SHORT_LEN:
            return work()
        return await (self._middle if length <= LONG_LEN else self._long).run(work)

    def close(self) -> None:
        """Let the threads end after the work that they do now. May be repeated."""
        self._middle.close()
        self._long.close()


class Lane:
    """A thread pool with a bounded queue."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, f"work-{name}")
        self._num_open = 0
        self._lock = Lock()

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Return the result of the work, done on a thread in its turn. Raises Overloaded."""
        with self._lock:
            if self._num_open >= _MAX_WAITING:
                raise Overloaded("Too many long requests wait to be read.", retry_after_s=_RETRY_AFTER_S)
            self._num_open += 1
        future = self._threads.submit(work)
        future.add_done_callback(self._leave)  # not when the waiting ends: work of a client that left goes on
        return await asyncio.wrap_future(future)

    def close(self, *, waits: bool = False) -> None:
        """See WorkLanes. `waits`: until its threads have ended."""
        self._threads.shutdown(wait=waits, cancel_futures=True)

    def _leave(self, _: object) -> None:
        with self._lock:
            self._num_open -= 1


def rough_length(value: Any) -> int:
    """Estimate the length of parsed JSON or of schemas in characters, only until they are known to be long."""
    length, rest = 0, [value]
    while rest and length <= LONG_LEN:
        item = rest.pop()
        if isinstance(item, str):
            length += len(item)
            continue
        length += _NODE_LEN
        if isinstance(item, BaseModel):
            rest += vars(item).values()
        elif isinstance(item, Mapping):
            rest += item.values()
        elif isinstance(item, list | tuple):
            rest += item
    return length


def favour_the_loop() -> None:
    """Let the loop's thread have the interpreter back from the lanes' within half a millisecond; 5 are usual."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
