"""Tokens that grammars force, computed several at once in the step that would compute the first of them.

They need no logits and no randomness, and are those that the same steps one by one would choose: a sequence has the
same tokens with and without, whatever else is in its steps. They take the slots that are left in its blocks, so that
nobody has to allocate for them, or to know of them before the step has ended.
"""

from collections.abc import Collection

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SampledToken
from alignedserve.runtime.attention.sequence_table import SequenceTable
from alignedserve.runtime.engine.sampling.sampler import Sampler
from alignedserve.runtime.engine.steps.step_output import Forced, Slices
from alignedserve.runtime.grammar.token_masks import TokenMasks

# Of all sequences in one step: others in it wait for them.
_MAX_TOKENS = 128


class JumpAhead:
    """Appends forced tokens to sequences that are about to decode."""

    def __init__(self, table: SequenceTable, masks: TokenMasks | None, sampler: Sampler) -> None:
        self._table = table
        self._masks = masks
        self._sampler = sampler

    def take(self, slices: Slices) -> Forced:
        """Append what is forced after the last token of each decode among the slices; return it by sequence."""
        if self._masks is None or not self._masks.may_force:
            return {}
        forced: Forced = {}
        num_left = _MAX_TOKENS
        for request_id, num_tokens in slices:
            token_ids = self._take(request_id, num_left) if num_tokens == 1 else ()
            if token_ids:
                forced[request_id] = token_ids
                num_left -= len(token_ids)
        return forced

    def _take(self, request_id: RequestId, at_most: int) -> tuple[int, ...]:
        assert self._masks is not None, "nothing is forced without masks"
        table, row = self._table, self._table.row(request_id)
        count = int(table.num_tokens[row])
        token_ids = self._masks.take_forced(row, min(at_most, self._space(row)))
        if token_ids:
            table.tokens[row, count : count + len(token_ids)] = token_ids
            table.num_tokens[row] = count + len(token_ids)
            self._sampler.record(row, token_ids)
        return token_ids

    def _space(self, row: int) -> int:
        table = self._table
        count, num_computed = int(table.num_tokens[row]), int(table.num_computed[row])
        if count - num_computed != 1 or table.is_hidden[row]:
            return 0
        limit = table.sequence(row).sampling.max_tokens
        slots = int(table.num_blocks[row]) * table.block_size
        return min(slots, table.max_context_len, int(table.prompt_lens[row]) + limit - 1) - count


def forced_counts(forced: Forced, failed: Collection[RequestId]) -> tuple[tuple[RequestId, int], ...]:
    return tuple([(request_id, len(token_ids)) for request_id, token_ids in forced.items() if request_id not in failed])


def with_forced(forced: Forced, sampled: list[SampledToken]) -> list[SampledToken]:
    if not forced:
        return sampled
    tokens: list[SampledToken] = []
    for token in sampled:
        tokens += [SampledToken(token.request_id, token_id) for token_id in forced.get(token.request_id, ())]
        tokens.append(token)
    return tokens
