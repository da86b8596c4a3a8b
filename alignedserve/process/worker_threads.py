"""A worker's threads: each runs its work in order and reports results to the event loop."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

_NICENESS = 10  # a tenth of the processor's time beside a thread of the usual priority, all of it on an idle core

T = TypeVar("T")


class WorkerThreads:
    """Threads by name, created on first use. `submit` returns at once; callbacks run on the loop that called it."""

    def __init__(self, initialize: Callable[[], object] | None = None) -> None:
        """`initialize`: called first on each thread."""
        self._initialize = initialize
        self._executors: dict[str, ThreadPoolExecutor] = {}
        self._lock = Lock()
        self._is_closed = False

    def submit(self, name: str, work: Callable[[], T], on_completed: Callable[[T], None]) -> None:
        """Run the work on this thread; without asyncio futures, which cost a tenth of an iteration's gap. Exceptions of
        the work are raised on the loop, where they end a hosted process."""
        self._thread(name).submit(self.performer(work, on_completed))

    def call(self, name: str, work: Callable[[], T]) -> "Future[T]":
        """Run the work on this thread, in its turn; from any thread."""
        return self._thread(name).submit(work)

    def end(self, name: str) -> None:
        """End a thread after its pending work; later work of the name gets a new thread."""
        with self._lock:
            executor = self._executors.pop(name, None)
        if executor is not None:
            executor.shutdown(wait=False)

    def _thread(self, name: str) -> ThreadPoolExecutor:
        with self._lock:
            executor = self._executors.get(name)
            if executor is None:
                executor = self._executors[name] = ThreadPoolExecutor(1, name, self._initialize)
            return executor

    def performer(self, work: Callable[[], T], on_completed: Callable[[T], None]) -> Callable[[], object]:
        """Return a function that runs the work on its caller's thread and reports like `submit`."""
        loop = asyncio.get_running_loop()

        def deliver(outcome: Callable[[], T]) -> None:
            if not self._is_closed:
                on_completed(outcome())

        return lambda: loop.call_soon_threadsafe(deliver, _outcome_of(work))

    def close(self) -> None:
        """Wait for the threads to end; pending work is cancelled without a callback."""
        self._is_closed = True
        for executor in self._executors.values():
            executor.shutdown(cancel_futures=True)


def _outcome_of(work: Callable[[], T]) -> Callable[[], T]:
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001  (raised again by the caller of the outcome)
        future.set_exception(error)
    return future.result


def run_quietly(work: Callable[[], T]) -> T:
    """Run work on a thread of low priority, which ends with it, and return its result. Raises what it raises. Threads
    that it starts inherit the priority, OpenMP's too; what must compute at the usual priority afterwards may not be
    started here, as a process may not raise a priority again."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  (raised again where it is waited for)
            errors.append(error)

    thread = threading.Thread(target=run, name="quiet", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
