"""An engine that computes nothing but the duration and the sampled tokens of each iteration.

Only it knows how long answers will be: the last token of one is the stop token.
"""

from array import array
from collections.abc import Mapping
from typing import NamedTuple

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SampledToken
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.messages.iterations import Addition, RunIteration, Swap, Swaps
from alignedserve.scheduling.policy import DeviceMemory
from lab.costmodel.list_schedule import straggler_share

EOS = 0
TOKEN = 1  # every other one


class SimulatedAnswer(NamedTuple):
    """Answer of the simulated model: `num_tokens` tokens; the last one stops it."""

    num_tokens: int
    token_id: int = TOKEN  # every one but the last


class SimulatedIteration(NamedTuple):
    """Duration and tokens of an iteration that begins now."""

    duration_s: float
    sampled: tuple[SampledToken, ...]


class IterationLine(NamedTuple):
    """One iteration on a worker's timeline."""

    started_s: float
    ended_s: float
    num_decodes: int
    num_prompt_tokens: int
    num_blocks: int  # held by the engine's requests


class _Sequence:
    __slots__ = ("is_constrained", "is_hidden", "num_blocks", "num_computed", "num_left", "num_tokens", "token")

    def __init__(self, addition: Addition, answer: SimulatedAnswer) -> None:
        self.num_tokens = addition.request.prompt_len + len(addition.generated_token_ids)
        self.num_computed = addition.num_cached
        self.num_left = answer.num_tokens - len(addition.generated_token_ids)  # tokens of its answer still to come
        self.num_blocks = len(addition.block_ids)
        self.is_hidden = addition.is_hidden
        self.is_constrained = bool(addition.request.sampling.grammar)
        self.token = SampledToken(addition.request.request_id, answer.token_id)  # every token but the last


class _SteadyIteration:
    """An iteration, and its repetitions with every context one token longer.

    A large batch of long answers does little else, so a repetition is not examined request by request.
    """

    __slots__ = ("_num_more", "_slices", "num_repeats", "sampled", "work")

    def __init__(
        self,
        slices: tuple[tuple[RequestId, int], ...],
        work: IterationWork,
        sampled: tuple[SampledToken, ...],
        num_more: int,
    ) -> None:
        self._slices = slices
        self._num_more = num_more
        self.work = work
        self.sampled = sampled
        self.num_repeats = 0

    def repeat(self, command: RunIteration) -> bool:
        is_same = command.slices is self._slices and not (command.additions or command.removals or command.swaps)
        if not is_same or self.num_repeats >= self._num_more:
            return False
        self.num_repeats += 1
        self.work.decode_context_len += self.work.num_decodes
        self.work.max_decode_context_len += 1
        return True

    def request_ids(self) -> list[RequestId]:
        return [request_id for request_id, _ in self._slices]


class SimulatedEngine:
    """One worker's sequences. `answers`: to every possible request, by id. `memory`: gives the width of copies."""

    def __init__(
        self,
        costs: CostModel,
        answers: Mapping[RequestId, SimulatedAnswer],
        memory: DeviceMemory,
        *,
        keeps_timeline: bool,
    ) -> None:
        self.costs = costs
        self._memory = memory
        self._on_host: set[RequestId] = (
            set()
        )  # requests with part of their cache there; membership only, as in the next
        self._hidden: set[RequestId] = set()  # requests with a hidden cache, in the engine or on the host
        self._answers = answers
        self._sequences: dict[RequestId, _Sequence] = {}
        self._latest = _SteadyIteration((), IterationWork(), (), 0)
        self._timeline = _Timeline() if keeps_timeline else None
        self._num_blocks = 0
        self.num_iterations = 0
        self.num_decodes = 0  # requests that decoded, counted again in every iteration
        self.num_prompt_tokens = 0
        self.num_block_iterations = 0  # blocks held by the engine's requests, summed over iterations
        self.busy_s = 0.0

    def begin(self, command: RunIteration, now: float) -> SimulatedIteration:
        """Begin an iteration; the previous one must have ended, unless this one is urgent."""
        if not self._latest.repeat(command):
            self._catch_up()
            swapped = self._swap(command.swaps) if command.swaps is not None else (0.0, 0.0)
            self._change_sequences(command)
            self._latest = self._new_iteration(command, swapped)
        for request_id, block_ids in command.extensions:
            self._sequences[request_id].num_blocks += len(block_ids)
            self._num_blocks += len(block_ids)
        work = self._latest.work
        duration_s = self.costs.iteration_s(work)
        self.num_iterations += 1
        self.num_decodes += work.num_decodes
        self.num_prompt_tokens += work.num_prompt_tokens
        self.num_block_iterations += self._num_blocks
        self.busy_s += duration_s
        if self._timeline is not None and not command.is_urgent:
            self._timeline.add(now, duration_s, work, self._num_blocks)
        return SimulatedIteration(duration_s, self._latest.sampled)

    def prolong(self, seconds: float) -> None:
        """Note that the latest iteration took longer than its duration, as others ran on the same cores."""
        self.busy_s += seconds
        if self._timeline is not None:
            self._timeline.prolong(seconds)

    def ran_within(self, begins_s: float, ends_s: float) -> None:
        """Note when the urgent iteration that has just begun runs; the one before it stands still meanwhile."""
        if self._timeline is not None:
            self._timeline.add_within(begins_s, ends_s, self._latest.work, self._num_blocks)

    @property
    def latest_straggler_share(self) -> float:
        """Return the share of the latest iteration's decode attention that a straggler costs."""
        return straggler_share(self.costs, self._latest.work)

    @property
    def latest_work(self) -> IterationWork:
        return self._latest.work

    def forget(self) -> None:
        """Lose every sequence, as with the worker's process; what was counted stays."""
        for caches in (self._on_host, self._hidden, self._sequences):
            caches.clear()
        self._latest, self._num_blocks = _SteadyIteration((), IterationWork(), (), 0), 0

    def timeline(self) -> list[IterationLine]:
        """Return every iteration, if they are recorded."""
        return self._timeline.lines() if self._timeline is not None else []

    def _catch_up(self) -> None:
        num_repeats = self._latest.num_repeats
        if num_repeats:
            for request_id in self._latest.request_ids():
                sequence = self._sequences[request_id]
                sequence.num_tokens += num_repeats
                sequence.num_computed += num_repeats
                sequence.num_left -= num_repeats

    def _change_sequences(self, command: RunIteration) -> None:
        for request_id in command.removals:
            self._num_blocks -= self._sequences.pop(request_id).num_blocks
            if request_id not in self._on_host:
                self._hidden.discard(request_id)
        for addition in command.additions:
            request_id = addition.request.request_id
            assert request_id not in self._sequences, "added twice"
            self._sequences[request_id] = _Sequence(addition, self._answers[request_id])
            self._num_blocks += len(addition.block_ids)
            (self._hidden.add if addition.is_hidden else self._hidden.discard)(request_id)

    def _swap(self, swaps: Swaps) -> tuple[float, float]:
        self._on_host.difference_update(swaps.forgotten)
        num_out = sum(self._copied(swap) for swap in swaps.outs)
        num_in = sum(self._copied(swap) for swap in swaps.ins)
        self._on_host.update(swap.request_id for swap in swaps.outs)
        self._on_host.difference_update(swap.request_id for swap in swaps.ins)
        return num_in, num_out

    def _copied(self, swap: Swap) -> float:
        return self._memory.copy_tokens(swap.num_tokens, is_hidden=swap.request_id in self._hidden)

    def _new_iteration(self, command: RunIteration, swapped: tuple[float, float]) -> _SteadyIteration:
        work, sampled, num_more = IterationWork(), [], 1 << 40
        work.swap_in_tokens, work.swap_out_tokens = swapped
        decoded_len = hidden_len = longest = num_decodes = num_constrained = 0
        sequences = self._sequences
        for request_id, num_tokens in command.slices:
            sequence = sequences[request_id]
            context_len, num_computed = sequence.num_tokens, sequence.num_computed
            sequence.num_computed = num_computed + num_tokens
            is_last = num_computed + num_tokens == context_len
            if num_tokens == 1 and is_last:
                num_decodes += 1
                decoded_len += context_len
                hidden_len += context_len if sequence.is_hidden else 0
                num_constrained += sequence.is_constrained
                longest = max(longest, context_len)
            else:
                work.add_chunk(num_tokens, num_computed, is_last=is_last, is_constrained=sequence.is_constrained)
            if is_last:
                num_left = sequence.num_left - 1
                sampled.append(sequence.token if num_left else SampledToken(request_id, EOS))
                sequence.num_tokens, sequence.num_left = context_len + 1, num_left
                num_more = min(num_more, num_left - 1)
        work.add_decodes(num_decodes, decoded_len, longest, hidden_len, num_constrained)
        return _SteadyIteration(
            command.slices, work, tuple(sampled), 0 if work.num_chunks or command.swaps or hidden_len else num_more
        )


class _Timeline:
    def __init__(self) -> None:
        self._times = (array("d"), array("d"))
        self._counts = (array("q"), array("q"), array("q"))
        self._latest = -1  # line of the latest iteration that ran on its own

    def add(self, now: float, duration_s: float, work: IterationWork, num_blocks: int) -> None:
        self._latest = len(self._times[0])
        self._add(now, now + duration_s, work, num_blocks)

    def add_within(self, begins_s: float, ends_s: float, work: IterationWork, num_blocks: int) -> None:
        self._add(begins_s, ends_s, work, num_blocks)
        self.prolong(ends_s - begins_s)

    def prolong(self, seconds: float) -> None:
        self._times[1][self._latest] += seconds

    def _add(self, begins_s: float, ends_s: float, work: IterationWork, num_blocks: int) -> None:
        for times, moment in zip(self._times, (begins_s, ends_s), strict=True):
            times.append(moment)
        for counts, count in zip(self._counts, (work.num_decodes, work.num_prompt_tokens, num_blocks), strict=True):
            counts.append(count)

    def lines(self) -> list[IterationLine]:
        return [IterationLine(*line) for line in zip(*self._times, *self._counts, strict=True)]
