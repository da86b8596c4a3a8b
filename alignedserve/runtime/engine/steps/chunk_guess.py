"""Which chunks of prompts the next step will be asked for, by what the present one was asked for.

A scheduler fills its budget of tokens with decodes, then with what is left of a prompt. So a prompt that is not at its
end goes on, with what its step leaves of the same number of tokens: a sequence that ends meanwhile gives its token to
the chunk, for which a few more are guessed. A guess that is too long costs the computation of a few tokens, one that
is too short a pass of its own for the rest, and one that is wrong altogether a whole step: so after one that was not
confirmed nothing is launched until the next would have been.
"""

from typing import NamedTuple

import numpy as np

from alignedserve.runtime.attention.sequence_table import IntArray, SequenceTable

MOST_TOKENS = 2048  # longer chunks hide the host's work anyway, and whoever comes in between waits for them
_SPARE_TOKENS = 16  # of sequences that may end with the present step
_NO_ROWS = np.empty(0, np.int64)


class GuessedChunks(NamedTuple):
    """GuessedChunks of prompts, each of two tokens or more."""

    rows: IntArray  # of the sequence table
    counts: IntArray


NO_CHUNKS = GuessedChunks(_NO_ROWS, _NO_ROWS)


class ChunkGuess:
    """Guesses from step to step; it sees every step that is asked for."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._asked = NO_CHUNKS  # all slices of the present step
        self._guess = NO_CHUNKS
        self.is_trusted = True  # the latest guess was confirmed

    def note(self, rows: IntArray, counts: IntArray) -> None:
        """Take note of a step that is asked for: slices by rows of the table, before it is computed."""
        self._asked = GuessedChunks(rows, counts)
        if len(self._guess.rows):
            asked_for = dict(zip(rows.tolist(), counts.tolist(), strict=True))
            pairs = zip(self._guess.rows.tolist(), self._guess.counts.tolist(), strict=True)
            self.is_trusted = all(_is_near(asked_for.get(row, 0), count) for row, count in pairs)
            self._guess = NO_CHUNKS

    def chunks(self, sampled_rows: IntArray, num_decodes: int) -> GuessedChunks | None:
        """Return the chunks to launch beside so many decodes, once the present step is launched, which samples these
        rows; None: prompts go on, nobody knows how.

        The table is as after that step.
        """
        if len(sampled_rows) == len(self._asked.rows):
            return NO_CHUNKS
        rows = self._asked.rows[~np.isin(self._asked.rows, sampled_rows)]
        self._guess = self._guessed(rows, num_decodes)
        return self._guess if len(self._guess.rows) and self.is_trusted else None

    def _guessed(self, rows: IntArray, num_decodes: int) -> GuessedChunks:
        table = self._table
        if (table.wants_embedding[rows] | table.wants_prompt_logprobs[rows]).any():  # the host looks at such a chunk
            return NO_CHUNKS
        left = int(self._asked.counts.sum()) - num_decodes
        chosen: list[tuple[int, int]] = []
        for row in rows.tolist():
            count = min(int(table.num_tokens[row] - table.num_computed[row]), left + _SPARE_TOKENS)
            if min(count, left) < 2:
                break
            chosen.append((row, count))
            left -= count
        if not chosen or sum(count for _, count in chosen) > MOST_TOKENS:
            return NO_CHUNKS
        return GuessedChunks(*(np.array(column, np.int64) for column in zip(*chosen, strict=True)))


def _is_near(asked: int, guessed: int) -> bool:
    return max(guessed - guessed // 4 - _SPARE_TOKENS, 1) <= asked <= guessed
