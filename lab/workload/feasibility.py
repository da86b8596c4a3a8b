"""Feasibility of a workload, checked before a simulation and not found out after an hour of it."""

from itertools import chain

from alignedserve.core.errors import ConfigError
from lab.workload.requests import Workload, turns_of

_PROBED = 512  # requests of a closed loop that are looked at


def require_feasible(
    workload: Workload, *, max_context_len: int | None = None, memory_tokens: int | None = None
) -> None:
    """Raise ConfigError where a request can never be served.

    Every open-loop request is checked, and the first of every closed loop. `max_context_len`: of the model;
    `memory_tokens`: whose cache one worker holds; None: no limit.
    """
    probed = [loop.stream[number] for loop in workload.closed_loops for number in range(_PROBED)]
    turns = chain.from_iterable(map(turns_of, (*workload.requests, *probed)))
    longest = max(turns, key=lambda request: request.final_context_len, default=None)
    limits = (
        (max_context_len, "the model's context is"),
        (memory_tokens, "the memory of one worker holds"),
    )
    problems = [
        f"a request of class {longest.class_name} comes to hold {longest.final_context_len} tokens "
        f"({longest.prompt_len} of prompt, {longest.output_len} of answer), but {words} {limit} "
        f"(max_total={limit} would drop such requests, max_prompt= shorten them)"
        for limit, words in limits
        if longest is not None and limit is not None and longest.final_context_len > limit
    ]
    if problems:
        raise ConfigError("; ".join(problems))
