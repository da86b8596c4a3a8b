"""Threads on which work of real-time requests goes before that of best effort; clients of a class have turns."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from alignedserve.process.client_turns import ClientTurns

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
        self._num_in_a_row = 0  # real-time ones that went before best effort that waited
        self._lock = Lock()

    def submit(self, do: Callable[[], ResultT], *, is_real_time: bool = True, client: str = "") -> "Future[ResultT]":
        """Let a client's work wait for its turn, and return what comes of it. Raises RuntimeError after `close`."""
        done: Future[ResultT] = Future()
        with self._lock:
            self._threads.submit(self._work_next)
            self._waiting[is_real_time].append(client, _Work(do, done, client))
        return done

    def hasten(self, done: "Future[Any]") -> None:
        """Let best-effort work that still waits go with that of real-time requests, as one needs it too."""
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
