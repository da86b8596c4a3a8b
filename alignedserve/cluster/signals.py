"""Handlers of Ctrl-C, SIGTERM and uncaught errors, which Ray replaces."""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from ray._private import ray_constants, worker

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def handlers_preserved() -> Iterator[None]:
    """Preserve signal handlers around the start of Ray; a SIGTERM within raises KeyboardInterrupt, as Ctrl-C does."""
    # Without this, every SIGTERM prints a stack trace of Ray's native code before any handler runs.
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    sys.excepthook = worker.normal_excepthook  # Ray's own tells Ray's head first, and hangs where that has ended
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    with interrupts_kept():
        try:
            yield
        except SystemExit as error:  # raised by Ray's handler of SIGTERM
            raise KeyboardInterrupt from error
        finally:
            _install(before)


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end when a signal arrived meanwhile and its handler's exception went lost. Python
    drops exceptions of handlers within a destructor or right after a fork, and a start has many of both."""
    with _arrivals() as arrived:
        yield
        if arrived() & set(_SIGNALS):
            raise KeyboardInterrupt


@contextlib.contextmanager
def _arrivals() -> Iterator[Callable[[], set[int]]]:
    if threading.current_thread() is not threading.main_thread():
        yield set  # only the main thread handles signals
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


def ignore_signals() -> None:
    """Ignore signals until the process has ended: Python's own end takes handlers away, but leaves what is ignored."""
    _install(dict.fromkeys(_SIGNALS, signal.SIG_IGN))


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore signals during cleanup: a second Ctrl-C, or a SIGTERM to the process group, must not interrupt it."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    ignore_signals()
    try:
        yield
    finally:
        _install(before)


def _install(handlers: dict[signal.Signals, "signal._HANDLER"]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # Python does not allow it there, and Ray does not do it either
    for number, handler in handlers.items():
        if handler is not None:
            signal.signal(number, handler)
