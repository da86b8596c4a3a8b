"""Ctrl-C and SIGTERM belong to whoever owns the process; Ray takes them for itself when it starts."""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator

from ray._private import ray_constants

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def handlers_preserved() -> Iterator[None]:
    """Around the start of Ray: afterwards the handlers are those of before. A SIGTERM within interrupts, as Ctrl-C."""
    # Without this, every SIGTERM prints a stack trace of Ray's native code before any handler runs.
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    with _arrivals() as arrived:
        try:
            yield
        except SystemExit as error:  # what Ray makes of a SIGTERM
            raise KeyboardInterrupt from error
        finally:
            _install(before)
        # Python drops what a handler raises within a destructor or right after a fork, of which a start has many.
        if arrived() & set(_SIGNALS):
            raise KeyboardInterrupt


@contextlib.contextmanager
def _arrivals() -> Iterator[Callable[[], set[int]]]:
    """The signals that came since, whichever handler took them."""
    if threading.current_thread() is not threading.main_thread():
        yield set  # signals are the main thread's affair
        return
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    former = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def arrived() -> set[int]:
        with contextlib.suppress(BlockingIOError):
            return set(os.read(reading, select.PIPE_BUF))
        return set()

    try:
        yield arrived
    finally:
        signal.set_wakeup_fd(former)
        os.close(reading)
        os.close(writing)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Around cleaning up: a second Ctrl-C, or a SIGTERM to the group beside the one to us, must not cut it short."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    _install(dict.fromkeys(_SIGNALS, signal.SIG_IGN))
    try:
        yield
    finally:
        _install(before)


def _install(handlers: dict[signal.Signals, "signal._HANDLER"]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # where Python does not allow it, and Ray does not do it either
    for number, handler in handlers.items():
        if handler is not None:
            signal.signal(number, handler)
