"""Drafts: guesses of the next tokens of sequences that decode, which one pass verifies (prompt lookup, Saxena 2023).

One step computes the last token of a sequence and all drafts. Every one of these places has logits, and a token is
chosen from each as single steps would choose it: kernels give the same bits whatever shares a step, and a draw is a
function of seed and place. Chosen tokens count up to the first that differs from its draft. So an answer is the same
with and without drafts, to the last bit. Keys and values behind a wrong draft lie in slots that are written again
before they are read.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from alignedserve.core.ids import RequestId
from alignedserve.runtime.attention.backend import RunPlanner
from alignedserve.runtime.attention.sequence_table import SequenceTable
from alignedserve.runtime.engine.sampling.sampler import Sampler
from alignedserve.runtime.engine.steps.step import MOST_MORE_TOKENS, DraftedRow, Drafts, Slices
from alignedserve.runtime.grammar.token_masks import TokenMasks

Tokens = npt.NDArray[np.signedinteger[Any]]  # those of the table are of 32 bits
_LEAST_MATCH, _MOST_MATCH = 2, 16  # tokens at the end that an earlier place must have in common; that are compared
_MOST_PLACES = 64  # that are compared, the latest ones


def looked_up(tokens: Tokens, at_most: int) -> Tokens:
    """Return what followed the earlier place that has most tokens in common with the end, the latest of equals.

    Example: [5, 6, 7, 8, 1, 5, 6] and at most 2: 5, 6 was followed by 7, 8.
    """
    longer = np.flatnonzero(tokens[:-1] == tokens[-1])[-_MOST_PLACES:]
    places, num_common = longer[:0], 0
    while len(longer) and num_common < _MOST_MATCH:
        places, num_common = longer, num_common + 1
        longer = places[places >= num_common]
        longer = longer[tokens[longer - num_common] == tokens[-1 - num_common]] if len(longer) else longer
    if num_common < _LEAST_MATCH:
        return tokens[:0]
    first = int(places[-1]) + 1
    return tokens[first : first + at_most]


class Drafter(Protocol):
    """Guesses the next tokens of a sequence."""

    def __call__(self, tokens: Tokens, at_most: int) -> Tokens:
        """Return at most `at_most` tokens that may follow."""
        ...


class Drafting:
    """Makes the drafts of a step, and appends them to their sequences."""

    def __init__(
        self,
        table: SequenceTable,
        sampler: Sampler,
        masks: TokenMasks | None,
        planner: object,
        *,
        end_token_ids: Collection[int],
        is_able: bool,
    ) -> None:
        """`planner`: of attention. `is_able`: whether nothing else excludes drafts in this engine."""
        self._table, self._sampler, self._masks, self._ends = table, sampler, masks, frozenset(end_token_ids)
        self.drafter: Drafter = looked_up
        self.is_able = is_able and isinstance(planner, RunPlanner)

    def take(self, slices: Slices, most: Mapping[RequestId, int]) -> Drafts | None:
        """Draft up to so many tokens of each sequence, in the slots that are left in its blocks; None: nothing."""
        if not self.is_able or any(count != 1 for _, count in slices):
            return None
        table, rows = self._table, self._table.rows([request_id for request_id, _ in slices])
        if (table.num_tokens[rows] - table.num_computed[rows] != 1).any() or table.is_hidden[rows].any():
            return None
        made, num_left = [], MOST_MORE_TOKENS
        for (request_id, _), row in zip(slices, rows.tolist(), strict=True):
            if drafts := self._draft(row, min(most.get(request_id, 0), num_left)):
                made.append(DraftedRow(request_id, row, int(table.num_tokens[row]), drafts))
                num_left -= len(drafts)
        for part in made:
            end = part.num_tokens + len(part.token_ids)
            table.tokens[part.row, part.num_tokens : end] = part.token_ids
            table.num_tokens[part.row] = end
        return Drafts(made, {}) if made else None

    def _draft(self, row: int, at_most: int) -> tuple[int, ...]:
        table = self._table
        at_most = min(at_most, table.space(row)) if at_most > 0 and self._can_verify(row) else 0
        if at_most < 1:
            return ()
        drafts = self.drafter(table.tokens[row, : table.num_tokens[row]], at_most)
        return _until(drafts.tolist(), self._ends.union(table.sequence(row).sampling.stop_token_ids))

    def _can_verify(self, row: int) -> bool:
        rows = np.array([row])
        has_grammar = self._masks is not None and self._masks.has_any(rows)
        return not has_grammar and not self._sampler.changes_logits(rows, self._table.num_tokens[rows])


def _until(token_ids: Sequence[int], ends: frozenset[int]) -> tuple[int, ...]:
    # An answer ends with such a token, which single steps choose.
    last = next((at for at, token_id in enumerate(token_ids) if token_id in ends), len(token_ids))
    return tuple(token_ids[:last])
