"""The seconds that a worker has computed for each request: its share, by tokens, of the time of every iteration.

They go to the gateways with the tokens, as what came since the last message about a request. So a request that moves to
another worker, or is computed there again, takes nothing along: its gateway adds up what all workers tell. The meter
stands beside the logic, which knows nothing of it: no decision depends on it, and none is recorded with it.
"""

from collections.abc import Sequence

from alignedserve.core.ids import RequestId
from alignedserve.messages.events import SendTo
from alignedserve.messages.gateways import PromptScored, TokenDelta, TokensEmitted
from alignedserve.messages.iterations import IterationCompleted, RunIteration
from alignedserve.messages.wire import Message


class ComputeMeter:
    """Sees what a worker's logic is told and what it commands, in the order of both. See the driver of logics.

    All seconds of iterations with requests are told, each once: of a request that leaves before it has a token by a
    message of its own, which has no token.
    """

    def __init__(self) -> None:
        # Tokens by request, of the latest iteration and of the latest urgent one.
        self._slices: dict[bool, Sequence[tuple[RequestId, int]]] = {}
        self._ended: tuple[Sequence[tuple[RequestId, int]], IterationCompleted] | None = None  # and is not split yet
        self._untold: dict[RequestId, float] = {}
        self._gateways: dict[RequestId, str] = {}  # of the requests in the engine
        self._left: list[tuple[RequestId, str]] = []  # the engine since untold seconds were last looked for

    def happened(self, event: object) -> None:
        if isinstance(event, IterationCompleted):
            self._split()
            self._ended = (self._slices.get(event.is_urgent, ()), event)

    def commanded(self, command: object) -> None:
        if not isinstance(command, RunIteration):
            return
        for request_id in command.removals:
            if (gateway := self._gateways.pop(request_id, None)) is not None:
                self._left.append((request_id, gateway))
        for addition in command.additions:
            self._gateways[addition.request.request_id] = addition.request.reply_to
        self._slices[command.is_urgent] = command.slices

    def told(self, message: Message) -> Message:
        """Return a message to a gateway with the seconds that are new to it."""
        self._split()
        take = self._untold.pop
        match message:
            case TokensEmitted():
                return TokensEmitted(message.deltas, tuple([take(delta.request_id, 0.0) for delta in message.deltas]))
            case PromptScored(request_id, first_position, entries):
                return PromptScored(request_id, first_position, entries, take(request_id, 0.0))
        return message

    def left_over(self) -> list[SendTo]:
        self._split()
        left, self._left = self._left, []
        return [
            SendTo(gateway, TokensEmitted((TokenDelta(request_id, 0, ()),), (seconds,)))
            for request_id, gateway in left
            if (seconds := self._untold.pop(request_id, 0.0))
        ]

    def _split(self) -> None:
        if self._ended is None:
            return
        (slices, event), self._ended = self._ended, None
        slices = [part for part in slices if part[0] not in event.skipped] if event.skipped else slices
        num_tokens = sum([computed for _, computed in slices]) + sum([more for _, more in event.forced])
        if not num_tokens or event.times is None:
            return
        token_s = event.times.computed_s / num_tokens
        untold = self._untold
        for request_id, computed in (*slices, *event.forced):
            untold[request_id] = untold.get(request_id, 0.0) + token_s * computed
