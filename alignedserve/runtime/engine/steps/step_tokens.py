"""The tokens that steps choose, on the device and on their way to the host, and tokens that grammars force."""

from collections import deque
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SampledToken
from alignedserve.runtime.attention.sequence_table import IntArray, SequenceTable, are_same
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.streams import Stream
from alignedserve.runtime.engine.sampling.sampler import Draw, Sampler
from alignedserve.runtime.engine.steps.step import Forced, Slices
from alignedserve.runtime.grammar.token_masks import TokenMasks

NO_TOKEN = -1  # in place of a token where logits were not numbers
_NUM_PARTS = 2  # a step may be divided into so many launches


class ChosenTokens:
    """The tokens of the step that was enqueued last, in the places that its launches have for their sampled rows."""

    def __init__(self, max_sequences: int, device: torch.device, *, launches_ahead: bool) -> None:
        """`launches_ahead`: a step may be enqueued before the host has read the tokens of the one before."""
        self._tokens = torch.zeros(_NUM_PARTS * max_sequences, dtype=torch.int64, device=device)
        self._ascending = np.arange(_NUM_PARTS * max_sequences)
        self._no_token = torch.tensor(NO_TOKEN, device=device)
        # One for each launch of a step and for the step behind it; none where the device is the host, which has read
        # them before the next.
        needs_copies = device.type != "cpu" or launches_ahead
        num_copies = _NUM_PARTS + 1 if needs_copies else 0
        self._on_host = deque(_like(self._tokens[:max_sequences]) for _ in range(num_copies))
        # Of a step within another, which is waited for before there is one more.
        self._within_on_host = _like(self._tokens[:max_sequences]) if needs_copies else None

    def choose(self, draw: Draw, first: int) -> Draw:
        """Take what was drawn in places from `first` on, and return it; for the compute stream."""
        places = slice(first, first + len(draw.rows))
        torch.where(draw.is_usable, draw.token_ids, self._no_token, out=self._tokens[places])
        return draw

    def inputs(self, places: IntArray | None) -> Tensor | None:
        """Return the tokens at these places, for the next step; None: it has its own. For the compute stream."""
        if places is None:
            return None
        if are_same(places, self._ascending[: len(places)]):  # as in most steps
            return self._tokens[: len(places)].clamp(min=0)
        (at,) = to_device([places], self._tokens.device)
        return self._tokens.index_select(0, at).clamp_(min=0)  # a sequence without a token ends

    def copy_out(self, stream: Stream, places: slice, *, is_within: bool = False) -> Tensor:
        """Enqueue the copy of tokens to the host; return where they will be, until the step after next.

        `is_within`: of a step between two layers of another, until the next such one.
        """
        tokens = self._tokens[places]
        if not len(tokens) or self._within_on_host is None:
            return tokens
        if not is_within:
            self._on_host.rotate()
        on_host = (self._within_on_host if is_within else self._on_host[0])[: len(tokens)]
        stream.copy_out(tokens, on_host)
        return on_host


def last_tokens(inputs: Tensor | None, count: int) -> Tensor | None:
    """Return the last tokens of so many sampled rows, the first of which decode from these `inputs`.

    NO_TOKEN: it is in the table, as of prompts that end beside decodes; None: so are all.
    """
    if inputs is None or inputs.shape[0] >= count:
        return inputs
    return pad(inputs, (0, count - inputs.shape[0]), value=NO_TOKEN)


def _like(tokens: Tensor) -> Tensor:
    on_host = torch.zeros(tokens.shape, dtype=tokens.dtype)
    return on_host if tokens.device.type == "cpu" else on_host.pin_memory()


# Of all sequences in one step: the rest of the step waits for them.
_MAX_TOKENS = 128


class JumpAhead:
    """Appends tokens that grammars force to sequences that are about to decode: one step computes them together.

    Single steps would choose the same tokens. They take the slots that are left in a sequence's blocks, and so nobody
    allocates for them, or knows of them before the step has ended.
    """

    def __init__(self, table: SequenceTable, masks: TokenMasks | None, sampler: Sampler) -> None:
        self._table = table
        self._masks = masks
        self._sampler = sampler

    def take(self, slices: Slices) -> Forced:
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
