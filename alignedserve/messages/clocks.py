"""Times in messages between hosts, whose monotonic clocks have nothing to do with each other.

The only times of another process that messages carry are the arrival of a request, and those of what was noted about
one. They are converted where a message comes in from another host, so that every process sees its own clock alone.
"""

import math
from collections import deque
from dataclasses import replace

import msgspec

from alignedserve.core.errors import ProtocolError
from alignedserve.core.request import Request
from alignedserve.messages.caches import BatchGranted, BlocksWritten, CopyGranted, Handoff, ReturnRequest
from alignedserve.messages.gateways import ResumeRequest, SubmitRequest
from alignedserve.messages.request_notes import RequestsNoted
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillRequest

_NUM_OBSERVED = 64  # about a minute of pings, in which clocks drift apart by a few milliseconds


class ClockOffset:
    """The time to add to another host's clock, estimated from the times at which it sent what arrives here.

    The smallest difference of the last minute: the true offset and the shortest time that a message took.
    """

    def __init__(self) -> None:
        self._observed: deque[float] = deque(maxlen=_NUM_OBSERVED)
        self.seconds = 0.0

    def observe(self, sent_s: float, received_s: float) -> None:
        """Record when a message was sent, by the peer's clock, and when it arrived, by this clock."""
        self._observed.append(received_s - sent_s)
        self.seconds = min(self._observed)


def on_this_clock(message: Message, offset_s: float) -> Message:
    """Return the message with the times of its requests on this host's clock.

    Raises ProtocolError when such an arrival is no time: no order could be made of it.
    """
    match message:
        case SubmitRequest() | ResumeRequest() | PrefillRequest() | BlocksWritten() | ReturnRequest():
            return msgspec.structs.replace(message, request=_moved(message.request, offset_s))
        case CopyGranted():
            return msgspec.structs.replace(message, handoff=_moved_handoff(message.handoff, offset_s))
        case BatchGranted():
            handoffs = tuple(_moved_handoff(handoff, offset_s) for handoff in message.handoffs)
            return msgspec.structs.replace(message, handoffs=handoffs)
        case RequestsNoted():
            notes = [msgspec.structs.replace(note, at_s=max(note.at_s + offset_s, 0.0)) for note in message.notes]
            return msgspec.structs.replace(message, notes=tuple(notes))
        case _:
            return message


def _moved_handoff(handoff: Handoff, offset_s: float) -> Handoff:
    return msgspec.structs.replace(handoff, request=_moved(handoff.request, offset_s))


def _moved(request: Request, offset_s: float) -> Request:
    if not math.isfinite(request.arrival_s):
        raise ProtocolError("the request's arrival time is not a finite number")
    return replace(request, arrival_s=request.arrival_s + offset_s)
