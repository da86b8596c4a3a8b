"""What arriving requests need: their grammars are compiled from the moment they reach a worker."""

from collections.abc import Sequence
from concurrent.futures import Future

from llguidance import LLMatcher

from alignedserve.messages.arrivals import requests_of
from alignedserve.messages.wire import Message
from alignedserve.runtime.grammar.compiler import GrammarCompiler


def prepare_grammars(compiler: GrammarCompiler, message: Message) -> "Sequence[Future[LLMatcher]]":
    """Begin to compile the grammars of the requests that a message brings; return what they wait for."""
    return [compiler.compile(request.sampling.grammar) for request in requests_of(message) if request.sampling.grammar]
