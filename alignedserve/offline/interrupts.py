"""Holds Ctrl-C back until an iteration is over: one that breaks off leaves its requests in an unknown state."""

import signal
import threading
from types import FrameType
from typing import Self


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
