"""Tables of docs/experiments/bros.md."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from experiments.pages.record import Record, change, digits, figures, runs, seconds, share, table
from experiments.pages.steady import SteadyFigures, steady

_POLICIES = ("fcfs", "round_robin", "bros", "aligned_slo")
_FIGURES = "figures 10, 11"
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
    """Return the comparisons over all points of Figures 10 and 11."""
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


def held() -> str:
    """Return the means of TTFT and TPOT held over all points, ShareGPT and LMSYS."""
    rows = []
    for figure, measure in {"TTFT": _TTFT, "TPOT": _TPOT, "both": "rt.attainment"}.items():
        cells = [
            ", ".join(share(_of(_FIGURES, lengths=name, policy=policy).mean(measure)) for name in _LENGTHS)
            for policy in _POLICIES
        ]
        rows.append([figure, *cells])
    return table(["held on average, ShareGPT, LMSYS", *(f"`{policy}`" for policy in _POLICIES)], rows)


def _of(part: str, **labels: object) -> Record:
    return runs("bros").of(part=part, **labels)


def totals() -> str:
    """Return normalised latency and best-effort throughput, means over all points."""
    rows = []
    for lengths, name in _LENGTHS.items():
        of = [_of(_FIGURES, lengths=lengths, policy=policy) for policy in _POLICIES]
        rows.append([f"{name}: s/token", *(digits(one.mean(_LATENCY), 2) for one in of)])
        rows.append([f"{name}: BE requests/s", *(f"{one.mean(_BEST_EFFORT):.2f}" for one in of)])
    return table(["means over all points", *(f"`{policy}`" for policy in _POLICIES)], rows)


def along_the_rate() -> str:
    """Return OPT-13B on ShareGPT by the rate."""
    rows = []
    for rate in (2.0, 6.0, 10.0, 14.0, 18.0):
        of = [_of(_FIGURES, lengths="sharegpt", model="opt-13b", rate=rate, policy=policy) for policy in _POLICIES]
        rows.append([f"{rate:g}", *map(_point, of)])
    return table(["RT/s", *(f"`{policy}`" for policy in _POLICIES)], rows)


def _point(of: Record) -> str:
    return f"{share(of.mean('rt.attainment'))}, {digits(of.mean(_LATENCY))}, {of.mean(_BEST_EFFORT):.1f}"


def worst() -> str:
    """Return the points at which BROS or the union holds less than 99 % of both objectives."""
    rows = []
    points = dict.fromkeys((row["model"], row["lengths"], row["rate"]) for row in _of(_FIGURES).rows)
    for model, lengths, rate in points:
        of = [_of(_FIGURES, model=model, lengths=lengths, rate=rate, policy=policy) for policy in _POLICIES]
        if min(one.mean("rt.attainment") for one in of[2:]) < 0.99:
            rows.append([f"{model}, {_LENGTHS[lengths]}, {rate:g}/s", *map(_point, of)])
    return table(["", *(f"`{policy}`" for policy in _POLICIES)], rows)


def headline() -> str:
    """Return one point with three seeds."""
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


def waves() -> str:
    """Return the same point by how much best-effort work there is."""
    rows = []
    for wave in (32, 64, 128):
        part = _FIGURES if wave == 64 else "waves"
        labels = {"lengths": "sharegpt", "model": "opt-13b", "rate": 10.0, "wave": wave}
        of = [_of(part, **labels, policy=policy) for policy in _POLICIES]
        rows.append([str(wave), *(f"{share(one.mean(_TTFT))}, {one.mean(_BEST_EFFORT):.1f}" for one in of)])
    return table(["wave", *(f"`{policy}`" for policy in _POLICIES)], rows)


def readings() -> str:
    """Return both readings of a prompt that is too long to fit beside any decode."""
    rows = []
    other = _of("readings")
    for model, rate in dict.fromkeys((row["model"], row["rate"]) for row in other.rows):
        labels = {"lengths": "sharegpt", "model": model, "rate": rate}
        rows.append(
            [f"{model}, {rate:g}/s", _point(_of(_FIGURES, **labels, policy="bros")), _point(other.of(**labels))]
        )
    return table(["held, s/token, BE/s", "`bros`", "with `long_prompts_wait`"], rows)


def costs() -> str:
    """Return the same point with iteration times that others have measured."""
    rows = []
    for costs in ("distserve", "vllm"):
        of = [_of("costs", costs=costs, policy=policy) for policy in _POLICIES]
        cells = [f"{digits(one.mean(_LATENCY))}, {share(one.mean(_TTFT))}, {share(one.mean(_TPOT))}" for one in of]
        rows.append([costs, *cells])
    return table(["", *(f"`{policy}`" for policy in _POLICIES)], rows)


def figure_13() -> str:
    """Return shared blocks against whole caches that are swapped or recomputed."""
    rows = []
    kinds = {
        "bros": "shared blocks, slots swapped",
        "bros, whole caches": "whole caches swapped",
        "bros, recomputing": "recomputing",
    }
    for policy, name in kinds.items():
        of = _of("figure 13", policy=policy)
        cells = [
            share(of.mean(_TTFT)),
            share(of.mean(_TPOT)),
            digits(of.mean(_LATENCY)),
            f"{of.mean(_BEST_EFFORT):.2f}",
        ]
        rows.append([name, *cells])
    return table(["OPT-30B, 10 per second, waves of 128", "TTFT held", "TPOT held", "s/token", "BE/s"], rows)


def figure_12() -> str:
    """Return real-time requests alone, by the rate."""
    rows = []
    for rate in dict.fromkeys(row["rate"] for row in _of("figure 12").rows):
        of = [_of("figure 12", rate=rate, policy=policy) for policy in ("fcfs", "bros, whole caches")]
        cells = [
            f"{digits(one.mean(_LATENCY))}, {share(one.mean('rt.attainment'))}, "
            f"{one.mean('rt.loaded_requests_per_s'):.1f}"
            for one in of
        ]
        rows.append([f"{rate:g}", *cells, change(of[1].mean(_LATENCY) / of[0].mean(_LATENCY))])
    return table(["RT/s: s/token, both held, served/s", "`fcfs`", "`bros`", "latency"], rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "steady": partial(steady, "bros", SteadyFigures("rt", "rt.attainment", "rt.normalized_s.mean", "s/token")),
    "averages": averages,
    "held": held,
    "totals": totals,
    "along the rate": along_the_rate,
    "worst": worst,
    "headline": headline,
    "waves": waves,
    "readings": readings,
    "costs": costs,
    "figure 12": figure_12,
    "figure 13": figure_13,
}
