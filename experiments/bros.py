"""BROS (Wan et al., 2025), Figures 10 to 13: real-time and best-effort requests on one worker.

    python -m experiments.bros [--quick] [--processes 2] [--policies NAME ...] [--parts NAME ...]

Normalised latency and SLO attainment of real-time requests, and what that costs in best-effort throughput, against vLLM
and round-robin. docs/experiments/bros.md has the paper's numbers, ours, and why they differ.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from experiments.common import (
    STEADY_FIGURES,
    ColocatedWorkerSpec,
    LabelledCase,
    Row,
    colocated_case,
    line,
    perform,
    pick,
    print_parts,
    print_table,
    read_options,
)
from experiments.steady import LEAST_S, LEAST_SEEDS
from lab.costmodel.choice import WorkerSpec

WORKERS: Mapping[str, ColocatedWorkerSpec] = {  # section 7.1
    "opt-13b": ColocatedWorkerSpec(WorkerSpec("opt-13b", "a100-40g", 2)),
    "opt-30b": ColocatedWorkerSpec(WorkerSpec("opt-30b", "a100-40g", 4)),
    "llama-3-70b": ColocatedWorkerSpec(WorkerSpec("llama-3-70b", "a100-80g", 8)),
}
RATES: Mapping[str, tuple[float, ...]] = {  # five per model; of the paper's, its text names 10 (30B) and 15 (70B)
    "opt-13b": (2.0, 6.0, 10.0, 14.0, 18.0),
    "opt-30b": (2.0, 6.0, 10.0, 14.0, 18.0),
    "llama-3-70b": (3.0, 6.0, 9.0, 12.0, 15.0),
}
LENGTHS: Mapping[str, str] = {  # means and deviations of Table 2
    "sharegpt": "prompt=skewed(222.76,256.36), output=skewed(234.51,268.50)",
    "lmsys": "prompt=skewed(90.50,148.52), output=skewed(237.04,228.21)",
}
COMPARED = ("fcfs", "round_robin", "bros", "aligned_slo")
ALL = (*COMPARED, "sarathi", "accelgen")
WAVE = 64  # best-effort requests that come at once, when those before have ended; the paper does not say how many
RECOMPUTING = "bros, recomputing"  # without shared blocks and swapping (section 7.4.1)
WHOLE = "bros, whole caches"  # without shared blocks: whole caches are swapped
WAITING = "bros, long prompts wait"  # for the end of all decodes: the letter of Algorithm 1 (docs/policies/bros.md)
FIGURES = "figures 10, 11"
READINGS = "readings"
STEADY = "steady"  # ten minutes, five seeds: rates; all other parts are bursts
STEADY_RATES: Mapping[float, tuple[str, ...]] = {10.0: COMPARED, 18.0: ("bros", "aligned_slo")}
_CONTEXT = 2048  # OPT's; longer requests are left out, and no policy knows how much of it an answer will take

COLUMNS: Mapping[str, str] = {
    "lengths": "lengths",
    "model": "model",
    "rate": "RT/s",
    "wave": "wave",
    "costs": "costs",
    "policy": "policy",
    "rt.normalized_s.mean": "s/token",
    "rt.ttft_attainment": "TTFT held",
    "rt.tpot_attainment": "TPOT held",
    "rt.attainment": "both",
    "rt.ttft_s.p99": "p99 TTFT",
    "be.loaded_requests_per_s": "BE/s",
    "rt.loaded_requests_per_s": "served RT/s",
}
COMPARISON: Mapping[str, str] = {
    "latency": "s/token, by how much",
    "be": "BE/s, by how much",
    "ttft": "TTFT held, times",
    "tpot": "TPOT held, times",
    "both": "both, times",
}
_MORE = ("seed", "rt.tpot_s.p99", "rt.tbt_s.p99", "rt.num_sent", "be.num_sent", "duration_s", "utilisation")
_RECORDED = (
    "part",
    "code",
    *COLUMNS,
    *_MORE,
    "num_iterations",
    "num_evictions",
    "num_preemptions",
    "num_recomputed_tokens",
    "workload",
    *STEADY_FIGURES,
)


@dataclass(frozen=True, slots=True)
class BrosLoad:
    """One point of a figure."""

    model: str
    rate: float
    lengths: str = "sharegpt"
    wave: int = WAVE
    costs: str = "roofline"

    def line(self) -> str:
        """Return the workload line (docs/workloads.md); without best-effort requests in waves of none."""
        limits = f"max_tokens={_CONTEXT}"
        real_time = f"rt: {LENGTHS[self.lengths]}, max_total={_CONTEXT}, {limits}, rate={self.rate}, ttft=0.4, tpot=0.2"
        if not self.wave:
            return real_time
        return f"{real_time}; be: prompt=uniform(512,1024), output=uniform(32,128), {limits}, wave={self.wave}"

    def worker(self) -> ColocatedWorkerSpec:
        """Return the paper's system; published costs are of A100-80GB."""
        on = WORKERS[self.model]
        if self.costs == "roofline":
            return on
        return replace(on, source=self.costs, worker=replace(on.worker, hardware="a100-80g"))

    def case(self, part: str, policy: str, seed: int, duration_s: float) -> LabelledCase:
        labels: dict[str, str | float] = {
            "part": part,
            "model": self.model,
            "rate": self.rate,
            "lengths": self.lengths,
            "wave": self.wave,
            "costs": self.costs,
            "policy": policy,
        }
        workload = line(self.line(), seed, duration_s=duration_s)
        if policy == WAITING:
            return colocated_case(labels, "bros", self.worker(), workload, {"long_prompts_wait": True})
        if policy == WHOLE:
            return colocated_case(labels, "bros", self.worker(), workload, {"share_blocks": False})
        if policy == RECOMPUTING:
            on = replace(self.worker(), swap_space_bytes=0)
            return colocated_case(labels, "bros", on, workload, {"share_blocks": False})
        return colocated_case(labels, policy, self.worker(), workload)


# --- parts


def figures_10_and_11(duration_s: float) -> list[LabelledCase]:
    """Return three models, five rates each; of the second kind of lengths every other rate."""
    loads = [BrosLoad(model, rate) for model in WORKERS for rate in RATES[model]]
    loads += [BrosLoad(model, rate, "lmsys") for model in WORKERS for rate in RATES[model][::2]]
    return [load.case(FIGURES, policy, 1, duration_s) for load in loads for policy in COMPARED]


def headline(duration_s: float, seeds: Sequence[int]) -> list[LabelledCase]:
    """Return one point, longer and with several seeds; two policies that the paper has not."""
    load = BrosLoad("opt-13b", 10.0)
    return [load.case("headline", policy, seed, duration_s) for policy, seed in product(ALL, seeds)]


def other_waves(duration_s: float) -> list[LabelledCase]:
    """Return cases of what the paper does not say: how much best-effort work is outstanding."""
    loads = [BrosLoad("opt-13b", 10.0, wave=wave) for wave in (32, 128)]
    return [load.case("waves", policy, 1, duration_s) for load in loads for policy in COMPARED]


def other_costs(duration_s: float) -> list[LabelledCase]:
    """Return the same worker with the iteration times that others have measured, where there are any."""
    loads = [BrosLoad("opt-13b", 10.0, costs=costs) for costs in ("distserve", "vllm")]
    return [load.case("costs", policy, 1, duration_s) for load in loads for policy in COMPARED]


def figure_13(duration_s: float, seeds: Sequence[int]) -> list[LabelledCase]:
    """Return BROS with shared blocks, and with swapping or recomputing in their place; at the paper's rate, with memory
    short."""
    load = BrosLoad("opt-30b", 10.0, wave=2 * WAVE)
    policies = ("bros", WHOLE, RECOMPUTING)
    return [load.case("figure 13", policy, seed, duration_s) for policy, seed in product(policies, seeds)]


def figure_12(duration_s: float) -> list[LabelledCase]:
    """Return real-time requests alone, without shared blocks, at rates from few to more than can be served."""
    loads = [BrosLoad("opt-13b", rate, wave=0) for rate in (10.0, 20.0, 30.0, 40.0)]
    return [load.case("figure 12", policy, 1, duration_s) for load in loads for policy in ("fcfs", WHOLE)]


def other_reading(duration_s: float) -> list[LabelledCase]:
    """Return BROS by the other reading, at the points of Figure 10 where some prompts last longer than the TPOT."""
    loads = [BrosLoad(model, rate) for model in ("opt-30b", "llama-3-70b") for rate in RATES[model]]
    return [load.case(READINGS, WAITING, 1, duration_s) for load in loads]


def steady_state() -> list[LabelledCase]:
    points = [(BrosLoad("opt-13b", rate), policy) for rate, policies in STEADY_RATES.items() for policy in policies]
    return [load.case(STEADY, policy, seed, LEAST_S) for load, policy in points for seed in range(1, LEAST_SEEDS + 1)]


# --- what comes of it


def comparisons(rows: Sequence[Row]) -> list[Row]:
    were_run = {(row["lengths"], row["policy"]) for row in rows}
    pairs = [*product(("bros", "aligned_slo"), COMPARED[:2]), ("aligned_slo", "bros")]
    return [
        comparison(rows, lengths, *pair)
        for lengths, pair in product(LENGTHS, pairs)
        if all((lengths, policy) in were_run for policy in pair)
    ]


def comparison(rows: Sequence[Row], lengths: str, policy: str, baseline: str) -> Row:
    """Return averages over the cases of a figure as the paper states them."""
    ours, theirs = (pick(rows, lengths=lengths, policy=name) for name in (policy, baseline))
    latency, throughput = "rt.normalized_s.mean", "be.loaded_requests_per_s"
    return {
        "lengths": lengths,
        "policy": policy,
        "baseline": baseline,
        "latency": _mean(one[latency] / other[latency] - 1 for one, other in zip(ours, theirs, strict=True)),
        "be": _total(ours, throughput) / _total(theirs, throughput) - 1,
        "ttft": _ratio(_total(ours, "rt.ttft_attainment"), _total(theirs, "rt.ttft_attainment")),
        "tpot": _ratio(_total(ours, "rt.tpot_attainment"), _total(theirs, "rt.tpot_attainment")),
        "both": _ratio(_total(ours, "rt.attainment"), _total(theirs, "rt.attainment")),
    }


def _total(rows: Iterable[Row], name: str) -> float:
    return sum(float(row[name]) for row in rows)


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def _ratio(ours: float, theirs: float) -> float | None:
    return ours / theirs if theirs else None


def figures(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {"comparisons": comparisons(pick(rows, part=FIGURES))}


def show(rows: Sequence[Row], comparisons: Sequence[Row]) -> None:
    print_parts(rows, ("lengths", "model", "rate", "wave", "costs", "policy"), COLUMNS)
    headings = {"lengths": "lengths", "policy": "policy", "baseline": "against"}
    print_table(comparisons, {**headings, **COMPARISON}, title="averages over figures 10 and 11")


def cases_of(*, is_quick: bool) -> list[LabelledCase]:
    if is_quick:
        return headline(15.0, (1,))
    return [
        *headline(120.0, (1, 2, 3)),
        *figures_10_and_11(60.0),
        *other_waves(60.0),
        *other_costs(60.0),
        *figure_12(30.0),
        *figure_13(60.0, (1, 2)),
        *other_reading(60.0),
        *steady_state(),
    ]


def main() -> None:
    """Simulate, show, record."""
    options = read_options(__doc__)
    rows = perform("bros", options, [cases_of(is_quick=options.is_quick)], _RECORDED, figures)
    show(rows, **figures(rows))


if __name__ == "__main__":
    main()
