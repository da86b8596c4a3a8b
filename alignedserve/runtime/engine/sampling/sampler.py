"""Sampling by each sequence's parameters. Greedy rows without options cost one argmax."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.core.errors import FailureKind
from alignedserve.core.request import MAX_LOGPROBS, TokenLogprob
from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence, are_same
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.engine.sampling.logits_processors import LogitsChanges, LogitsProcessor
from alignedserve.runtime.grammar.token_masks import StepMasks, TokenMasks
from kernels.cpu.decode_pass import HighestLogits
from kernels.gpu_dispatch import fused_kernels
from kernels.sampling import Filters, RowParameters, greedy, mask_tokens_, sample, top_logprobs, uniforms

_LEAST_TEMPERATURE = 1e-30  # whose inverse is finite; near it only the likeliest have any weight


@dataclass(frozen=True, slots=True)
class Choice:
    """One token per requested row, in order."""

    token_ids: IntArray
    is_usable: npt.NDArray[np.bool_]  # False: the logits were not numbers, the token is meaningless
    logprobs: dict[int, TokenLogprob]  # by position among the rows, where requested


class Draw(NamedTuple):
    """Tokens chosen on the device, in the order of `rows`; see Choice."""

    rows: IntArray
    logits: Tensor | None  # None: they were not kept, as no row asks for log-probabilities
    token_ids: Tensor  # int64
    is_usable: Tensor  # bool
    places: IntArray | None = None  # of `rows` in the tensors; None: they are those of all rows, in order

    def only(self, places: IntArray) -> "Draw":
        return self._replace(rows=self.rows[places], places=places)


class _KnownParameters(NamedTuple):
    version: int  # of the sampler's rows
    rows: IntArray
    is_random: bool  # of any row; else draws are not looked at
    parameters: RowParameters


class Sampler:
    """Sampling state of the engine's rows. A row is added before it is sampled and removed when it is freed."""

    def __init__(
        self,
        *,
        max_sequences: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        masks: TokenMasks | None = None,
        counts_on_device: bool = False,
    ) -> None:
        """`masks`: empty; None: no sequence may have a grammar. `counts_on_device`: for penalties, see SeenRows."""
        self._masks = masks
        self._vocab_size = vocab_size
        self._sequences: list[NewSequence | None] = [None] * max_sequences
        self._logits_processor = LogitsProcessor(
            max_sequences=max_sequences, vocab_size=vocab_size, eos_token_ids=eos_token_ids, on_device=counts_on_device
        )
        self._prompt_lens = np.zeros(max_sequences, np.int64)
        self._temperatures = np.zeros(max_sequences, np.float32)
        self._top_ks = np.zeros(max_sequences, np.int64)
        self._top_ps = np.ones(max_sequences, np.float32)
        self._min_ps = np.zeros(max_sequences, np.float32)
        self._seeds = np.zeros(max_sequences, np.int64)
        self._wants_logprobs = np.zeros(max_sequences, np.bool_)
        self._wanting: set[int] = set()  # the rows that do
        self._version = 0  # changes whenever a row's parameters do
        self._known: _KnownParameters | None = None

    def add(self, row: int, sequence: NewSequence) -> None:
        params = sequence.sampling
        self._version += 1
        self._sequences[row] = sequence
        self._prompt_lens[row] = sequence.prompt_len
        self._temperatures[row] = max(params.temperature, _LEAST_TEMPERATURE) if params.temperature else 0.0
        self._top_ks[row] = params.top_k
        self._top_ps[row] = params.top_p
        self._min_ps[row] = params.min_p
        self._seeds[row] = params.seed or 0
        self._wants_logprobs[row] = params.num_logprobs is not None
        if params.num_logprobs is not None:
            self._wanting.add(row)
        self._logits_processor.add(row, sequence)
        if params.grammar:
            assert self._masks is not None, "a grammar for an engine that has none"
            generated, who = sequence.token_ids[sequence.prompt_len :], (sequence.tenant, sequence.is_real_time)
            self._masks.add(row, params, generated, client=who[0], is_real_time=who[1])

    def remove(self, row: int) -> None:
        self._sequences[row] = None
        self._wanting.discard(row)
        self._logits_processor.remove(row)
        if self._masks is not None:
            self._masks.remove(row)

    def start_masks(self, rows: IntArray, num_tokens: IntArray) -> "Future[StepMasks] | None":
        """Begin to compute the masks of rows that have a grammar, beside the forward pass; None: none of them has."""
        if self._masks is None or not self._masks.has_any(rows):
            return None
        return self._masks.start(rows, self._logits_processor.is_early(rows, num_tokens))

    def failure(self, row: int) -> tuple[FailureKind, str] | None:
        reason = None if self._masks is None else self._masks.failure(row)
        if reason is not None:
            return FailureKind.GRAMMAR, reason
        sequence = self._sequences[row]
        if sequence is None or not sequence.sampling.excludes_tokens:
            return None
        why = "allowed_token_ids, bad_words and what the answer must match leave no token to choose"
        return FailureKind.UNSERVABLE, why

    def choose(self, rows: IntArray, num_tokens: IntArray, logits: Tensor) -> Choice:
        """Choose tokens: `start` and `finish`, with the host waiting in between."""
        masks = self.start_masks(rows, num_tokens)
        ready = None if masks is None else masks.result()
        draw = self.start(rows, num_tokens, logits, ready, self.plan(rows, num_tokens))
        return self.finish(draw, draw.token_ids.cpu().numpy(), draw.is_usable.cpu().numpy())

    def wants_highest_alone(self, rows: IntArray, num_tokens: IntArray) -> bool:
        """Return whether the highest logit of each of these rows is all that `start` would use."""
        is_more = (self._temperatures[rows] > 0.0) | self._wants_logprobs[rows]
        return not is_more.any() and not self.changes_logits(rows, num_tokens)

    def changes_logits(self, rows: IntArray, num_tokens: IntArray) -> bool:
        """Return whether options of these rows change logits, as penalties do."""
        return self._logits_processor.changes(rows, num_tokens)

    def can_start_ahead(self, rows: IntArray) -> bool:
        """Return whether `start` can choose for these rows before their last tokens are on the host."""
        has_masks = self._masks is not None and self._masks.has_any(rows)
        return not has_masks and not self._logits_processor.needs_tokens(rows)

    def can_begin_ahead(self, rows: IntArray) -> bool:
        """Return whether `start` can choose the first tokens of these rows beside rows whose last ones are unknown."""
        return self.can_start_ahead(rows) and not self._logits_processor.counts_tokens(rows)

    def wants_logprobs(self, rows: IntArray) -> bool:
        return bool(self._wanting) and bool(self._wants_logprobs[rows].any())

    def start_with(self, rows: IntArray, highest: HighestLogits) -> Draw:
        """Choose as `start` does, for rows that need only their highest logits."""
        return Draw(rows, None, highest.token_ids, highest.values.isfinite())

    def plan(self, rows: IntArray, num_tokens: IntArray) -> LogitsChanges | None:
        """Return what `start` is to change in the logits of these rows, when a step is launched; None: nothing. What
        was planned is to be started, in the same order."""
        return self._logits_processor.plan(rows, num_tokens)

    def start(
        self,
        rows: IntArray,
        num_tokens: IntArray,
        logits: Tensor,
        masks: StepMasks | None = None,
        changes: LogitsChanges | None = None,
        last: Tensor | None = None,
    ) -> Draw:
        """Choose the next token of each row, on the device of the logits. rows [n]; num_tokens [n]: tokens of each row
        so far; logits [n, vocab_size] of any dtype, changed where no row asks for log-probabilities of all tokens;
        masks: of the rows that have a grammar; changes: from `plan`; last [n]: the rows' last tokens, if they were not
        recorded when that was called; -1 where they were, of rows whose tokens are not counted."""
        adjusted = logits if changes is None else changes.apply(logits, last)
        if masks is not None:
            adjusted = self._masked(rows, logits, adjusted, masks)
        kernels = fused_kernels("token_sampling", adjusted.device, adjusted.dtype)
        if kernels is not None and self._vocab_size <= kernels.MOST_TOKENS:
            parameters = self._parameters(rows, num_tokens, logits.device)
            return Draw(rows, logits, *kernels.sample_tokens(adjusted, parameters))
        random_at = np.flatnonzero(self._temperatures[rows] > 0.0)
        if not len(random_at):
            token_ids, is_usable = greedy(adjusted)
        elif len(random_at) == len(rows):
            token_ids, is_usable = self._sample(rows, num_tokens, adjusted.float())
        else:
            token_ids, is_usable = greedy(adjusted)
            at = torch.from_numpy(random_at).to(logits.device)
            token_ids[at], is_usable[at] = self._sample(rows[random_at], num_tokens[random_at], adjusted[at].float())
        return Draw(rows, logits, token_ids, is_usable)

    def warm_up(self, logits: Tensor) -> None:
        """Compile the GPU's kernel, which takes seconds, before serving. For logits [1, vocab_size] of this dtype and,
        as penalties produce them, of float32."""
        row, num_tokens = np.zeros(1, np.int64), np.zeros(1, np.int64)
        for variant in (logits, logits.float()):
            kernels = fused_kernels("token_sampling", variant.device, variant.dtype)
            if kernels is not None and self._vocab_size <= kernels.MOST_TOKENS:
                kernels.sample_tokens(variant, self._parameters(row, num_tokens, variant.device))

    def finish(self, draw: Draw, token_ids: IntArray, is_usable: npt.NDArray[np.bool_]) -> Choice:
        """Record the tokens of `start`, now on the host, for later penalties; return them with log-probabilities."""
        self._logits_processor.record(draw.rows, token_ids)
        if self._masks is not None:
            self._masks.record(draw.rows, token_ids)
        return Choice(token_ids, is_usable, self._logprobs(draw))

    def record(self, row: int, token_ids: Sequence[int]) -> None:
        self._logits_processor.record(np.full(len(token_ids), row), np.array(token_ids, np.int64))

    def _masked(self, rows: IntArray, logits: Tensor, adjusted: Tensor, masks: StepMasks) -> Tensor:
        if adjusted is logits and self._wants_logprobs[rows].any():
            adjusted = logits.clone()
        mask_tokens_(adjusted, *to_device([masks.at, masks.bits], adjusted.device))
        return adjusted

    def _sample(self, rows: IntArray, num_tokens: IntArray, logits: Tensor) -> tuple[Tensor, Tensor]:
        parameters = self._parameters(rows, num_tokens, logits.device)
        return sample(
            logits / parameters.temperatures[:, None],
            Filters(parameters.top_k, parameters.top_p, parameters.min_p),
            parameters.draws,
        )

    def _parameters(self, rows: IntArray, num_tokens: IntArray, device: torch.device) -> RowParameters:
        known = self._known
        if known is None or known.version != self._version or not are_same(rows, known.rows):
            columns = (self._temperatures, self._top_ks, self._top_ps, self._min_ps)
            on_device = to_device([*(column[rows] for column in columns), np.zeros(len(rows))], device)
            is_random = bool(self._temperatures[rows].any())
            self._known = known = _KnownParameters(self._version, rows, is_random, RowParameters(*on_device))
        if not known.is_random:
            return known.parameters
        draws = uniforms(self._seeds[rows], num_tokens - self._prompt_lens[rows])
        return known.parameters._replace(draws=to_device([draws], device)[0])

    def _logprobs(self, draw: Draw) -> dict[int, TokenLogprob]:
        rows, logits = draw.rows, draw.logits
        if not self._wanting:
            return {}
        positions = np.flatnonzero(self._wants_logprobs[rows])
        if not len(positions):
            return {}
        assert logits is not None, "log-probabilities of logits that were not kept"
        (at,) = to_device([positions if draw.places is None else draw.places[positions]], logits.device)
        counts = [self._num_logprobs(int(rows[position])) for position in positions.tolist()]
        entries = logprob_entries(logits[at].float(), draw.token_ids[at], counts)
        return dict(zip(positions.tolist(), entries, strict=True))

    def _num_logprobs(self, row: int) -> int:
        sequence = self._sequences[row]
        assert sequence is not None, f"row {row} was never added"
        return sequence.sampling.num_logprobs or 0


def logprob_entries(logits: Tensor, token_ids: Tensor, counts: list[int]) -> list[TokenLogprob]:
    """Return log-probabilities of each row's token and its likeliest ones; logits [rows, vocabulary] float32."""
    # As many for every batch: which of several tokens that are as likely comes last depends on how many are asked for.
    num_top = MAX_LOGPROBS if any(counts) else 0
    chosen, values, ids = (tensor.tolist() for tensor in top_logprobs(logits, token_ids, num_top))
    num_likelier = _counts(logits > logits.gather(1, token_ids[:, None]))
    return [
        TokenLogprob(
            token_id, chosen[row], tuple(zip(ids[row][:count], values[row][:count], strict=True)), num_likelier[row] + 1
        )
        for row, (token_id, count) in enumerate(zip(token_ids.tolist(), counts, strict=True))
    ]


def _counts(is_counted: Tensor) -> list[int]:
    if is_counted.is_cpu:
        return [int(np.count_nonzero(row)) for row in is_counted.numpy()]
    counts: list[int] = is_counted.sum(-1).tolist()
    return counts
