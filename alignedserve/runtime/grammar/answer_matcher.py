"""The state of one answer under its grammar: a function of the tokens of the answer alone."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future

from llguidance import LLMatcher

# Of one call of `foresee`: each takes some 50 microseconds to tokenise.
_MAX_FORCED = 32


class AnswerMatcher:
    """Follows one answer. Tokens are noted at once and matched when the state is needed, on the thread of masks."""

    def __init__(self, compiled: "Future[LLMatcher]", token_ids: Sequence[int]) -> None:
        """`token_ids`: the answer so far; a resumed one has the state of one that was never interrupted."""
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._unmatched = list(token_ids)
        self._forced: list[int] = []  # matched already, though the answer does not have them yet
        self._num_matched = 0

    @property
    def is_compiled(self) -> bool:
        """Return whether `current` would not wait."""
        return self._matcher is not None or self._compiled.done()

    @property
    def forced(self) -> Sequence[int]:
        """Return the next tokens that the grammar forces, as far as `foresee` has matched them."""
        return self._forced

    @property
    def place(self) -> int:
        """Return how many tokens were matched. The next mask stays the same until this changes or a token is noted."""
        return self._num_matched

    @property
    def is_behind(self) -> bool:
        """Return whether tokens were noted that are not matched yet."""
        return bool(self._unmatched)

    def append(self, token_ids: Sequence[int]) -> None:
        """Note the next tokens of the answer."""
        num_forced = min(len(token_ids), len(self._forced))
        assert list(token_ids[:num_forced]) == self._forced[:num_forced], "another token than the forced one"
        del self._forced[:num_forced]
        if len(token_ids) > num_forced:
            self._unmatched += token_ids[num_forced:]

    def current(self) -> LLMatcher:
        """Return the matcher, after the answer and its forced tokens; it is in error where these do not match.

        Waits until it is compiled. Raises GrammarError if it cannot be.
        """
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        unmatched, self._unmatched = self._unmatched, []
        if unmatched:
            self._matcher.consume_tokens(unmatched)
            self._num_matched += len(unmatched)
        return self._matcher

    def foresee(self, ends: Collection[int]) -> None:
        """Match the tokens that the grammar forces next, up to one of `ends`; raises GrammarError as `current` does.

        It matches one token after the other. Each is the only one that a mask would allow at its place, in the model's
        own tokenisation.
        """
        matcher = self.current()
        while len(self._forced) < _MAX_FORCED:
            forced = matcher.compute_ff_tokens()
            if not forced or forced[0] in ends or not matcher.consume_token(forced[0]):
                return
            self._forced.append(forced[0])
            self._num_matched += 1
