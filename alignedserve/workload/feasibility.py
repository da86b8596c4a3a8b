"""Whether a workload can be served at all: asked before a simulation, not found out after an hour of it."""

from collections.abc import Callable
from dataclasses import dataclass

from alignedserve.core.errors import ConfigError
from alignedserve.workload.requests import TimedRequest, Workload

_PROBED = 512  # requests of a closed loop that are looked at


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the servers can hold and do; None: not asked.

    `service_s` gives the seconds of one worker that a request takes up, as one of a full batch (its share of the time
    of the iterations it is in).
    """

    max_context_len: int | None = None  # of the model
    memory_tokens: int | None = None  # whose cache one worker holds
    service_s: Callable[[TimedRequest], float] | None = None
    num_workers: int = 1


def service_at(prompt_tokens_per_s: float, output_tokens_per_s: float) -> Callable[[TimedRequest], float]:
    """`service_s` of workers whose full batches read and write so many tokens per second, one after the other."""
    return lambda request: request.prompt_len / prompt_tokens_per_s + request.output_len / output_tokens_per_s


@dataclass(frozen=True, slots=True)
class Fit:
    """`problems` are requests that can never be served; `offered_load` above 1 is more work than time."""

    problems: tuple[str, ...]
    offered_load: float | None  # of all workers, 1: just busy; None: not asked, or no open-loop traffic

    @property
    def overload(self) -> str | None:
        """A sentence for the user when queues will grow without end."""
        if self.offered_load is None or self.offered_load <= 1.0:
            return None
        return (
            f"the workload asks for {self.offered_load:.2f} times what the workers can do: queues grow until it ends "
            f"(a rate of 1 / {self.offered_load:.2f} of it would fit)"
        )


def check_fit(workload: Workload, capacity: Capacity) -> Fit:
    """Look at every open-loop request and the first of every closed loop."""
    probed = [loop.stream[number] for loop in workload.closed_loops for number in range(_PROBED)]
    longest = max((*workload.requests, *probed), key=lambda request: request.final_context_len, default=None)
    limits = (
        (capacity.max_context_len, "the model's context is"),
        (capacity.memory_tokens, "the memory of one worker holds"),
    )
    problems = [
        f"a request of class {longest.class_name} comes to hold {longest.final_context_len} tokens "
        f"({longest.prompt_len} of prompt, {longest.output_len} of answer), but {words} {limit} "
        f"(max_total={limit} would drop such requests, max_prompt= shorten them)"
        for limit, words in limits
        if longest is not None and limit is not None and longest.final_context_len > limit
    ]
    return Fit(tuple(problems), _offered_load(workload, capacity))


def require_fit(workload: Workload, capacity: Capacity) -> Fit:
    """The same; raises ConfigError where a request can never be served. An overload is no error: papers measure it."""
    fit = check_fit(workload, capacity)
    if fit.problems:
        raise ConfigError("; ".join(fit.problems))
    return fit


def _offered_load(workload: Workload, capacity: Capacity) -> float | None:
    if capacity.service_s is None or len(workload.requests) < 2:
        return None
    duration_s = workload.ends_s or workload.requests[-1].arrival_s
    if duration_s <= 0:
        return None
    busy_s = sum(capacity.service_s(request) for request in workload.requests)
    return busy_s / (duration_s * capacity.num_workers)
