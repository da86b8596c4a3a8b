"""Ctrl-C and SIGTERM belong to whoever owns the process; Ray takes them for itself when it starts."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from ray._private import ray_constants

_ENDINGS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Around the start of Ray: afterwards the handlers are those of before. A SIGTERM within interrupts, as Ctrl-C."""
    # Without this, every SIGTERM prints a stack trace of Ray's native code before any handler runs.
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    before = {number: signal.getsignal(number) for number in _ENDINGS}
    try:
        yield
    except SystemExit as error:  # what Ray makes of a SIGTERM
        raise KeyboardInterrupt from error
    finally:
        _install(before)


@contextlib.contextmanager
def endings_ignored() -> Iterator[None]:
    """Around cleaning up: a second Ctrl-C, or a SIGTERM to the group beside the one to us, must not cut it short."""
    before = {number: signal.getsignal(number) for number in _ENDINGS}
    _install(dict.fromkeys(_ENDINGS, signal.SIG_IGN))
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
