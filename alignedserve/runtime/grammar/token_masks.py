"""Masks of the next token for the rows of an engine, computed in threads from the moment a token is chosen.

A mask is a row of bits, one per token, the lowest of a word first.

A heavy grammar takes long for a mask, or has rules of a client, which may take long at any token. Its masks have a
thread of their own, and steps go on without its row (`unready`). The thread has the usual priority, as a thread that is
preempted with the interpreter's lock holds up everybody; a native thread of low priority computes without the lock.
Seconds are counted: an answer has ANSWER_S, the real-time answers of a client ClientSeconds. Beyond them the answer
fails."""

import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from alignedserve.core.request import SamplingParams
from alignedserve.process.turn_threads import TurnThreads
from alignedserve.process.worker_threads import run_quietly
from alignedserve.runtime.grammar.client_seconds import CLIENT_S, ClientSeconds
from alignedserve.runtime.grammar.compiler import (
    CLIENT_RULES,
    BlankRun,
    GrammarCompiler,
    GrammarError,
    failure_of,
    has_free_blanks,
    is_outgrown,
    is_spoilt,
)

# Of one call of `foresee`: each takes some 50 microseconds to tokenise.
_MAX_FORCED = 32
_HEAVY_S = 0.003  # of a core, for one mask; of schemas in use one in a hundred takes 0.6 ms
_MASK_S = 0.0003  # that a mask may take among others before each is measured alone
_THREADS = "/proc/self/task"
_CLOCK_OF_THREAD = 6  # in Linux's numbers of clocks, behind that of the thread
ANSWER_S = 2.0  # of a core, for the masks of a heavy grammar
_UNREADY_S = 0.001  # a step waits so long for a heavy mask, once for each
_IDLE_S = 0.002  # and so long where it has nothing else to compute; a chat that comes waits for it
Bits = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int64]
Consume = Callable[[LLMatcher, int], object]


class AnswerMatcher:
    """Follows one answer. Tokens are noted at once and matched when the state is needed, on the thread of masks."""

    def __init__(self, compiled: "Future[LLMatcher]", token_ids: Sequence[int], *, counts_tokens: bool = False) -> None:
        """`token_ids`: the answer so far; a resumed one has the state of one that was never interrupted.
        `counts_tokens`: the grammar bounds the tokens of its rules."""
        self.compiled = compiled
        self._counts_tokens = counts_tokens
        self._matcher: LLMatcher | None = None
        self._token_ids = list(token_ids)
        self._unmatched = list(token_ids)
        self._forced: list[int] = []  # matched already, though the answer does not have them yet
        self._num_matched = 0

    @property
    def is_compiled(self) -> bool:
        return self._matcher is not None or self.compiled.done()

    @property
    def forced(self) -> Sequence[int]:
        return self._forced

    @property
    def place(self) -> int:
        """Return how many tokens were matched. The next mask stays the same until this changes or a token is noted."""
        return self._num_matched

    @property
    def is_behind(self) -> bool:
        return bool(self._unmatched)

    def append(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids
        num_forced = min(len(token_ids), len(self._forced))
        assert list(token_ids[:num_forced]) == self._forced[:num_forced], "another token than the forced one"
        del self._forced[:num_forced]
        if len(token_ids) > num_forced:
            self._unmatched += token_ids[num_forced:]

    def restart(self, compiled: "Future[LLMatcher]") -> None:
        self.compiled, self._matcher = compiled, None
        self._unmatched, self._forced, self._num_matched = list(self._token_ids), [], 0

    def current(self, consume: Consume | None = None) -> LLMatcher:
        """Return the matcher, after the answer and its forced tokens; it is in error where these do not match. Waits
        until it is compiled. Raises GrammarError if it cannot be. `consume`: in place of the matcher's own."""
        if self._matcher is None:
            self._matcher = self.compiled.result().deep_copy()
        unmatched, self._unmatched = self._unmatched, []
        if unmatched:
            self._match(self._matcher, unmatched, consume)
            self._num_matched += len(unmatched)
        return self._matcher

    def _match(self, matcher: LLMatcher, token_ids: list[int], consume: Consume | None) -> None:
        if consume is None and not self._counts_tokens:
            matcher.consume_tokens(token_ids)
            return
        for token_id in token_ids:
            if self._counts_tokens:
                # Forced bytes that a mask finds count for the token before it: else a bound is met elsewhere.
                matcher.compute_ff_tokens()
            (consume or LLMatcher.consume_token)(matcher, token_id)

    def foresee(self, ends: Collection[int]) -> None:
        """Match the tokens that the grammar forces next, up to one of `ends`; raises GrammarError as `current` does. It
        matches one token after the other. Each is the only one that a mask would allow at its place, in the model's own
        tokenisation."""
        matcher, until_s = self.current(), time.thread_time() + _HEAVY_S
        while len(self._forced) < _MAX_FORCED and time.thread_time() < until_s:  # it holds the interpreter's lock
            forced = matcher.compute_ff_tokens()
            if not forced or forced[0] in ends or not matcher.consume_token(forced[0]):
                return
            self._forced.append(forced[0])
            self._num_matched += 1


class LastResorts:
    """Takes some tokens out of masks."""

    __slots__ = ("_masks", "_words")

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        masks: dict[int, int] = {}
        for token_id in token_ids:
            masks[token_id >> 5] = masks.get(token_id >> 5, 0) | 1 << (token_id & 31)
        self._words = np.array(list(masks), np.int64)
        self._masks = np.array(list(masks.values()), np.uint32).view(np.int32)

    def remove_from(self, bits: Bits, rows: IntArray) -> None:
        """Clear these tokens in the masks [rows, words]; a row that would become empty stays as it is."""
        before = bits[rows[:, None], self._words]
        has_any = (before & self._masks).any(axis=1)
        if not has_any.any():  # as at most places in answers
            return
        rows, before = rows[has_any], before[has_any]
        bits[rows[:, None], self._words] = before & ~self._masks
        is_empty = ~bits[rows].any(axis=1)
        bits[rows[is_empty][:, None], self._words] = before[is_empty]


class StepMasks(NamedTuple):
    """The masks of one step."""

    at: IntArray  # places of rows with a mask, in the step's rows
    bits: Bits  # [masks, words]; a row of zeros: its grammar failed


@dataclass(slots=True)
class _HeavyMask:
    """The mask of a heavy grammar's row."""

    bits: Bits  # [2, words]: the mask, and a row for the failed matcher beside it
    ready: "Future[None] | None" = None  # None: it was never begun
    was_awaited: bool = False  # by a step
    spent_s: float = 0.0  # by the answer, of a core


@dataclass(slots=True)
class _Constrained:
    row: int
    grammar: str
    matcher: AnswerMatcher
    client: str
    is_real_time: bool
    ends: frozenset[int]  # tokens that may end the answer
    has_jumps: bool  # forced tokens are taken several at once
    unwanted: LastResorts | None  # tokens that may end the answer only if nothing else may follow
    unwanted_early: LastResorts | None  # the same before the answer has its minimal length
    blanks: BlankRun | None  # None: it may have any number in a row
    masked_at: int = -1  # the matcher's place that the row's bits are of
    failure: str | None = None
    is_alone: bool = False  # its matcher is of no other answer
    heavy: _HeavyMask | None = None  # None: its masks take next to no time
    is_removed: bool = False

    @property
    def is_awaited(self) -> bool:
        return self.heavy is not None and self.heavy.ready is not None

    @property
    def has_mask(self) -> bool:
        return not self.matcher.is_behind and self.matcher.place == self.masked_at

    def append(self, token_ids: Sequence[int]) -> None:
        self.matcher.append(token_ids)
        if self.blanks is not None:
            self.blanks.append(token_ids)


class TokenMasks:
    """The grammars of an engine's rows. A row is added before its first step and removed when it is freed. Tokens are
    matched, and the masks behind them computed, on one thread with helpers; its work of one step is over before tokens
    of the next are recorded."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        num_threads: int,
        jumps_ahead: bool = False,
        may_skip: bool = True,
    ) -> None:
        """`jumps_ahead`: tokens that a grammar forces are foreseen, for `take_forced`. `may_skip`: steps may go on
        without a row."""
        self._compiler = compiler
        self._jumps_ahead = jumps_ahead
        self._may_skip = may_skip
        self._foreseen: Future[None] | None = None
        self._ahead: Future[None] | None = None
        self._bits: Bits = np.zeros((0, -(-vocab_size // 32)), np.int32)  # of every row; the thread's own
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._resorts: dict[tuple[int, ...], LastResorts] = {}
        self._rows: dict[int, _Constrained] = {}
        self._thread = ThreadPoolExecutor(1, "masks")
        self._executor = LLExecutor(num_threads)
        self._measures_each = False  # of the next masks: all together took long
        self._heavy_thread = TurnThreads(1, "heavy-grammars")
        self._quiet: _QuietExecutor | None = None
        self._clients = ClientSeconds()

    def add(
        self,
        row: int,
        sampling: SamplingParams,
        generated_token_ids: tuple[int, ...],
        *,
        client: str = "",
        is_real_time: bool = True,
    ) -> None:
        ends = self._eos_token_ids if sampling.ignore_eos else ()
        early_ends = (*self._eos_token_ids, *sampling.stop_token_ids) if sampling.min_tokens else ends
        compiled = self._compiler.compile(sampling.grammar)
        matcher = AnswerMatcher(compiled, generated_token_ids, counts_tokens="max_tokens" in sampling.grammar)
        is_heavy = CLIENT_RULES in sampling.grammar or sampling.grammar in self._compiler.heavy
        heavy = self._heavy_mask() if is_heavy else None
        has_jumps = self._jumps_ahead and _may_jump(sampling) and heavy is None
        all_ends = frozenset((*self._eos_token_ids, *sampling.stop_token_ids))
        unwanted = self._last_resorts(ends), self._last_resorts(early_ends)
        blanks = None if has_free_blanks(sampling.grammar) else BlankRun(generated_token_ids)
        who = client, is_real_time
        self._rows[row] = added = _Constrained(
            row, sampling.grammar, matcher, *who, all_ends, has_jumps, *unwanted, blanks, heavy=heavy
        )
        if heavy is not None and generated_token_ids:  # the first mask was computed with the grammar
            self._begin_heavy(added, heavy)

    def remove(self, row: int) -> None:
        answer = self._rows.pop(row, None)
        if answer is not None:
            answer.is_removed = True
            self._compiler.release(answer.grammar)
        if not self._rows:
            self._resorts.clear()

    def record(self, rows: IntArray, chosen: IntArray) -> None:
        """Note the tokens that were chosen for these rows, negative: none could be; begin what follows from them."""
        if not self._rows:
            return
        if self._ahead is not None:
            self._ahead.result()
            self._ahead = None
        continued = []
        for row, token_id in zip(rows.tolist(), chosen.tolist(), strict=True):
            answer = self._rows.get(row)
            if answer is not None and token_id >= 0:
                answer.append((token_id,))
                if token_id not in answer.ends:
                    continued.append(answer)
        for answer in continued:
            if answer.heavy is not None:
                self._begin_heavy(answer, answer.heavy)
        others = [answer for answer in continued if answer.heavy is None]
        jumping = [answer for answer in others if answer.has_jumps and not answer.matcher.forced]
        if jumping:
            self._foreseen = self._thread.submit(self._foresee, jumping)
        if others:
            self._ahead = self._thread.submit(self._fill, others)

    @property
    def has_heavy(self) -> bool:
        return self._may_skip and any(answer.heavy is not None for answer in self._rows.values())

    def unready(self, rows: Sequence[int], num_slices: int) -> set[int]:
        """Return the rows whose heavy masks are still being computed, after a short wait for each mask.

        `num_slices`: of the step; where all of them are such rows, it waits longer."""
        known = (self._rows.get(row) for row in rows)
        heavy = {answer.row: answer.heavy for answer in known if answer is not None and answer.heavy is not None}
        awaited = {row: mask.ready for row, mask in heavy.items() if mask.ready is not None and not mask.ready.done()}
        fresh = [ready for row, ready in awaited.items() if not heavy[row].was_awaited]
        for row in awaited:
            heavy[row].was_awaited = True
        if fresh and len(rows) == num_slices:  # no prompt waits with them
            wait(fresh, _UNREADY_S)
        if awaited and len(awaited) == num_slices:
            wait(awaited.values(), _IDLE_S, FIRST_COMPLETED)
        return {row for row, ready in awaited.items() if not ready.done()}

    @property
    def may_force(self) -> bool:
        """Return whether `take_forced` may find tokens."""
        return self._foreseen is not None

    def take_forced(self, row: int, at_most: int) -> tuple[int, ...]:
        """Note, as `record` does, and return the next tokens of the row that its grammar forces. Only some of them are
        known: those that follow the token chosen last. Waits until they are."""
        answer = self._rows.get(row)
        if answer is None or not answer.has_jumps or at_most < 1:
            return ()
        if self._foreseen is not None:
            self._foreseen.result()
        token_ids = tuple(answer.matcher.forced[:at_most])
        answer.append(token_ids)
        return token_ids

    def has_any(self, rows: IntArray) -> bool:
        return bool(self._rows) and any(row in self._rows for row in rows.tolist())

    def failure(self, row: int) -> str | None:
        answer = self._rows.get(row)
        return None if answer is None else answer.failure

    def start(self, rows: IntArray, is_early: npt.NDArray[np.bool_]) -> "Future[StepMasks]":
        """Begin to compute the masks of a step, as far as they are not yet. `is_early`: which of its rows lack tokens
        of their minimal length. No other method may be called before the result is there."""
        constrained = [(at, self._rows[row]) for at, row in enumerate(rows.tolist()) if row in self._rows]
        return self._thread.submit(self._compute, constrained, is_early)

    def close(self) -> None:
        """End the threads."""
        self._thread.shutdown()
        self._heavy_thread.close(waits=False)

    def _last_resorts(self, token_ids: tuple[int, ...]) -> LastResorts | None:
        known = tuple(token_id for token_id in token_ids if 0 <= token_id < self._vocab_size)
        return self._resorts.setdefault(known, LastResorts(known)) if known else None

    def _heavy_mask(self) -> _HeavyMask:
        return _HeavyMask(np.zeros((2, self._bits.shape[1]), np.int32))

    def _make_heavy(self, answer: _Constrained) -> None:
        self._compiler.heavy.add(answer.grammar)
        answer.heavy, answer.has_jumps = self._heavy_mask(), False

    def _begin_heavy(self, answer: _Constrained, heavy: _HeavyMask) -> None:
        compute = partial(self._fill_heavy, answer, heavy)
        heavy.ready = self._heavy_thread.submit(compute, is_real_time=answer.is_real_time, client=answer.client)
        heavy.was_awaited = False

    # --- on the thread

    def _compute(self, constrained: list[tuple[int, _Constrained]], is_early: npt.NDArray[np.bool_]) -> StepMasks:
        self._make_room([answer for _, answer in constrained])
        self._fill([answer for _, answer in constrained if not answer.matcher.forced and not answer.is_awaited])
        bits = self._bits[[answer.row for _, answer in constrained]]
        unwanted: dict[LastResorts, list[int]] = {}
        for index, (at, answer) in enumerate(constrained):
            if answer.heavy is not None and answer.heavy.ready is not None:
                answer.heavy.ready.result()
                bits[index] = answer.heavy.bits[0]
            if answer.matcher.forced or answer.failure is not None:
                bits[index] = 0
            if answer.matcher.forced:
                token_id = answer.matcher.forced[0]
                (bits[index]).view(np.uint32)[token_id >> 5] = 1 << (token_id & 31)
            resorts = answer.unwanted_early if is_early[at] else answer.unwanted
            if resorts is not None:
                unwanted.setdefault(resorts, []).append(index)
        for resorts, places in unwanted.items():
            resorts.remove_from(bits, np.array(places, np.int64))
        self._remove_blanks(constrained, bits)
        return StepMasks(np.array([at for at, _ in constrained], np.int64), bits)

    def _remove_blanks(self, constrained: list[tuple[int, _Constrained]], bits: Bits) -> None:
        tokens = self._compiler.blank_tokens
        resorts = self._last_resorts(tokens.token_ids) if tokens is not None else None
        if tokens is None or resorts is None:
            return
        places = [
            index
            for index, (_, answer) in enumerate(constrained)
            if answer.blanks is not None and not answer.matcher.forced and answer.blanks.is_full(tokens)
        ]
        if places:
            resorts.remove_from(bits, np.array(places, np.int64))

    def _fill(self, answers: list[_Constrained]) -> None:
        self._make_room(answers)
        lacking = [answer for answer in answers if not answer.has_mask and answer.failure is None]
        while lacking:
            lacking = self._write_bits(lacking)
            for answer in lacking:
                self._restart(answer)

    def _restart(self, answer: _Constrained) -> None:
        answer.is_alone |= is_outgrown(answer.matcher.current())
        compile_again = self._compiler.compile_alone if answer.is_alone else self._compiler.compile_anew
        answer.matcher.restart(compile_again(answer.grammar, answer.matcher.compiled))

    def _write_bits(self, lacking: list[_Constrained]) -> list[_Constrained]:
        matchers: list[tuple[LLMatcher, int]] = []
        masked: list[_Constrained] = []
        for answer in lacking:
            try:
                matchers.append((answer.matcher.current(), answer.row))
                masked.append(answer)
            except GrammarError as error:
                answer.failure = str(error)
        if self._measures_each:
            self._compute_each(masked, matchers)
        elif matchers:
            bits, began = self._bits, time.monotonic()
            self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.strides[0], len(bits))
            self._measures_each = time.monotonic() - began > _HEAVY_S + _MASK_S * len(matchers)
        return [answer for answer, (matcher, _) in zip(masked, matchers, strict=True) if _must_restart(answer, matcher)]

    def _compute_each(self, masked: list[_Constrained], matchers: list[tuple[LLMatcher, int]]) -> None:
        self._measures_each = False
        for answer, (matcher, row) in zip(masked, matchers, strict=True):
            began = time.thread_time()
            bits = self._bits[row]
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if time.thread_time() - began > _HEAVY_S:
                self._make_heavy(answer)

    def _foresee(self, jumping: list[_Constrained]) -> None:
        for answer in jumping:
            if answer.matcher.is_compiled:
                began = time.thread_time()
                with suppress(GrammarError):  # told by the next mask
                    answer.matcher.foresee(answer.ends)
                if time.thread_time() - began > 2 * _HEAVY_S:  # its last token took half of that
                    self._make_heavy(answer)

    def _make_room(self, answers: list[_Constrained]) -> None:
        num_rows = max((answer.row + 1 for answer in answers), default=0)
        if num_rows > len(self._bits):
            more = np.zeros((max(num_rows, 2 * len(self._bits)) - len(self._bits), self._bits.shape[1]), np.int32)
            self._bits = np.concatenate([self._bits, more])

    # --- on the thread of heavy grammars

    def _fill_heavy(self, answer: _Constrained, heavy: _HeavyMask) -> None:
        if answer.is_removed or answer.failure is not None:
            return
        if self._quiet is None:
            assert self._compiler.failed_matcher is not None, "a matcher without a vocabulary"
            self._quiet = _QuietExecutor(self._compiler.failed_matcher)
        try:
            while self._write_heavy(answer, heavy):
                self._restart(answer)
        except GrammarError as error:
            answer.failure = str(error)
        if heavy.spent_s > ANSWER_S:
            answer.failure = f"the grammar takes more than {ANSWER_S:g} s of computing for one answer"

    def _write_heavy(self, answer: _Constrained, heavy: _HeavyMask) -> bool:
        assert self._quiet is not None, "on another thread"
        began = self._quiet.clock()
        matcher = answer.matcher.current(self._quiet.consume)
        self._quiet.write_mask(matcher, heavy.bits)
        seconds = self._quiet.clock() - began
        heavy.spent_s += seconds
        if answer.is_real_time and not self._clients.add(answer.client, seconds, time.monotonic()):
            answer.failure = f"the grammars of this key took more than {CLIENT_S:g} s of computing: try again later"
        return _must_restart(answer, matcher)


class _QuietExecutor:
    """Computes on a native thread of low priority: only there where two matchers go together, hence `failed`."""

    def __init__(self, failed: LLMatcher) -> None:
        self._failed = failed
        is_linux = sys.platform == "linux"
        self._executor, self.clock = run_quietly(_executor_with_clock) if is_linux else (LLExecutor(1), time.monotonic)

    def consume(self, matcher: LLMatcher, token_id: int) -> None:
        self._executor.consume_token_par([(matcher, token_id), (self._failed, token_id)])

    def write_mask(self, matcher: LLMatcher, bits: Bits) -> None:
        pair = [(matcher, 0), (self._failed, 1)]
        self._executor.unsafe_compute_mask_ptr(pair, bits.ctypes.data, bits.strides[0], len(bits))


def _executor_with_clock() -> tuple[LLExecutor, Callable[[], float]]:
    """Return an executor, and the seconds that its thread has computed. Runs quietly."""
    before = set(os.listdir(_THREADS))
    executor = LLExecutor(1)
    new = (int(thread) for thread in os.listdir(_THREADS) if thread not in before)
    (quiet,) = (thread for thread in new if os.getpriority(os.PRIO_PROCESS, thread) > 0)
    return executor, partial(time.clock_gettime, ~quiet << 3 | _CLOCK_OF_THREAD)


def _must_restart(answer: _Constrained, matcher: LLMatcher) -> bool:
    """Note the mask; return whether other answers, which share the matcher's patterns, made it fail."""
    if is_spoilt(matcher) or (is_outgrown(matcher) and not answer.is_alone):
        return True
    answer.masked_at = answer.matcher.place
    if matcher.is_error():
        answer.failure = failure_of(matcher)
    return False


def _may_jump(sampling: SamplingParams) -> bool:
    return sampling.num_logprobs is None and not (sampling.allowed_token_ids or sampling.bad_words)
