"""Work on bodies and prompts that are not short, off the event loop: what streams wait for is never behind it.

Work of requests that somebody waits for goes before that of best effort, which has places of its own in each lane.
Clients have turns; where a lane is full, the latest work of whoever has most there gives its place to one who has less.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from threading import Lock
from typing import Any, TypeVar

from pydantic import BaseModel

from alignedserve.api.errors import Overloaded, ResourceUnavailable
from alignedserve.core.request import RequestClass
from alignedserve.process.turn_threads import TurnThreads

_class: ContextVar[RequestClass] = ContextVar("request_class", default=RequestClass.REAL_TIME)
_client: ContextVar[str] = ContextVar("client", default="")


def note_class(request_class: RequestClass) -> None:
    """Note of what class the request of this task is."""
    _class.set(request_class)


def is_best_effort() -> bool:
    return _class.get() is RequestClass.BEST_EFFORT


def note_client(client: str) -> None:
    """Note the client of this task: clients have turns in the lanes."""
    _client.set(client)


def client_of_task() -> str:
    return _client.get()


SHORT_LEN = 2048  # characters or bytes; work on less takes the loop less than a millisecond
LONG_LEN = 262_144
_MAX_WAITING = 64  # of real-time requests in a lane, each with up to a whole body
_MAX_BEST_EFFORT = 48  # of best effort, beside these
_SWITCH_INTERVAL_S = 0.0005
_RETRY_AFTER_S = 1.0
_TOO_MANY = "Too many long requests wait to be read."

NODE_LEN = 16  # what an object, a list, a number costs, in characters of text

ResultT = TypeVar("ResultT")


class WorkLanes:
    """Two lanes of threads: short work never waits behind long work. A third lane writes reports. Work that holds the
    interpreter's lock for long must come in pieces: the loop waits for each of them."""

    def __init__(self) -> None:
        self._middle = Lane("middle", num_threads=2)
        self._long = Lane("long", num_threads=1)
        self._reports = Lane("reports", num_threads=1)

    async def run(self, length: int, work: Callable[[], ResultT], *, is_bounded: bool = True) -> ResultT:
        """Return the result of work on this many characters or bytes; short work is done at once, on the loop.

        `is_bounded`: False: for what was computed already, or a part of what is sent, which is not thrown away. Raises
        Overloaded if it is, and what the work raises."""
        if length <= SHORT_LEN:
            return work()
        return await (self._middle if length <= LONG_LEN else self._long).run(work, is_bounded=is_bounded)

    async def report(self, work: Callable[[], ResultT]) -> ResultT:
        """Return the result of work that waits for no request's, such as the text of metrics: scrapes give up soon."""
        return await self._reports.run(work, is_bounded=False)

    def close(self) -> None:
        """Let the threads end after the work that they do now. May be repeated."""
        for lane in (self._middle, self._long, self._reports):
            lane.close()


class Lane:
    """Threads with bounded queues, one for each class."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._threads = TurnThreads(num_threads, f"work-{name}")
        self._open: dict[bool, dict[str, list[Future[Any]]]] = {True: {}, False: {}}  # of best effort or not, by client
        self._lock = Lock()

    async def run(self, work: Callable[[], ResultT], *, is_bounded: bool = True) -> ResultT:
        """Return the result of the work, done on a thread in its turn. Raises Overloaded if it is bounded; of best
        effort ResourceUnavailable."""
        is_last, client = is_best_effort(), client_of_task()
        if is_bounded:
            future = self._submitted(work, is_last, client)
        else:
            future = self._threads.submit(work, is_real_time=not is_last, client=client)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise _too_many(is_last) from None  # its place was given to another client, or the lane was closed

    def close(self, *, waits: bool = False) -> None:
        """`waits`: until its threads have ended."""
        self._threads.close(waits=waits)

    def num_open(self, *, is_best_effort: bool) -> int:
        """Return how much bounded work of a class waits or is in hand."""
        return sum(map(len, self._open[is_best_effort].values()))

    def _submitted(self, work: Callable[[], ResultT], is_last: bool, client: str) -> "Future[ResultT]":
        by_client = self._open[is_last]
        while True:
            with self._lock:
                if self.num_open(is_best_effort=is_last) < (_MAX_BEST_EFFORT if is_last else _MAX_WAITING):
                    future = self._threads.submit(work, is_real_time=not is_last, client=client)
                    by_client.setdefault(client, []).append(future)
                    break
                most = max(by_client.values(), key=len)
                latest = most[-1] if len(by_client.get(client, ())) + 1 < len(most) else None
            if latest is None or not latest.cancel():
                raise _too_many(is_last)
        # Not when the waiting ends: work of a client that left goes on.
        future.add_done_callback(lambda _: self._leave(future, is_last, client))
        return future

    def _leave(self, future: "Future[Any]", is_last: bool, client: str) -> None:
        with self._lock:
            futures = self._open[is_last][client]
            futures.remove(future)
            if not futures:
                del self._open[is_last][client]


def _too_many(is_last: bool) -> Exception:
    kind = ResourceUnavailable if is_last else Overloaded
    return kind(_TOO_MANY, retry_after_s=_RETRY_AFTER_S)


def rough_length(value: Any) -> int:
    """Estimate the length of parsed JSON or of schemas in characters, only until they are known to be long."""
    length, rest = 0, [value]
    while rest and length <= LONG_LEN:
        item = rest.pop()
        if isinstance(item, str):
            length += len(item)
            continue
        length += NODE_LEN
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
