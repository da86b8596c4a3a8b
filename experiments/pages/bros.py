"""Tables of docs/experiments/bros.md."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from experiments.pages.record import Record, change, digits, figures, runs, seconds, share, table
from experiments.pages.steady import steady

_POLICIES = ("fcfs", "round_robin", "bros", "aligned_slo")
_LENGTHS = {"sharegpt": "ShareGPT", "lmsys": "LMSYS"}
_PAPER = {  # BROS against vLLM and round robin
    "sharegpt": {"latency": "-74.2 %, -54.3 %", "be": "-11.3 %, -8.8 %", "ttft": "36.4, 11.8", "tpot": "1.73, 1.47"},
    "lmsys": {"latency": "-69.6 %, -25.8 %", "be": "-17.7 %, -15.2 %", "ttft": "21.4, 14.2", "tpot": "2.62, 2.28"},
}
_MEASURES = {
    "latency": "normalised latency",
    "be": "BE requests/s",
    "ttft": "TTFT held, times",
    "tpot": "TPOT held, times",
}
_PAIRS = (
    (("bros", "fcfs"), ("bros", "round_robin")),
    (("aligned_slo", "fcfs"), ("aligned_slo", "round_robin")),
    (("aligned_slo", "bros"),),
)
_LATENCY, _BEST_EFFORT, _TTFT, _TPOT = (
    "rt.normalized_s.mean",
    "be.loaded_requests_per_s",
    "rt.ttft_attainment",
    "rt.tpot_attainment",
)


def averages() -> str:
    rows = []
    for lengths, name in _LENGTHS.items():
        for measure, said in _MEASURES.items():
            cells = [_compared(lengths, measure, pairs) for pairs in _PAIRS]
            rows.append([f"{name}: {said}", _PAPER[lengths][measure], *cells])
    pairs = ("`bros` vs `fcfs`, `round_robin`", "`aligned_slo` vs `fcfs`, `round_robin`", "vs `bros`")
    return table(["", "paper: BROS vs vLLM, RR", *pairs], rows)


def _compared(lengths: str, measure: str, pairs: Sequence[tuple[str, str]]) -> str:
    compared = Record(figures("bros")["comparisons"]).of(lengths=lengths)
    values = [compared.of(policy=policy, baseline=baseline).mean(measure) for policy, baseline in pairs]
    is_change = measure in ("latency", "be")
    return ", ".join(change(1 + value) if is_change else f"{value:.2f}" for value in values)


def _of(part: str, **labels: object) -> Record:
    return runs("bros").of(part=part, **labels)


def headline() -> str:
    rows = []
    for policy in (*_POLICIES, "sarathi", "accelgen"):
        of = _of("headline", policy=policy)
        rows.append(
            [
                f"`{policy}`",
                f"{digits(of.mean(_LATENCY))} ({digits(of.spread(_LATENCY), 2)})",
                f"{share(of.mean(_TTFT))} ({100 * of.spread(_TTFT):.1f})",
                share(of.mean(_TPOT)),
                seconds(of.mean("rt.ttft_s.p99")),
                f"{of.mean(_BEST_EFFORT):.2f} ({of.spread(_BEST_EFFORT):.2f})",
            ]
        )
    return table(["", "s/token", "TTFT held", "TPOT held", "p99 TTFT", "BE/s"], rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "steady": partial(steady, "bros", "rt", "rt.attainment"),
    "averages": averages,
    "headline": headline,
}
