"""Compiles grammars in a thread of its own, and keeps those that were used last."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from llguidance import LLMatcher, LLTokenizer

from alignedserve.core.errors import ModelError
from alignedserve.runtime.grammar.limits import PARSER_LIMITS

logger = logging.getLogger(__name__)

MAX_KEPT = 512
MAX_KEPT_CHARACTERS = 16 * 1024 * 1024  # of the grammars; compiled they take some times as much


class GrammarError(Exception):
    """A grammar that cannot be matched: it is malformed, too large, or not for this model."""


class GrammarCompiler:
    """Compiles each grammar once, into a matcher that answers copy. May be called from any thread."""

    def __init__(self, load_vocabulary: Callable[[], LLTokenizer]) -> None:
        """`load_vocabulary`: takes up to a second; called on the compiling thread, at once. May raise ModelError."""
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._vocabulary = self._thread.submit(load_vocabulary)
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._num_characters = 0
        self._lock = Lock()

    def compile(self, grammar: str) -> "Future[LLMatcher]":
        """Return the matcher to copy, when it is compiled; its error is a GrammarError."""
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
            compiled = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            self._num_characters += len(grammar)
            self._forget_oldest()
        return compiled

    def wait(self) -> None:
        """Wait until the vocabulary is loaded, if it can be."""
        self._vocabulary.exception()

    def close(self) -> None:
        """End the thread; grammars that wait are not compiled."""
        self._thread.shutdown(cancel_futures=True)

    def _compile(self, grammar: str) -> LLMatcher:
        try:
            vocabulary = self._vocabulary.result()
        except ModelError as error:
            raise GrammarError(f"answers of this model cannot follow a grammar: {error}") from error
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=PARSER_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first takes longest, and copies start from what it leaves
        if matcher.is_error():
            raise GrammarError(failure_of(matcher))
        return matcher

    def _forget_oldest(self) -> None:
        while len(self._compiled) > MAX_KEPT or self._num_characters > MAX_KEPT_CHARACTERS:
            oldest, _ = self._compiled.popitem(last=False)
            self._num_characters -= len(oldest)


def failure_of(matcher: LLMatcher) -> str:
    """Return the reason why a matcher gave up, without the client's words, which the rest of the message may hold."""
    reason = str(matcher.stop_reason())
    return _FAILURES.get(reason, "the grammar cannot be followed")


_FAILURES = {
    "ParserTooComplex": "the grammar is too complex: too many alternatives at once",
    "LexerTooComplex": "the grammar is too complex: a pattern of it has too many states",
}
