"""Work that leaves the cores to whoever needs them: a model that is loaded beside others that serve."""

import os
import threading
from collections.abc import Callable
from typing import TypeVar

_NICENESS = 10  # a tenth of the processor's time beside a thread of the usual priority, all of it on an idle core

T = TypeVar("T")


def run_quietly(work: Callable[[], T]) -> T:
    """Run work on a thread of low priority, which ends with it, and return its result. Raises what it raises.

    Threads that it starts inherit the priority, OpenMP's too; what must compute at the usual priority afterwards may
    not be started here, as a process may not raise a priority again.
    """
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
