"""Holds log-probabilities until it is known whether the text of their tokens is shown, and where."""

from collections import deque
from typing import NamedTuple

from alignedserve.core.request import TokenLogprob


class OffsetLogprob(NamedTuple):
    """A visible token's log-probability and the offset in the content where the token begins."""

    logprob: TokenLogprob
    text_offset: int


class HeldLogprobs:
    """Log-probabilities of one choice, in the order of their tokens. Those of thoughts and calls are never shown."""

    def __init__(self) -> None:
        self._undivided: deque[OffsetLogprob] = deque()  # offsets in the whole answer
        self._in_content: deque[OffsetLogprob] = deque()
        self._num_decoded = 0  # characters given to a parser, like the next
        self._num_divided = 0
        self._num_content = 0
        self._is_in_content = True

    def hold(self, logprob: TokenLogprob) -> None:
        """Add the next token, before its text is known."""
        self._undivided.append(OffsetLogprob(logprob, self._num_decoded))

    def decoded(self, length: int) -> None:
        """Count the characters of a token."""
        self._num_decoded += length

    def add_text(self, length: int, content_length: int) -> None:
        """Divide the next characters of the answer: they are content, or nothing of them is."""
        self._is_in_content = content_length > 0 or (length == 0 and self._is_in_content)
        while self._undivided and self._undivided[0].text_offset < self._num_divided + length:
            held = self._undivided.popleft()
            if self._is_in_content:
                offset = self._num_content + held.text_offset - self._num_divided
                self._in_content.append(OffsetLogprob(held.logprob, offset))
        self._num_divided += length
        self._num_content += content_length

    def release(self, num_visible: int, *, is_all: bool) -> tuple[OffsetLogprob, ...]:
        """Return those before a place in the content; `is_all`: at its end, tokens without text as well."""
        if is_all and self._is_in_content:
            self._in_content += [held._replace(text_offset=self._num_content) for held in self._undivided]
            self._undivided.clear()
        released = []
        while self._in_content and (is_all or self._in_content[0].text_offset < num_visible):
            released.append(self._in_content.popleft())
        return tuple(released)
