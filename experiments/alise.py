"""ALISE (Zhao and Wang, 2024), Figures 6, 8 and 9: latency by predicted remaining time, on one V100.

    ALIGNEDSERVE_DATA=FOLDER python -m experiments.alise [--quick] [--processes 2]

Mean normalised latency (end-to-end time by output tokens) against request rate, and what swapping is worth against
recomputing and deferring. docs/experiments/alise.md has the paper's numbers, ours, and why they differ.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise, product
from typing import Any

from alignedserve.costmodel.model import AttentionKernel
from experiments.common import (
    GIB,
    STEADY_FIGURES,
    ColocatedWorkerSpec,
    LabelledCase,
    Row,
    chosen,
    colocated_case,
    line,
    over_seeds,
    perform,
    pick,
    print_parts,
    print_table,
    read_options,
    source_or,
)
from lab.costmodel.choice import WorkerSpec

LATENCY = "all.normalized_s.mean"
TARGET_S = 0.2  # per token: where the paper reads throughput off Figure 6(b)
_CONTEXT = 2048  # OPT's: longer requests are left out, and how much of it an answer will take is unknown
_SHARE_TO_SIGMA = math.sqrt(math.pi / 2)  # a small log-normal error of deviation s is sqrt(2 / pi) s off on average
_NEVER_S = 1e9

SOURCES: Mapping[str, tuple[str, str]] = {  # the recording, and what stands in for it: moments from docs/workloads.md
    "alpaca": ("alpaca", "prompt=skewed(20,14), output=skewed(65,68)"),
    "sharegpt": ("sharegpt_text", "prompt=skewed(108,180), output=skewed(328,240)"),
}
PAPERS_ERROR: Mapping[str, float] = {"alpaca": 0.034, "sharegpt": 0.092}  # section 3.1
OUR_SIGMA: Mapping[str, float] = {"alpaca": 1.4, "sharegpt": 2.7}
"""Of our own predictor: the deviation at which the rank correlation with the true lengths is what hashed n-grams reach
(0.637 and 0.309, benchmarks/results/scheduling/predictor.json)."""


@dataclass(frozen=True, slots=True)
class System:
    """System under comparison: a policy, and its information."""

    policy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    predict: str | None = None  # None: with the paper's error
    limit: str = f"max_tokens={_CONTEXT}"  # what a request may come to, as far as the server knows


SYSTEMS: Mapping[str, System] = {
    "ORCA": System("orca", {"max_batch_size": 256}),
    "ORCA, exact": System(
        "orca", {"max_batch_size": 256}, limit="max_tokens=exact"
    ),  # reserves just what will be needed
    "vLLM": System("fcfs"),
    "ALISE": System("alise"),
    "Oracle": System("alise", predict="exact"),
    "aligned_slo": System("aligned_slo"),
    "fastserve": System("fastserve"),
    "sarathi": System("sarathi"),
    "Recompute": System("alise", {"preemption": "recompute"}),
    "Defer": System("alise", {"preemption": "defer"}),
    **{f"ALISE, K = {threshold:g} s": System("alise", {"age_threshold_s": threshold}) for threshold in (10, 30, 300)},
    "ALISE, no ageing": System("alise", {"age_threshold_s": _NEVER_S}),
    "ALISE, our predictor": System("alise", predict="ours"),
    "ALISE, class mean": System("alise", predict="mean"),
    "aligned_slo, our predictor": System("aligned_slo", predict="ours"),
    "aligned_slo, class mean": System("aligned_slo", predict="mean"),
}
COMPARED = ("vLLM", "ALISE", "aligned_slo")
OTHERS = ("ORCA, exact", "sarathi", "Oracle", "fastserve")
_IN_ORDER_OF_ARRIVAL = ("vLLM", "sarathi", "ORCA, exact")  # these give in first: the highest rates are left out

RATES: Mapping[tuple[str, str], tuple[float, ...]] = {
    ("opt-13b", "alpaca"): (10, 14, 20, 28, 38),
    ("opt-13b", "sharegpt"): (1.0, 1.3, 1.7, 2.2, 3.0),
    ("opt-6.7b", "alpaca"): (100, 140, 180, 240),
    ("opt-6.7b", "sharegpt"): (6, 9, 13, 18),
    ("opt-2.7b", "alpaca"): (200, 280, 360, 440),
    ("opt-2.7b", "sharegpt"): (18, 26, 36, 48),
}
DURATION_S: Mapping[tuple[str, str], float] = {  # of arrivals; some thousands of requests, or of iterations
    ("opt-13b", "alpaca"): 60.0,
    ("opt-13b", "sharegpt"): 120.0,
    ("opt-6.7b", "alpaca"): 20.0,
    ("opt-6.7b", "sharegpt"): 40.0,
    ("opt-2.7b", "alpaca"): 15.0,
    ("opt-2.7b", "sharegpt"): 30.0,
}
SHARED_RATES: Mapping[str, float] = {"alpaca": 20, "sharegpt": 1.7}  # of OPT-13B, at which all are run
_NUM_EACH = 3  # of these rates, the lowest where requests go in order of arrival, the highest where not
ORCA_RATES: Mapping[str, tuple[float, ...]] = {"alpaca": (0.6, 0.9, 1.2), "sharegpt": (0.1, 0.15, 0.2)}
HIGH_RATES: Mapping[str, float] = {"alpaca": 28, "sharegpt": 2.2}  # where the choices below are looked at
_LONG_TRACE_S = 600.0

COLUMNS: Mapping[str, str] = {
    "model": "model",
    "lengths": "lengths",
    "rate": "requests/s",
    "policy": "system",
    LATENCY: "s/token",
    "all.normalized_s.p50": "p50",
    "all.normalized_s.p99": "p99",
    "all.end_to_end_s.mean": "mean response, s",
    "all.end_to_end_s.p99": "p99",
    "all.requests_per_s": "completed/s",
}
HEADINGS: Mapping[str, str] = {
    "model": "model",
    "lengths": "lengths",
    "policy": "system",
    "rate": "requests/s",
    "times": "x vLLM",
}
_MORE = ("seed", "duration_s", "utilisation", "num_iterations", "num_evictions", "num_recomputed_tokens", "workload")
_RECORDED = ("part", "kernel", *COLUMNS, "all.ttft_s.p50", "all.num_sent", *_MORE, "code", *STEADY_FIGURES)


@dataclass(frozen=True, slots=True)
class AliseLoad:
    """One point of a figure."""

    model: str
    lengths: str
    rate: float
    duration_s: float | None = None  # None: as above
    kernel: AttentionKernel = AttentionKernel.LOAD_BALANCED

    def case(self, part: str, name: str, seed: int) -> LabelledCase:
        system = SYSTEMS[name]
        spec = WorkerSpec(self.model, "v100-32g", kernel=self.kernel)
        worker = ColocatedWorkerSpec(
            spec, swap_space_bytes=512 * GIB
        )  # half of the machine's memory: it has two of these
        labels: dict[str, str | float] = {"part": part, "policy": name, "model": self.model, "lengths": self.lengths}
        labels |= {"rate": self.rate, "kernel": self.kernel.value}
        duration_s = self.duration_s or DURATION_S[self.model, self.lengths]
        workload = line(self._line(system), seed, duration_s=duration_s)
        return colocated_case(labels, system.policy, worker, workload, system.settings)

    def _line(self, system: System) -> str:
        parts = (_source(self.lengths), f"max_total={_CONTEXT}", system.limit, f"rate={self.rate}")
        return ", ".join(part for part in (*parts, f"predict={self._prediction(system)}") if part)

    def _prediction(self, system: System) -> str:
        if system.predict not in (None, "ours"):
            return str(system.predict)
        is_ours = system.predict is not None
        sigma = OUR_SIGMA[self.lengths] if is_ours else _SHARE_TO_SIGMA * PAPERS_ERROR[self.lengths]
        return f"error({sigma:.3g})"


@cache
def _source(lengths: str) -> str:
    return source_or(*SOURCES[lengths])


# --- parts


def figure_6(seeds: Sequence[int]) -> list[LabelledCase]:
    """Return the three that count on all models, the others on OPT-13B.

    Several seeds at the one rate that all share there.
    """
    cases = []
    for model, lengths in RATES:
        names = (*COMPARED, *OTHERS) if model == "opt-13b" else COMPARED
        points = [(name, rate) for name in names for rate in _rates(model, lengths, name)]
        for name, rate in points:
            is_headline = name in COMPARED and model == "opt-13b" and rate == SHARED_RATES[lengths]
            of_point = seeds if is_headline else seeds[:1]
            cases += [AliseLoad(model, lengths, rate).case("figure 6", name, seed) for seed in of_point]
    for lengths, rates in ORCA_RATES.items():
        loads = [AliseLoad("opt-13b", lengths, rate) for rate in rates]
        cases += [load.case("figure 6", "ORCA", seeds[0]) for load in loads]
    return cases


def _rates(model: str, lengths: str, name: str) -> tuple[float, ...]:
    rates = RATES[model, lengths]
    return rates[:_NUM_EACH] if name in _IN_ORDER_OF_ARRIVAL else rates[-_NUM_EACH:]


def figure_8(seeds: Sequence[int], rates: Sequence[float]) -> list[LabelledCase]:
    """Return other ways to treat the caches of overtaken requests; swapping is ALISE in Figure 6."""
    loads = [AliseLoad("opt-13b", "alpaca", rate) for rate in rates]
    return [load.case("figure 8", *case) for load in loads for case in product(("Recompute", "Defer"), seeds)]


def choices() -> list[LabelledCase]:
    """Return cases of what the paper leaves open: K, its errors, and the older attention."""
    cases = []
    for lengths, rate in HIGH_RATES.items():
        load = AliseLoad("opt-13b", lengths, rate)
        cases += [load.case("choices", name, 1) for name in SYSTEMS if name.startswith(("ALISE,", "aligned_slo,"))]
        old = replace(load, kernel=AttentionKernel.ONE_BLOCK_PER_SEQUENCE)
        cases += [old.case("one block per sequence", name, 1) for name in COMPARED]
    return cases


def long_traces() -> list[LabelledCase]:
    """Return longer traces, at a rate slightly too high for all, where overload adds up."""
    load = AliseLoad("opt-13b", "sharegpt", 1.5, _LONG_TRACE_S)
    return [load.case("long trace", name, 1) for name in COMPARED]


# --- what comes of it


def rate_at(rows: Iterable[Row], target_s: float = TARGET_S) -> float | None:
    """Return the requests per second at which the mean normalised latency reaches the target; rows by their rates.

    Between two rates its logarithm is taken for a line. None where it is reached before the first or not at all.
    """
    for below, above in pairwise(rows):
        low, high = below[LATENCY], above[LATENCY]
        if low < target_s <= high:
            share = math.log(target_s / low) / math.log(high / low)
            return float(below["rate"] + share * (above["rate"] - below["rate"]))
    return None


def throughputs(rows: Sequence[Row]) -> list[Row]:
    """Return, by model and lengths, requests per second at the target, and how many times vLLM's."""
    found = []
    for model, lengths in dict.fromkeys((row["model"], row["lengths"]) for row in rows):
        of_figure = pick(rows, part="figure 6", model=model, lengths=lengths)
        reached = {
            name: rate_at(over_seeds(pick(of_figure, policy=name), ("rate",)))
            for name in dict.fromkeys(row["policy"] for row in of_figure)
        }
        baseline = reached.get("vLLM")
        for name, rate in reached.items():
            times = rate / baseline if rate and baseline else None
            found.append({"model": model, "lengths": lengths, "policy": name, "rate": rate, "times": times})
    return found


def show(rows: Sequence[Row], reached: Sequence[Row]) -> None:
    print_parts(rows, ("model", "lengths", "rate", "policy"), COLUMNS)
    print_table(reached, HEADINGS, title=f"figure 6: requests/s at {TARGET_S:g} s/token")


def cases_of(*, is_quick: bool) -> list[LabelledCase]:
    if is_quick:
        loads = [AliseLoad("opt-13b", "sharegpt", rate, 60.0) for rate in (1.0, 2.0)]
        return [load.case("figure 6", name, 1) for load in loads for name in COMPARED]
    return figure_6((1, 2, 3)) + figure_8((1,), (20, 28, 38)) + choices() + long_traces()


def main() -> None:
    """Simulate; print and, unless quick, record."""
    options = read_options(__doc__)
    cases = cases_of(is_quick=options.is_quick)
    rows = perform(
        "alise", options, [cases], _RECORDED, lambda rows: {"throughput": chosen(throughputs(rows), HEADINGS)}
    )
    show(rows, throughputs(rows))


if __name__ == "__main__":
    main()
