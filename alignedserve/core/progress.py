"""Rules shared by all workers: chunked prefill's split of an iteration's tokens, and the end of an answer."""

from collections.abc import Iterable

from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, Request


def plan_chunks(remaining: Iterable[tuple[RequestId, int]], budget: int) -> tuple[tuple[RequestId, int], ...]:
    """Split `budget` tokens among requests with tokens left to compute, in order; each takes as many as it can.

    Example: remaining ((a, 700), (b, 40), (c, 9)) and a budget of 720 give ((a, 700), (b, 20)).
    """
    chunks = []
    for request_id, num_tokens in remaining:
        if budget <= 0:
            break
        chunk = min(num_tokens, budget)
        if chunk > 0:
            chunks.append((request_id, chunk))
        budget -= chunk
    return tuple(chunks)


def finish_reason(
    request: Request, token_id: int, num_generated: int, eos_token_ids: frozenset[int]
) -> FinishReason | None:
    """Return why the answer ends with this token, its `num_generated`-th; None: it continues.

    Under a grammar an end token that is to be ignored comes only where nothing else may follow.
    """
    sampling = request.sampling
    is_eos = token_id in eos_token_ids and (not sampling.ignore_eos or bool(sampling.grammar))
    if is_eos or token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_generated >= sampling.max_tokens else None
