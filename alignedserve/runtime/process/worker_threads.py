"""A worker's threads: each does its work in order and tells the event loop what came of it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class WorkerThreads:
    """Threads by name, made when first used. `submit` returns at once; callbacks run on the loop that called it."""

    def __init__(self, begin: Callable[[], object] | None = None) -> None:
        """`begin`: what each thread does first."""
        self._begin = begin
        self._executors: dict[str, ThreadPoolExecutor] = {}
        self._is_closed = False

    def submit(self, name: str, work: Callable[[], T], on_completed: Callable[[T], None]) -> None:
        """Do the work on this thread; by hand, as futures cost a tenth of an iteration's gap.

        What the work raises is raised on the loop, where a broken room ends its process.
        """
        loop = asyncio.get_running_loop()

        def deliver(outcome: Callable[[], T]) -> None:
            if not self._is_closed:
                on_completed(outcome())

        executor = self._executors.get(name)
        if executor is None:
            executor = self._executors[name] = ThreadPoolExecutor(1, name, self._begin)
        executor.submit(lambda: loop.call_soon_threadsafe(deliver, _outcome_of(work)))

    def close(self) -> None:
        """Wait for the threads to end; whatever was asked for and is not done calls nobody back."""
        self._is_closed = True
        for executor in self._executors.values():
            executor.shutdown(cancel_futures=True)


def _outcome_of(work: Callable[[], T]) -> Callable[[], T]:
    """Do the work and return what returns its result, or raises what it raised, on whichever thread that is wanted."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001  (raised again by the caller of the outcome)
        future.set_exception(error)
    return future.result
