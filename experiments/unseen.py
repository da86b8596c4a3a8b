"""Every policy on traces that none was found with: other lengths, recorded and bursty arrivals, another model.

    python -m experiments.unseen [--quick] [--processes 2] [--policies NAME ...]

Real-time requests of a trace beside best-effort ones, at a rate that one worker can hold and at one that it cannot, and
the same on two prefill and two decode workers. docs/experiments/unseen.md has what came of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from alignedserve.config.sections import (
    ClusterConfig,
    DecodeWorkerConfig,
    PoolConfig,
    PrefillWorkerConfig,
    RouterConfig,
    Topology,
)
from alignedserve.costmodel.choice import WorkerSpec
from alignedserve.sim.machines import Machines
from alignedserve.sim.policies import with_policy
from alignedserve.sim.sweep import WorkloadLine
from experiments.common import (
    GIB,
    MANY,
    ColocatedWorker,
    LabelledCase,
    Row,
    chosen,
    cluster_case,
    colocated_case,
    line,
    over_seeds,
    pick,
    print_table,
    read_options,
    run,
    with_recorded,
    write_record,
)

WORKER = WorkerSpec("llama-3-8b", "a100-80g")
DOCUMENTS = "be: arxiv, outstanding=32"
SHORT_DOCUMENTS = "be: prompt=uniform(512,1024), output=uniform(32,128), outstanding=32"
LOADS: Mapping[str, str] = {
    "code, as recorded": f"rt: azure_code, arrivals=recorded, rate={{rate}}, ttft=1, tpot=0.1; {SHORT_DOCUMENTS}",
    "chat, in bursts": f"rt: azure_conv, rate={{rate}}, cv=5, ttft=1, tpot=0.1; {DOCUMENTS}",
    "long chat, as recorded": "rt: mooncake, arrivals=recorded, rate={rate}, max_total=16384, ttft=4, tpot=0.1; "
    f"{SHORT_DOCUMENTS}",
}
RATES: Mapping[str, tuple[float, float]] = {  # of real-time requests: one worker holds the first, not the second
    "code, as recorded": (3.0, 6.0),
    "chat, in bursts": (3.0, 6.0),
    "long chat, as recorded": (0.8, 1.6),
}
COLOCATED = ("fcfs", "sarathi", "fastgen", "bros", "accelgen", "alise", "apt_serve", "aligned_slo")
DISAGGREGATED = ("aligned", "distserve", "aligned_slo")
SEEDS = (1, 2)

COLUMNS: Mapping[str, str] = {
    "load": "load",
    "rate": "RT/s",
    "workers": "workers",
    "policy": "policy",
    "rt.attainment": "both held",
    "rt.ttft_attainment": "TTFT held",
    "rt.tpot_attainment": "TPOT held",
    "rt.ttft_s.p99": "p99 TTFT",
    "rt.tbt_s.p99": "p99 TBT",
    "rt.goodput_per_s": "goodput/s",
    "be.loaded_requests_per_s": "BE/s",
}
_RECORDED = ("commit", *COLUMNS, "seed", "rt.num_sent", "all.tokens_per_s", "duration_s", "utilisation", "workload")


@dataclass(frozen=True, slots=True)
class Load:
    """One trace at one rate."""

    name: str
    rate: float

    def colocated(self, policy: str, seed: int, duration_s: float) -> LabelledCase:
        """On one worker."""
        return colocated_case(
            self._labels("1 colocated"), policy, ColocatedWorker(WORKER), self._line(seed, duration_s)
        )

    def disaggregated(self, policy: str, seed: int, duration_s: float) -> LabelledCase:
        """Twice the load on four workers."""
        cluster = ClusterConfig(
            router=RouterConfig(max_queued_requests=MANY, max_queued_tokens=MANY, candidate_requests=64),
            prefill=PrefillWorkerConfig(count=2, max_running=64, max_tokens_per_iteration=8192),
            decode=DecodeWorkerConfig(count=2, max_running=256, max_waiting=MANY),
            pool=PoolConfig(memory_bytes=400 * GIB),
        )
        under_policy = with_policy(cluster, policy, topology=Topology.DISAGGREGATED)
        workload = Load(self.name, 2 * self.rate)._line(seed, duration_s)
        return cluster_case(self._labels("2 + 2"), Machines(WORKER), under_policy, workload)

    def _labels(self, workers: str) -> dict[str, str | float]:
        return {"load": self.name, "rate": self.rate, "workers": workers}

    def _line(self, seed: int, duration_s: float) -> WorkloadLine:
        return line(LOADS[self.name].format(rate=self.rate), seed, duration_s=duration_s)


def cases_of(loads: Sequence[Load], seeds: Sequence[int], duration_s: float) -> list[LabelledCase]:
    """Every policy in every topology that it has."""
    cases = [load.colocated(name, seed, duration_s) for load, name, seed in product(loads, COLOCATED, seeds)]
    cases += [load.disaggregated(name, seed, duration_s) for load, name, seed in product(loads, DISAGGREGATED, seeds)]
    return cases


def show(rows: Sequence[Row]) -> None:
    """One table for each kind of cluster."""
    for workers in dict.fromkeys(row["workers"] for row in rows):
        means = over_seeds(pick(rows, workers=workers), ("load", "rate", "workers", "policy"))
        print_table(means, COLUMNS, title=f"workers: {workers}")


def main() -> None:
    """Simulate, show, record."""
    options = read_options(__doc__)
    loads = [Load(name, rate) for name, rates in RATES.items() for rate in rates]
    cases = cases_of(loads[2:4], SEEDS[:1], 20.0) if options.is_quick else cases_of(loads, SEEDS, 60.0)
    rows = chosen(run(options.select(cases), processes=options.processes), _RECORDED)
    if options.is_recorded:
        rows = with_recorded("unseen", rows, options)
    show(rows)
    if options.is_recorded:
        write_record("unseen", {"runs": rows})


if __name__ == "__main__":
    main()
