"""Turns tokens into text incrementally.

tokenizers' `DecodeStream` is not used: it raises on output that is not valid UTF-8 (a model may produce any bytes) and
cannot flush its buffer. Byte-level vocabularies go through an incremental UTF-8 decoder, all others through a window of
recent tokens; neither ever emits half of a character.
"""

import codecs
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"
# A character has at most four bytes; more tokens than this without a whole one are not UTF-8 at all.
_MAX_HELD_TOKENS = 16
_NUM_NEIGHBOURS = 16  # of tokens shown before, which is more than any decoder looks at
_MAX_CHARACTER_BYTES = 4


class TextStream(Protocol):
    """Turns the tokens of one answer into text incrementally. Special tokens have no text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete: whole characters only."""

    def end(self) -> str:
        """Return the buffered text, with U+FFFD for incomplete characters."""


class ByteStream:
    """A TextStream of byte-level vocabularies."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        special_ids: frozenset[int],
        marks: Mapping[int, str],
        whole: MutableMapping[int, str],
    ) -> None:
        """Make a stream. `marks`: texts of special tokens with a text.

        `whole`: texts of tokens that begin and end with a character, which all streams of a vocabulary find out.
        """
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._whole = whole
        self._is_between_characters = True
        self._marks = {token_id: mark.encode() for token_id, mark in marks.items()}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1 and self._is_between_characters:
            known = self._whole.get(token_ids[0])
            return known if known is not None else self._push_new(token_ids[0])
        return self._push_all(token_ids)

    def _push_new(self, token_id: int) -> str:
        text = self._push_all((token_id,))
        if self._is_between_characters and token_id not in self._special_ids:
            self._whole[token_id] = text
        return text

    def _push_all(self, token_ids: Sequence[int]) -> str:
        text = self._decoder.decode(b"".join([self._bytes_of(token_id) for token_id in token_ids]))
        self._is_between_characters = not self._decoder.getstate()[0]
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._special_ids:
            return self._marks.get(token_id, b"")
        return self._token_bytes(token_id)

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """A TextStream of any vocabulary.

    Decodes the tokens since the last but one emission: decoders look at neighbours, but not far.
    """

    def __init__(
        self, tokenizer: Any, special_ids: frozenset[int], marks: Mapping[int, str], before: Sequence[int] = ()
    ) -> None:
        """Make a stream. `before`: what the text goes on from, without which its first space would be none."""
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._marks = marks
        shown = self._whole([token_id for token_id in before[-_NUM_NEIGHBOURS:] if token_id not in special_ids])
        self._window = shown  # tokens already shown, then tokens held
        self._num_shown = len(shown)

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def end(self) -> str:
        return self._new_text()

    def _whole(self, token_ids: list[int]) -> list[int]:
        """Return these from the first on at which a character begins.

        None: they end with half a character, and the other half would change shown text.
        """
        for start in range(min(len(token_ids), _MAX_CHARACTER_BYTES)):
            if not self._tokenizer.decode(token_ids[start:]).endswith(_REPLACEMENT):
                return token_ids[start:]
        return []

    def _push_one(self, token_id: int) -> str:
        if token_id in self._special_ids:
            return self._take(self._new_text()) + self._marks[token_id] if token_id in self._marks else ""
        self._window.append(token_id)
        text = self._new_text()
        num_held = len(self._window) - self._num_shown
        if num_held <= _MAX_HELD_TOKENS and (not text or text.endswith(_REPLACEMENT)):
            return ""
        return self._take(text)

    def _take(self, text: str) -> str:
        if self._num_shown < len(self._window):
            del self._window[: self._num_shown]
            self._num_shown = len(self._window)
        return text

    def _new_text(self) -> str:
        shown: str = self._tokenizer.decode(self._window[: self._num_shown])
        return str(self._tokenizer.decode(self._window))[len(shown) :]
