"""How fast a worker is, in the times that people notice: a prompt alone, and the gap between two tokens."""

from typing import NamedTuple

from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork

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
