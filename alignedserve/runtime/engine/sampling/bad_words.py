"""Bad words of one sequence: runs of tokens that its answer must not contain."""

from collections.abc import Iterable, Sequence


class BadWords:
    """Knows which tokens would complete a bad word now. The prompt does not count."""

    __slots__ = ("_endings", "_last", "_lengths")

    def __init__(self, words: Iterable[Sequence[int]], generated: Sequence[int]) -> None:
        """`generated`: the answer so far."""
        self._endings: dict[tuple[int, ...], list[int]] = {}  # last tokens by those before them
        for word in words:
            self._endings.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lengths = sorted({len(beginning) for beginning in self._endings})
        self._last = list(generated)[-self._lengths[-1] :] if self._lengths[-1] else []

    def record(self, token_id: int) -> None:
        """Add the next token of the answer."""
        if self._lengths[-1]:
            self._last = [*self._last, token_id][-self._lengths[-1] :]

    def endings(self) -> list[int]:
        """Return the tokens that would complete a word."""
        num_last = len(self._last)
        beginnings = (tuple(self._last[num_last - length :]) for length in self._lengths if length <= num_last)
        return [token_id for beginning in beginnings for token_id in self._endings.get(beginning, ())]
