"""Compiles the grammars of requests from the moment they reach a worker."""

from collections.abc import Iterable
from concurrent.futures import Future

from llguidance import LLMatcher

from alignedserve.core.request import Request
from alignedserve.messages.caches import BatchGranted, BlocksWritten
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillRequest
from alignedserve.runtime.grammar.compiler import GrammarCompiler


def prepare_grammars(compiler: GrammarCompiler, message: Message) -> "Future[LLMatcher] | None":
    """Begin to compile the grammars that come with a message; return what a new request waits for, if anything.

    One that comes from another worker does not wait: its cache is on its way as well.
    """
    prepared = [compiler.compile(request.sampling.grammar) for request in _constrained(message)]
    return prepared[0] if prepared and isinstance(message, PrefillRequest) else None


def _constrained(message: Message) -> Iterable[Request]:
    match message:
        case PrefillRequest() | BlocksWritten():
            requests: Iterable[Request] = (message.request,)
        case BatchGranted():
            requests = [handoff.request for handoff in message.handoffs]
        case _:
            return ()
    return [request for request in requests if request.sampling.grammar]
