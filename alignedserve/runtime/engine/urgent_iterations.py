"""Iterations that run within another one: its pass stands still between two layers meanwhile, and loses nothing."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from alignedserve.core.ids import RequestId
from alignedserve.process.worker_threads import WorkerThreads
from alignedserve.runtime.device.streams import Event, Stream
from alignedserve.runtime.engine.engine_sizes import LAYERS_AHEAD

_LEAST_TOKENS = 512  # of such a pass: the layers of shorter ones take hardly longer than launching them


class PassPace:
    """The layers of the pass in progress that were launched last, on a stream of a GPU."""

    def __init__(self, stream: Stream, layers_ahead: int) -> None:
        """`stream`: of forward passes. `layers_ahead`: that may be launched and not computed."""
        self._stream, self._layers_ahead = stream, layers_ahead
        self._launched: deque[Event] = deque()
        self._is_kept = False

    def begin(self, num_tokens: int) -> None:
        self._is_kept = num_tokens >= _LEAST_TOKENS
        self._launched.clear()

    def layer_launched(self) -> None:
        if self._is_kept:
            self._launched.append(self._stream.record())
            if len(self._launched) > self._layers_ahead:
                self._launched.popleft().synchronize()


_ANSWER_S = 0.02  # at most, until what follows one that has ended is decided: mostly a millisecond

T = TypeVar("T")


class UrgentIterations:
    """Those that wait for the pass in progress to come to the end of a layer. For its thread, except `add`.

    A pass has its state on the stack of its thread, and an urgent pass runs on top of that stack. Sequences,
    blocks and results are its own: nothing of the other changes, to the last bit.

    When one has ended, the pass stands still until its worker has dealt with that: the next one, which has come
    meanwhile, would wait for a whole layer otherwise."""

    def __init__(self, stream: Stream | None = None) -> None:
        """`stream`: on which passes are launched; None: they are computed as they are called."""
        self._pace = None if stream is None else PassPace(stream, LAYERS_AHEAD)
        self._waiting: deque[tuple[Callable[[], object], threading.Event]] = deque()
        self._is_performing = False
        self._stopped_s = 0.0
        self.is_within = False  # what is performed now, in another pass

    def add(self, threads: WorkerThreads, work: Callable[[], T], on_completed: Callable[[T], None]) -> None:
        """Add an iteration, on the event loop, which also gets the result, as from `threads`."""
        is_dealt_with = threading.Event()

        def completed(result: T) -> None:
            on_completed(result)
            is_dealt_with.set()

        self._waiting.append((threads.performer(work, completed), is_dealt_with))

    def pass_begins(self, slices: Iterable[tuple[RequestId, int]]) -> None:
        if self._pace is not None and not self.is_within:
            self._pace.begin(sum(num_tokens for _, num_tokens in slices))

    def between_layers(self) -> None:
        if self._pace is not None and not self.is_within:
            self._pace.layer_launched()
        if not self._waiting or self._is_performing:
            return
        began = time.monotonic()
        self.is_within = True
        self._perform(_ANSWER_S)
        self._stopped_s += time.monotonic() - began

    def perform_left(self) -> None:
        self._perform(0.0)

    def _perform(self, answer_s: float) -> None:
        self._is_performing = True
        try:
            while self._waiting:
                perform, is_dealt_with = self._waiting.popleft()
                perform()
                is_dealt_with.wait(answer_s)
        finally:
            self._is_performing = self.is_within = False

    def take_stopped_s(self) -> float:
        stopped_s, self._stopped_s = self._stopped_s, 0.0
        return stopped_s
