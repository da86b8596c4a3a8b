"""Rules shared by all workers: chunked prefill's split of an iteration's tokens, and the end of an answer."""

from collections.abc import Iterable

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request


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


def end_token_ids(request: Request, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end the answer; any other does only as the last that its limit allows.

    Under a grammar an end token that is to be ignored comes only where nothing else may follow.
    """
    sampling = request.sampling
    ignores_eos = sampling.ignore_eos and not sampling.grammar
    return frozenset(sampling.stop_token_ids) if ignores_eos else eos_token_ids.union(sampling.stop_token_ids)
