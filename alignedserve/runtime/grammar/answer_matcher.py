"""The state of one answer under its grammar: a function of the tokens of the answer alone."""

from collections.abc import Sequence
from concurrent.futures import Future

from llguidance import LLMatcher


class AnswerMatcher:
    """Follows one answer. Tokens are noted at once and matched when the state is needed, on the thread of masks."""

    def __init__(self, compiled: "Future[LLMatcher]", token_ids: Sequence[int]) -> None:
        """`token_ids`: the answer so far; a resumed one has the state of one that was never interrupted."""
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._unmatched = list(token_ids)

    def append(self, token_id: int) -> None:
        """Note the next token of the answer."""
        self._unmatched.append(token_id)

    def current(self) -> LLMatcher:
        """Return the matcher, at the end of the answer so far, or in error where that does not match.

        Waits until it is compiled. Raises GrammarError if it cannot be.
        """
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        unmatched, self._unmatched = self._unmatched, []
        if unmatched:
            self._matcher.consume_tokens(unmatched)
        return self._matcher
