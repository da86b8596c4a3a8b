"""`aligned_slo` and each paper's policy on traces that no paper's figures use and its rules were not found with.

    python -m experiments.unseen [--quick] [--processes 2] [--policies NAME ...] [--parts NAME ...]

Real-time requests of a recorded trace beside best-effort ones of another, on one worker; and the same without
objectives on a prefill and a decode worker. All lengths and times ship with the package; a seed is another window of a
trace. docs/experiments/unseen.md says where it is better and where it is not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alignedserve.config.sections import Topology
from alignedserve.costmodel.model import AttentionKernel
from experiments.alignedserve import KERNELS, PAIR, further_figures
from experiments.bros import WAITING
from experiments.common import (
    STEADY_FIGURES,
    ColocatedWorkerSpec,
    LabelledCase,
    Row,
    chosen,
    cluster_case,
    colocated_case,
    line,
    over_seeds,
    perform,
    pick,
    print_table,
    read_options,
)
from lab.costmodel.choice import WorkerSpec
from lab.sim.policies import ClusterHardware, with_policy

UNION = "aligned_slo"
PAPERS = ("bros", WAITING, "accelgen", "alise", "apt_serve")  # AlignedServe's own needs workers of both kinds: APART
MIXED = ("fcfs", "sarathi", *PAPERS, UNION)
APART = ("distserve", "aligned", UNION)
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "apt_serve": {"hybrid_cache": False},  # larger here than keys and values
    WAITING: {"long_prompts_wait": True},
}
WORKER = WorkerSpec("llama-3-8b", "a100-80g")
_CONTEXT = 32000  # as with scaled positions: longer than Llama-3-8B's own
_APART_S = 360  # from the beginning of one seed's window of a trace to the next one's


@dataclass(frozen=True, slots=True)
class Trace:
    """One recording, what its clients want, and what is served beside it."""

    objectives: str
    rates: tuple[float, float]  # requests/s: in which it is hardly and wholly busy
    beside: str  # lengths of the best-effort requests
    is_timed: bool = True
    window_s: float = 60.0
    limit: str = f"max_total={_CONTEXT}"


TRACES: Mapping[str, Trace] = {
    "azure_code": Trace("ttft=2, tpot=0.1", (1.5, 4.0), "arxiv"),
    "mooncake": Trace("ttft=30, tpot=0.1", (0.25, 0.5), "arxiv", window_s=120.0),  # its paper's
    "arxiv": Trace("ttft=4, tpot=0.1", (1.0, 2.5), "azure_code", is_timed=False),
}
MIX, SEPARATE = "mixed", "separate workers"
_OUTSTANDING = 32

COLUMNS: Mapping[str, str] = {
    "trace": "trace",
    "rate": "requests/s",
    "policy": "policy",
    "rt.attainment": "both held",
    "rt.ttft_attainment": "TTFT held",
    "rt.tpot_attainment": "TPOT held",
    "rt.goodput_per_s": "goodput/s",
    "rt.tbt_s.p99": "p99 TBT",
    "be.tokens_per_s": "BE tokens/s",
    "be.loaded_requests_per_s": "BE/s",
    "all.tokens_per_s": "tokens/s",
}
COLUMNS_APART: Mapping[str, str] = {
    "trace": "trace",
    "kernel": "kernel",
    "policy": "policy",
    "all.tokens_per_s": "tokens/s",
    "all.tbt_s.p99": "p99 TBT",
    "all.ttft_s.mean": "TTFT",
    "ledger.batch": "batch",
    "ledger.spread": "longest/mean",
}
_MORE = ("seed", "rt.num_sent", "be.num_sent", "rt.ttft_s.p99", "duration_s", "utilisation", "num_preemptions")
_RECORDED = ("part", "code", *dict.fromkeys((*COLUMNS, *COLUMNS_APART)), *_MORE, "workload", *STEADY_FIGURES)
COMPARED: Mapping[str, bool] = {  # and whether more is better
    "rt.attainment": True,
    "rt.goodput_per_s": True,
    "rt.tbt_s.p99": False,
    "be.tokens_per_s": True,
}


def _source(name: str, seed: int, rate: float) -> str:
    trace = TRACES[name]
    when = f"arrivals=recorded, start={_APART_S * (seed - 1)}" if trace.is_timed else "arrivals=gamma"
    return f"{name}, {trace.limit}, {when}, rate={rate:g}"


def mixed_case(name: str, rate: float, policy: str, seed: int, duration_s: float) -> LabelledCase:
    trace = TRACES[name]
    best_effort = f"be: {trace.beside}, {trace.limit}, outstanding={_OUTSTANDING}"
    text = f"rt: {_source(name, seed, rate)}, {trace.objectives}; {best_effort}"
    labels: Mapping[str, str | float] = {"part": MIX, "trace": name, "rate": rate, "policy": policy}
    worker = ColocatedWorkerSpec(WORKER, max_tokens=8192, context_len=_CONTEXT)
    workload = line(text, seed, duration_s=duration_s)
    return colocated_case(labels, policy.partition(",")[0], worker, workload, SETTINGS.get(policy))


def separate_case(name: str, kernel: AttentionKernel, policy: str, seed: int, num_requests: int) -> LabelledCase:
    """Return all requests of these lengths, arriving within seconds, as in AlignedServe's own experiment."""
    labels: Mapping[str, str | float] = {"part": SEPARATE, "trace": name, "kernel": kernel.value}
    pair = replace(PAIR, context_len=_CONTEXT)
    cluster = with_policy(pair.cluster(Topology.DISAGGREGATED), policy, topology=Topology.DISAGGREGATED)
    workload = line(f"{name}, {TRACES[name].limit}, rate=100", seed, num_requests=num_requests)
    return cluster_case(labels, ClusterHardware(replace(WORKER, kernel=kernel), buffer_share=0.5), cluster, workload)


# --- parts


def mixed(seed: int) -> list[LabelledCase]:
    points = [(name, rate, trace.window_s) for name, trace in TRACES.items() for rate in trace.rates]
    return [mixed_case(name, rate, policy, seed, window_s) for name, rate, window_s in points for policy in MIXED]


def separate(seed: int, num_requests: int = 200) -> list[LabelledCase]:
    points = [(name, kernel) for name in TRACES for kernel in KERNELS]
    return [separate_case(*point, policy, seed, num_requests) for point in points for policy in APART]


def parts_of(*, is_quick: bool) -> list[list[LabelledCase]]:
    """Return the whole experiment, seed by seed; or one point in little."""
    if is_quick:
        return [[mixed_case("azure_code", 4.0, policy, 1, 20.0) for policy in ("sarathi", "bros", UNION)]]
    return [part(seed) for seed in (1, 2, 3) for part in (mixed, separate)]


# --- what comes of it


def verdicts(rows: Sequence[Row]) -> list[Row]:
    means = over_seeds(pick(rows, part=MIX), ("trace", "rate", "policy"))
    found: list[Row] = []
    for trace, rate in dict.fromkeys((row["trace"], row["rate"]) for row in means):
        at = pick(means, trace=trace, rate=rate)
        ours, others = pick(at, policy=UNION), [row for row in at if row["policy"] != UNION]
        if ours and others:
            found += [_verdict(figure, ours[0], others) for figure in COMPARED if figure in ours[0]]
    return found


def _verdict(figure: str, ours: Row, others: Sequence[Row]) -> Row:
    is_more_better = COMPARED[figure]
    best = (max if is_more_better else min)(others, key=lambda row: float(row[figure]))
    is_worse = best[figure] > ours[figure] if is_more_better else best[figure] < ours[figure]
    known = {"trace": ours["trace"], "rate": ours["rate"], "figure": figure}
    compared = {"union": ours[figure], "best": best[figure], "of": best["policy"], "is_worse": is_worse}
    return chosen([{**known, **compared}], (*known, *compared))[0]


def show(rows: Sequence[Row], compared: Sequence[Row]) -> None:
    mixes = over_seeds(pick(rows, part=MIX), ("trace", "rate", "policy"))
    print_table(mixes, {**COLUMNS, "num_runs": "runs"}, title=MIX)
    apart = over_seeds(pick(rows, part=SEPARATE), ("trace", "kernel", "policy"))
    print_table(apart, {**COLUMNS_APART, "num_runs": "runs"}, title=SEPARATE)
    if compared:
        print_table(compared, {name: name for name in compared[0]}, title=f"{UNION} beside the best of the others")


def main() -> None:
    """Simulate, show, record; what is done is recorded after every part of every seed."""
    options = read_options(__doc__)
    parts = parts_of(is_quick=options.is_quick)
    rows = perform("unseen", options, parts, _RECORDED, lambda rows: {"verdicts": verdicts(rows)}, further_figures)
    show(rows, verdicts(rows))


if __name__ == "__main__":
    main()
