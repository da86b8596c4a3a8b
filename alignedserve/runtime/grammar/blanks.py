"""Bounds runs of blank space in answers that are held to a grammar.

Where a grammar allows blanks without end, as `ws ::= [ \\t\\n]*` does, a small model writes them until its answer is
cut. After MAX_BLANKS in a row, tokens of blanks alone are chosen only where nothing else may follow. What comes next
depends on the answer so far alone, never on what shares the batch.
"""

from codecs import getincrementaldecoder
from collections.abc import Sequence

MAX_BLANKS = 40  # characters; JSON that is indented has fewer
_UTF8 = getincrementaldecoder("utf-8")
_BLANKS = [chr(code) for code in range(0x3001) if chr(code).isspace()]
_BEGINNINGS = frozenset(
    encoded[:length] for encoded in (blank.encode() for blank in _BLANKS) for length in range(1, len(encoded))
)  # of blanks that several tokens may spell


def with_free_blanks(grammar: str) -> str:
    """Return the grammar as one whose answers may have any number of blanks in a row.

    It says so by a space at its beginning, which means nothing in JSON.
    """
    return " " + grammar if grammar else grammar


def has_free_blanks(grammar: str) -> bool:
    """Return whether answers under this grammar may have any number of blanks in a row."""
    return grammar.startswith(" ")


class BlankTokens:
    """What a vocabulary's tokens are made of, as far as blanks go."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.texts = tokens
        self.token_ids = tuple(token_id for token_id, text in enumerate(tokens) if text and _is_blank(text))


class BlankRun:
    """The blanks at the end of one answer. Tokens are noted at once, and read when the run is asked for."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._unread = list(token_ids)
        self._decoder = _UTF8(errors="replace")
        self._length = 0

    def append(self, token_ids: Sequence[int]) -> None:
        self._unread += token_ids

    def is_full(self, tokens: BlankTokens) -> bool:
        """Return whether the run is so long that no more blanks are wanted."""
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
