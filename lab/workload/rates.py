"""The same workload as it was recorded, at another rate, or with objectives where it names none."""

from itertools import chain

from alignedserve.core.errors import ConfigError
from alignedserve.core.request import RequestClass
from lab.workload.distributions import split_outside_parentheses
from lab.workload.grammar import RECORDED, parse_classes
from lab.workload.requests import Workload, turns_of

_ARRIVALS = ("rate", "arrivals", "outstanding", "wave")  # the keys that say when requests come


def as_recorded(line: str) -> str:
    """Return the line; a bare trace gets its recorded arrivals."""
    line = line.strip()
    return line if not line or set(line) & set(",;=:") else f"{line}, arrivals={RECORDED}"


def at_rate(line: str, rate: float) -> str:
    """Return the line with its open-loop classes at `rate` requests per second together, in their proportions.

    Closed loops stay as they are; a line of one class may leave its arrivals to `rate`. Raises ConfigError where there
    is no open loop, and where classes share a rate that one of them does not name.
    """
    parts = [part.strip() for part in split_outside_parentheses(line, ";") if part.strip()]
    if len(parts) == 1 and _keys_of(parts[0]).isdisjoint(_ARRIVALS):
        parts[0] = _with_rate(parts[0], f"{rate:.10g}")
    specs = parse_classes("; ".join(parts))
    rates = {number: spec.rate for number, spec in enumerate(specs) if not spec.is_closed}
    if not rates:
        raise ConfigError("the workload has closed loops only: there are no arrivals to give another rate")
    if len(rates) == 1:
        shares = dict.fromkeys(rates, 1.0)
    else:
        known = {number: rate for number, rate in rates.items() if rate is not None}
        if len(known) < len(rates):
            raise ConfigError(f"several classes share a rate: arrivals={RECORDED} needs a rate= of its own in each")
        shares = {number: rate / sum(known.values()) for number, rate in known.items()}
    for number, share in shares.items():
        parts[number] = _with_rate(parts[number], f"{share * rate:.10g}")
    return "; ".join(parts)


def with_objectives(line: str, *, ttft_s: float | None, tpot_s: float | None) -> str:
    """Return the line with these objectives for real-time classes that name none of their own. Raises ConfigError."""
    parts = [part.strip() for part in split_outside_parentheses(line, ";") if part.strip()]
    for number, spec in enumerate(parse_classes(line)):
        if spec.request_class is RequestClass.BEST_EFFORT:
            continue
        for key, objective, wanted in (("ttft", spec.ttft_s, ttft_s), ("tpot", spec.tpot_s, tpot_s)):
            if objective is None and wanted is not None:
                parts[number] += f", {key}={wanted:.10g}"
    return "; ".join(parts)


def _keys_of(part: str) -> set[str]:
    settings = (setting.partition("=") for setting in split_outside_parentheses(part, ","))
    return {head.rpartition(":")[2].strip() for head, separator, _ in settings if separator}


def _with_rate(part: str, rate: str) -> str:
    settings = split_outside_parentheses(part, ",")
    for number, setting in enumerate(settings):
        head, separator, _ = setting.partition("=")
        if separator and head.rpartition(":")[2].strip() == "rate":
            return ",".join((*settings[:number], f"{head}={rate}", *settings[number + 1 :]))
    return f"{part}, rate={rate}"


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
