"""The order in which lines of a batch run: lines with a common prefix go one after the other.

The prefix is then computed once, and all later lines find it in the prefix cache, however small that is. Example: a
file has ten questions about each of 1 000 documents, all first questions before all second ones. A worker that keeps 50
documents would compute every document ten times; in this order it computes each once.

Prefixes are compared at four lengths, by digests. Lines with 16 KiB in common stand together inside a group with 4 KiB
in common, and so on. Otherwise lines keep the order of the file; a group stands at the place of its first line.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import xxhash

_LENGTHS = (256, 1024, 4096, 16384)  # bytes from the member on that holds the prompt
_PROMPTS = (b'"messages"', b'"prompt"', b'"input"')


class CommonBeginnings:
    """Digests of the beginnings of a file's prompts, 32 bytes a line."""

    def __init__(self) -> None:
        self._digests = tuple(array("Q") for _ in _LENGTHS)

    def add(self, text: bytes) -> None:
        """Add the next line."""
        start = next((at for member in _PROMPTS if (at := text.find(member)) >= 0), 0)
        for digests, length in zip(self._digests, _LENGTHS, strict=True):
            digests.append(xxhash.xxh3_64_intdigest(text[start : start + length]))

    def order(self) -> Sequence[int]:
        """Return the lines in the order in which they should run."""
        num_lines = len(self._digests[0])
        firsts = [_first_alike(np.frombuffer(digests, np.uint64)) for digests in self._digests] if num_lines else []
        if not firsts or np.array_equal(firsts[0], np.arange(num_lines)):
            return range(num_lines)
        ordered = np.lexsort((np.arange(num_lines), *reversed(firsts)))
        return array("I", ordered.astype(np.uint32).tobytes())


def _first_alike(digests: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
    """Return for every line the first one with the same digest."""
    _, first, group = np.unique(digests, return_index=True, return_inverse=True)
    return first[group]
