"""When a document may wait no longer, by its deadline: the pool and separate decode workers see it alike."""

from alignedserve.core.request import Request


def urgent_at_s(request: Request, num_generated: int, token_s: float | None) -> float | None:
    """Return when waiting must end: the remaining tokens must fit, in half of the time to the deadline at most.

    `token_s`: from one token to the next; None: not known yet, and half of the time is kept. None: it has no deadline.
    """
    deadline_s = request.slo.deadline_s
    if deadline_s is None:
        return None
    needed_s = deadline_s / 2
    if token_s is not None:
        needed_s = min((request.sampling.max_tokens - num_generated) * token_s, needed_s)
    return request.arrival_s + deadline_s - needed_s
