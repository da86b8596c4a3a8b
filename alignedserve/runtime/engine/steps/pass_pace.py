"""Keeps a pass from being launched far ahead of what its device has computed, so that it can stop between layers."""

from collections import deque

from alignedserve.runtime.device.streams import Event, Stream

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
        """Wait until the device has few enough of the layers left that are launched."""
        if self._is_kept:
            self._launched.append(self._stream.record())
            if len(self._launched) > self._layers_ahead:
                self._launched.popleft().synchronize()
