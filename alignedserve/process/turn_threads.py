"""Threads on which work of real-time requests goes before that of best effort; clients of a class have turns."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

ItemT = TypeVar("ItemT")


@dataclass(slots=True)
class _Own(Generic[ItemT]):
    items: deque[ItemT] = field(default_factory=deque)  # in the order in which they came
    takes_last: bool = False


class ClientTurns(Generic[ItemT]):
    """Items by client. Of one client the first comes first; `from_both_ends`: the first and the last by turns."""

    def __init__(self, *, from_both_ends: bool = False) -> None:
        self._clients: dict[str, _Own[ItemT]] = {}  # with waiting items, the next first
        self._from_both_ends = from_both_ends

    def __bool__(self) -> bool:
        return bool(self._clients)

    def __iter__(self) -> Iterator[ItemT]:
        return chain.from_iterable(client.items for client in self._clients.values())

    def append(self, client: str, item: ItemT) -> None:
        self._clients.setdefault(client, _Own()).items.append(item)

    def take(self) -> ItemT:
        """Remove and return the next item; must not be empty."""
        client = next(iter(self._clients))
        queue = self._clients.pop(client)
        item = queue.items.pop() if queue.takes_last else queue.items.popleft()
        queue.takes_last = self._from_both_ends and not queue.takes_last
        if queue.items:
            self._clients[client] = queue
        return item

    def remove(self, client: str, item: ItemT) -> None:
        queue = self._clients[client]
        queue.items.remove(item)
        if not queue.items:
            del self._clients[client]

    def clear(self) -> None:
        self._clients.clear()


_REAL_TIME_TURNS = 19  # in a row while best effort waits: it has a twentieth of them, as of the router's prompts

ResultT = TypeVar("ResultT")


class _Work(NamedTuple):
    do: Callable[[], Any]
    done: "Future[Any]"
    client: str


class TurnThreads:
    """A thread pool with a queue for each class. May be used from any thread."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._waiting: dict[bool, ClientTurns[_Work]] = {True: ClientTurns(), False: ClientTurns()}  # True: real-time
        self._num_in_a_row = 0  # real-time requests since the last best-effort turn
        self._lock = Lock()

    def submit(self, do: Callable[[], ResultT], *, is_real_time: bool = True, client: str = "") -> "Future[ResultT]":
        """Let a client's work wait for its turn, and return what comes of it. Raises RuntimeError after `close`."""
        done: Future[ResultT] = Future()
        with self._lock:
            self._threads.submit(self._work_next)
            self._waiting[is_real_time].append(client, _Work(do, done, client))
        return done

    def hasten(self, done: "Future[Any]") -> None:
        with self._lock:
            for work in self._waiting[False]:
                if work.done is done:
                    self._waiting[False].remove(work.client, work)
                    self._waiting[True].append(work.client, work)
                    return

    def close(self, *, waits: bool = True) -> None:
        """Begin no more work, and cancel what waits. `waits`: until the threads have ended. May be repeated."""
        self._threads.shutdown(wait=waits, cancel_futures=True)
        with self._lock:
            waiting = [work for works in self._waiting.values() for work in works]
            for works in self._waiting.values():
                works.clear()
        for work in waiting:
            work.done.cancel()

    # --- on a thread

    def _work_next(self) -> None:
        work = self._taken()
        if work is None or not work.done.set_running_or_notify_cancel():
            return
        try:
            result = work.do()
        except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
            work.done.set_exception(error)
        else:
            work.done.set_result(result)

    def _taken(self) -> _Work | None:
        with self._lock:
            real_time, best_effort = self._waiting[True], self._waiting[False]
            if real_time and not (best_effort and self._num_in_a_row >= _REAL_TIME_TURNS):
                self._num_in_a_row += bool(best_effort)
                return real_time.take()
            self._num_in_a_row = 0
            return best_effort.take() if best_effort else None
