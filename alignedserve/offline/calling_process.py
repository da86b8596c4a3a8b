"""Lets processes that are forked from this one compute with a model of their own.

A fork copies the calling thread alone, and the record of the OpenMP threads that have worked for it: the first parallel
loop in the new process would wait for them for ever. So they end before a fork, and the next loop of either process
starts others.

A process that was forked from one that had computed before this module was there is past help: its first parallel loop
never ends, and nothing can stop it. It is told so, and ends.
"""

import ctypes
import os
import signal
import threading
from types import FrameType
from typing import Self

import torch

_LOOP, _LOOKS = 1 << 20, 20
_PAST_HELP = (
    b"error: this process was forked from one that had computed with PyTorch before it imported alignedserve.LLM, so "
    b"that nothing can be computed here; import LLM there first, or start processes by spawn\n"
)
_SOFT = 1  # omp_pause_soft: ends the threads, and keeps what was set


def let_forks_compute() -> None:
    """See to it in this process and in all that are forked from it; to be called once."""
    os.register_at_fork(before=_end_openmp_threads)


def require_loops(patience_s: float = 20.0) -> None:
    """End this process, with the reason on stderr, if its parallel loops never end; else return at once."""
    has_ended = threading.Event()
    threading.Thread(target=_end_unless, args=(has_ended, patience_s), daemon=True).start()
    torch.ones(_LOOP).mul_(1.0)
    has_ended.set()


def _end_unless(has_ended: threading.Event, patience_s: float) -> None:
    for _ in range(_LOOKS):  # a process that was stopped meanwhile does not end
        if has_ended.wait(patience_s / _LOOKS):
            return
    os.write(2, _PAST_HELP)
    os._exit(1)


def _end_openmp_threads() -> None:
    end = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if end is not None:
        end(_SOFT)


class HeldInterrupt:
    """Holds Ctrl-C back within its context, whose end raises it; pressed once more, it comes at once.

    In another thread than the first one, or where the program has a handler of its own, it changes nothing.
    """

    def __init__(self) -> None:
        self.came = False
        self._is_held = False

    def __enter__(self) -> Self:
        is_first = threading.current_thread() is threading.main_thread()
        if is_first and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_held = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._is_held:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.came and kind is None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            signal.default_int_handler(number, frame)
        self.came = True
