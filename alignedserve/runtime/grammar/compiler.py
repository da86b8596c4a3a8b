"""Compiles grammars in a thread of its own, those of real-time requests first, and keeps the latest ones."""

import logging
from codecs import getincrementaldecoder
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from alignedserve.core.errors import InvalidRequest, ModelError
from alignedserve.process.turn_threads import TurnThreads

MAX_BLANKS = 40  # characters; JSON that is indented has fewer
_UTF8 = getincrementaldecoder("utf-8")
_BLANKS = [chr(code) for code in range(0x3001) if chr(code).isspace()]
_BEGINNINGS = frozenset(
    encoded[:length] for encoded in (blank.encode() for blank in _BLANKS) for length in range(1, len(encoded))
)  # of blanks that several tokens may spell


def with_free_blanks(grammar: str) -> str:
    """Return the grammar as one whose answers may have any number of blanks in a row. A space at the beginning marks
    such a grammar; in JSON it means nothing."""
    return " " + grammar if grammar else grammar


def has_free_blanks(grammar: str) -> bool:
    return grammar.startswith(" ")


CLIENT_RULES = "// rules of a client"  # begins grammars whose steps nothing but time bounds


class BlankTokens:
    """The tokens of a vocabulary that are blanks alone."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.texts = tokens
        self.token_ids = tuple(token_id for token_id, text in enumerate(tokens) if text and _is_blank(text))


class BlankRun:
    """The blanks at the end of one answer. Tokens are noted at once, and read when the run is asked for.

    Where a grammar allows blanks without end, as `ws ::= [ \\t\\n]*` does, a small model writes them until its answer
    is cut. After MAX_BLANKS in a row, tokens of blanks alone are chosen only where nothing else may follow.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._unread = list(token_ids)
        self._decoder = _UTF8(errors="replace")
        self._length = 0

    def append(self, token_ids: Sequence[int]) -> None:
        self._unread += token_ids

    def is_full(self, tokens: BlankTokens) -> bool:
        unread, self._unread = self._unread, []
        text = self._decoder.decode(b"".join([tokens.texts[token_id] for token_id in unread]))
        if text:
            num_blanks = len(text) - len(text.rstrip())
            self._length = self._length + num_blanks if num_blanks == len(text) else num_blanks
        return self._length >= MAX_BLANKS


def _is_blank(text: bytes) -> bool:
    for length in range(3):
        head, tail = (text[: len(text) - length], text[len(text) - length :]) if length else (text, b"")
        if tail and tail not in _BEGINNINGS:
            continue
        try:
            is_blank = not head.decode().strip()
        except UnicodeDecodeError:
            continue
        if is_blank:
            return True
    return False


# Schemas in use stay below 25 % of the first and 5 % of all others.
PARSER_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=50_000,
    verbose_errors=False,  # errors are shown to clients and logged: they repeat no content
)
logger = logging.getLogger(__name__)

MAX_KEPT = 512
# Of those that answers have followed and nobody waits for: what they have visited of a pattern stays, some megabytes.
MAX_FOLLOWED = 64
MAX_KEPT_CHARACTERS = 16 * 1024 * 1024  # of the grammars; compiled they take some times as much


class GrammarError(Exception):
    """A grammar that cannot be matched: it is malformed, too large, or not for this model."""


class GrammarCompiler:
    """Compiles each grammar once, into a matcher that answers copy. May be called from any thread."""

    def __init__(self, load_vocabulary: Callable[[], LLTokenizer]) -> None:
        """`load_vocabulary`: takes a second, and some megabytes that stay; called on the compiling thread when the
        first grammar comes. May raise ModelError."""
        self._thread = TurnThreads(1, "grammars")
        self._load_vocabulary = load_vocabulary
        self._vocabulary: LLTokenizer | GrammarError | None = None
        self.blank_tokens: BlankTokens | None = None  # None: nothing has been compiled yet
        self.failed_matcher: LLMatcher | None = None  # likewise
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._followed: OrderedDict[str, None] = OrderedDict()  # by answers that have ended, and not asked for since
        self.heavy: set[str] = set()  # grammars that took long for a mask of an answer
        self._num_characters = 0
        self._lock = Lock()

    def compile(self, grammar: str, *, is_real_time: bool = True) -> "Future[LLMatcher]":
        """Return the matcher to copy, when it is compiled; its error is a GrammarError.

        `is_real_time`: it goes before grammars of best effort."""
        with self._lock:
            self._followed.pop(grammar, None)
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
                if is_real_time:
                    self._thread.hasten(compiled)
                return compiled
            compiled = self._thread.submit(partial(self._compile, grammar), is_real_time=is_real_time)
            self._compiled[grammar] = compiled
            self._num_characters += len(grammar)
            while len(self._compiled) > MAX_KEPT or self._num_characters > MAX_KEPT_CHARACTERS:
                self._drop(next(iter(self._compiled)))
        return compiled

    def compile_anew(self, grammar: str, spoilt: "Future[LLMatcher]") -> "Future[LLMatcher]":
        """Return a matcher to copy in the place of one whose copies are of no use any more."""
        self._forget_one(grammar, spoilt)
        return self.compile(grammar)

    def compile_alone(self, grammar: str, outgrown: "Future[LLMatcher]") -> "Future[LLMatcher]":
        """Return a matcher for one answer, in the place of one of which all its copies have visited too much together.
        Nobody else gets it: who asks for this grammar next gets yet another."""
        self._forget_one(grammar, outgrown)
        return self._thread.submit(partial(self._compile, grammar), is_real_time=True)

    def release(self, grammar: str) -> None:
        with self._lock:
            self._followed[grammar] = None
            self._followed.move_to_end(grammar)
            while len(self._followed) > MAX_FOLLOWED:
                oldest, _ = self._followed.popitem(last=False)
                self._drop(oldest)
                self.heavy.discard(oldest)

    def check(self, grammar: str) -> None:
        """Wait until a grammar is compiled. Raises InvalidRequest if it cannot be."""
        try:
            self.compile(grammar).result()
        except GrammarError as error:
            raise InvalidRequest(str(error), code="invalid_grammar") from error

    def close(self) -> None:
        """End the thread; grammars that wait are not compiled."""
        self._thread.close()

    def _compile(self, grammar: str) -> LLMatcher:
        if self._vocabulary is None:
            self._vocabulary = self._loaded()
        if isinstance(self._vocabulary, GrammarError):
            raise self._vocabulary
        return compile_now(self._vocabulary, grammar)

    def _loaded(self) -> LLTokenizer | GrammarError:
        try:
            vocabulary = self._load_vocabulary()
        except ModelError as error:
            return unsupported_model(error)
        self.failed_matcher = LLMatcher(vocabulary, "", log_level=0)
        self.blank_tokens = BlankTokens([vocabulary.decode_bytes([token]) for token in range(vocabulary.vocab_size)])
        return vocabulary

    def _forget_one(self, grammar: str, compiled: "Future[LLMatcher]") -> None:
        with self._lock:
            if self._compiled.get(grammar) is compiled:
                self._drop(grammar)

    def _drop(self, grammar: str) -> None:
        if self._compiled.pop(grammar, None) is not None:
            self._num_characters -= len(grammar)


def compile_now(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar on the calling thread. Raises GrammarError if it cannot be."""
    matcher = LLMatcher(vocabulary, grammar.lstrip(" "), log_level=0, limits=PARSER_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first takes longest, and copies start from what it leaves
    if matcher.is_error():
        raise GrammarError(failure_of(matcher))
    return matcher


def try_step(matcher: LLMatcher) -> None:
    """Match the first token that a compiled grammar allows; patterns are only read then. Raises GrammarError."""
    allowed, tried = matcher.compute_bitmask(), matcher.deep_copy()
    word = next((index for index, bits in enumerate(allowed) if bits), None)
    if word is None:
        return
    bits = allowed[word]
    tried.consume_token(8 * word + (bits & -bits).bit_length() - 1)
    tried.compute_bitmask()
    if tried.is_error():
        raise GrammarError(failure_of(tried))


def unsupported_model(error: ModelError) -> GrammarError:
    return GrammarError(f"answers of this model cannot follow a grammar: {error}")


def failure_of(matcher: LLMatcher) -> str:
    """Return the reason why a matcher gave up, without the client's words, which the rest of the message may hold."""
    error = matcher.get_error()
    named = (reason for phrase, reason in _REFUSALS.items() if phrase in error)
    return _FAILURES.get(str(matcher.stop_reason())) or next(named, "the grammar cannot be followed")


def is_outgrown(matcher: LLMatcher) -> bool:
    return matcher.is_error() and "too many states" in matcher.get_error()


def is_spoilt(matcher: LLMatcher) -> bool:
    """Return whether a matcher failed by what it shares with all copies of one: another's panic left it locked."""
    return matcher.is_error() and "PoisonError" in matcher.get_error()


_TOO_MANY_STATES = "the grammar is too complex: a pattern of it has too many states"
_FAILURES = {
    "ParserTooComplex": "the grammar is too complex: too many alternatives at once",
    "LexerTooComplex": _TOO_MANY_STATES,
}
# Phrases of llguidance's messages, the particular before the general.
_REFUSALS = {
    "oneOf constraints": "the JSON Schema keyword 'oneOf' is supported only where its options exclude each other",
    "are not disjoint": "the JSON Schema keyword 'patternProperties' is supported only where no name matches two",
    "min/maxProperties": "the JSON Schema keywords 'minProperties' and 'maxProperties' need all others in 'required'",
    "too many states": _TOO_MANY_STATES,
    "too many expressions": _TOO_MANY_STATES,
    "stack level": "the JSON schema is nested too deep, or refers to itself in too many ways",
    "'multipleOf'": "the JSON Schema keyword 'multipleOf' has too many digits",
    "circular references": "the JSON Schema keyword '$ref' leads to itself beside other keywords",
    "look-around": "a pattern has look-around, which is not supported",
    "regex": "a pattern is not a regular expression, or too complex a one",
    "NoExtension": "nothing matches the grammar",
    "Unsatisfiable": "nothing matches the JSON schema",
    "too large": "the grammar is too large",
    "unknown special token": "the grammar names a token that the model does not have",
}
