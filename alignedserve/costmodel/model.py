"""The interface of cost models, and the questions that policies ask of any of them."""

import enum
import math
from typing import NamedTuple, Protocol

from alignedserve.costmodel.work import IterationWork, pairs_of

_INTERPOLATIONS = 4


class AttentionKernel(enum.Enum):
    """Ways to spread the work of decode attention over a device."""

    LOAD_BALANCED = "load_balanced"  # contexts are split into even parts, as ours on GPUs: time follows their sum
    # Blocks in waves, each as long as the longest context of all: time follows number * maximum, an upper bound
    ONE_BLOCK_PER_SEQUENCE = "one_block_per_sequence"
    # Blocks that free multiprocessors take in turn (list_schedule.py)
    PAGED_V1 = "paged_v1"
    PAGED_V1_WORST_ORDER = "paged_v1_worst_order"
    FLASH_ATTENTION_2 = "flash_attention_2"
    FLASHINFER = "flashinfer"
    SECTIONS = "sections"

    def num_charged_keys(self, work: IterationWork) -> int:
        """Count the keys that the decodes are charged for, where that is the sum of the contexts or a bound of it."""
        if self is AttentionKernel.LOAD_BALANCED:
            return work.decode_context_len
        return work.num_decodes * work.max_decode_context_len


class CostModel(Protocol):
    """Predicts the time of iterations on one worker. Deterministic; the same work always costs the same."""

    def iteration_s(self, work: IterationWork) -> float:
        """Return seconds from the start of an iteration to its tokens, host copies overlapped: max(compute, copies)."""

    def swap_s(self, num_tokens: float) -> float:
        """Return the seconds to copy the cache of `num_tokens` between device and host."""


class LearningCostModel(CostModel, Protocol):
    """Cost model that a worker corrects as it goes. Deterministic: the same observations give the same predictions."""

    def observe(self, work: IterationWork, seconds: float, grammar_s: float | None = None) -> None:
        """Learn the duration of an iteration, above 0.

        `grammar_s`: the part spent waiting for grammars; None: not measured.
        """


def chunk_within(
    costs: CostModel,
    work: IterationWork,
    *,
    num_cached: int,
    at_most: int,
    budget_s: float,
    step: int = 1,
    num_scored: int = 0,
) -> int:
    """Return the tokens of a prompt, up to `at_most`, that can join `work` with the iteration within `budget_s`; 0:
    none.

    A cost model grows with the chunk, hardly bent: a few interpolations, then bisection. `step`: the answer is a
    multiple of it, unless it is `at_most`. `num_scored`: of its first tokens, with a row of logits each.
    """

    if at_most <= 0:
        return 0
    trial = work.copy()
    trial.add_chunk(0, num_cached, is_last=True)

    def seconds(num_tokens: int) -> float:
        trial.num_prompt_tokens = work.num_prompt_tokens + num_tokens
        trial.prompt_pairs = work.prompt_pairs + pairs_of(num_tokens, num_cached)
        trial.prompt_keys = work.prompt_keys + num_cached + num_tokens
        trial.prompt_squares = work.prompt_squares + num_tokens * num_tokens
        trial.num_sampled = work.num_sampled + 1 + min(num_tokens, num_scored)
        return costs.iteration_s(trial)

    above_s = seconds(at_most)
    if above_s <= budget_s:
        return at_most
    below, above, below_s, num_tried = 0, -(-at_most // step), costs.iteration_s(work), 0
    while above - below > 1:
        share = (budget_s - below_s) / (above_s - below_s) if num_tried < _INTERPOLATIONS and above_s > below_s else 0.5
        guess = min(max(below + int(share * (above - below)), below + 1), above - 1)
        guess_s = seconds(guess * step)
        if guess_s <= budget_s:
            below, below_s = guess, guess_s
        else:
            above, above_s = guess, guess_s
        num_tried += 1
    return below * step


_USUAL_PROMPT_LEN = 1024
_SHORT_PROMPT_LEN = 64
_USUAL_CONTEXT_LEN = 512
_FEW = 4  # requests that decode together


class PredictedSpeed(NamedTuple):
    """Seconds that a worker needs with nothing else to do."""

    short_prompt_s: float  # of 64 tokens: no first token comes sooner
    prompt_s: float  # of 1 024 tokens, or half of what its memory holds
    token_s: float  # of one request: no gap is shorter
    shared_token_s: float  # of four together


def speed_of(costs: CostModel, *, max_tokens: int, max_context_len: int) -> PredictedSpeed:
    """Return the speed by a cost model. `max_tokens`: of an iteration. `max_context_len`: that its memory holds."""
    longest = max(max_context_len // 2, 1)
    context_len = min(_USUAL_CONTEXT_LEN, longest)
    return PredictedSpeed(
        _prompt_s(costs, min(_SHORT_PROMPT_LEN, longest), max_tokens),
        _prompt_s(costs, min(_USUAL_PROMPT_LEN, longest), max_tokens),
        _token_s(costs, 1, context_len),
        _token_s(costs, _FEW, context_len),
    )


_HALF_HOUR_S = 1800.0


class ShownSpeed:
    """The shortest iterations of the last hour. A model predicts, and may be far off; what was done can be done again.

    A prompt of fewer tokens than usual counts in proportion, which is too long rather than too short.
    """

    def __init__(self) -> None:
        self._least: dict[int, tuple[float, float]] = {}  # by half hour: of a usual prompt, of tokens together

    def note(self, work: IterationWork, seconds: float, now: float) -> None:
        prompt_s = token_s = math.inf
        if not work.num_decodes and work.num_prompt_tokens:
            prompt_s = seconds * _USUAL_PROMPT_LEN / min(work.num_prompt_tokens, _USUAL_PROMPT_LEN)
        elif not work.num_prompt_tokens and work.num_decodes >= _FEW:
            token_s = seconds
        half_hour = int(now // _HALF_HOUR_S)
        if half_hour not in self._least:
            self._least = {last: least for last, least in self._least.items() if last == half_hour - 1}
        least = self._least.get(half_hour, (math.inf, math.inf))
        self._least[half_hour] = min(least[0], prompt_s), min(least[1], token_s)

    def at(self, now: float) -> tuple[float, float]:
        """Return the seconds of a usual prompt, and of a token of a few requests together; inf: unknown."""
        half_hours = range(int(now // _HALF_HOUR_S) - 1, int(now // _HALF_HOUR_S) + 1)
        recent = [self._least.get(half_hour, (math.inf, math.inf)) for half_hour in half_hours]
        prompts_s, tokens_s = zip(*recent, strict=True)
        return min(prompts_s), min(tokens_s)


def _prompt_s(costs: CostModel, prompt_len: int, max_tokens: int) -> float:
    seconds = 0.0
    for num_cached in range(0, prompt_len, max_tokens):
        work, num_tokens = IterationWork(), min(max_tokens, prompt_len - num_cached)
        work.add_chunk(num_tokens, num_cached, is_last=num_cached + num_tokens == prompt_len)
        seconds += costs.iteration_s(work)
    return seconds


def _token_s(costs: CostModel, num_requests: int, context_len: int) -> float:
    work = IterationWork()
    for _ in range(num_requests):
        work.add_decode(context_len)
    return costs.iteration_s(work)
