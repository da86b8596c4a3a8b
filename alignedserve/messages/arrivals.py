"""The requests that a message brings to a worker, whichever way they come."""

from collections.abc import Sequence

from alignedserve.core.request import Request
from alignedserve.messages.caches import BatchGranted, BlocksWritten
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillRequest


def requests_of(message: Message) -> Sequence[Request]:
    """Return the requests that a worker has from this message on; none of most messages."""
    match message:
        case PrefillRequest() | BlocksWritten():
            return (message.request,)
        case BatchGranted():
            return [handoff.request for handoff in message.handoffs]
        case _:
            return ()
