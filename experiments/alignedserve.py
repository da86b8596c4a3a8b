"""AlignedServe (2026), Figures 7 to 10, 13 and 14: decode batches of similar context length, and what they gain.

    python -m experiments.alignedserve [--quick] [--processes 2] [--parts steady ...]

Decoding throughput and P99 TBT against vLLM, DistServe and FastGen. In steady state with decode attention as kernels
divide it, a list schedule; in bursts with both bounds of it, waves as long as the longest context and load-balanced.
docs/experiments/alignedserve.md has the paper's numbers, ours, and why they differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import msgspec

from alignedserve.config.sections import (
    BatchingConfig,
    ClusterConfig,
    DecodeWorkerConfig,
    ModelSectionConfig,
    PoolConfig,
    PrefillWorkerConfig,
    RouterConfig,
    Topology,
)
from alignedserve.costmodel.model import AttentionKernel
from experiments.common import (
    GIB,
    MANY,
    STEADY_FIGURES,
    LabelledCase,
    Row,
    chosen,
    cluster_case,
    line,
    over_seeds,
    perform,
    pick,
    print_parts,
    print_table,
    read_options,
    source_or,
)
from experiments.steady import LEAST_S, LEAST_SEEDS
from lab.costmodel.choice import WorkerSpec
from lab.sim.policies import ClusterHardware, with_policy
from lab.sim.result import SimulationResult

KERNELS = STRAGGLER, BALANCED = AttentionKernel.ONE_BLOCK_PER_SEQUENCE, AttentionKernel.LOAD_BALANCED
SCHEDULED = AttentionKernel.PAGED_V1  # vLLM's kernel at the time of the paper, as a device schedules it
OTHER_KERNELS = (BALANCED, AttentionKernel.FLASH_ATTENTION_2)
DEGREE: Mapping[str, int] = {"opt-2.7b": 1, "opt-6.7b": 1, "opt-13b": 1, "opt-30b": 2}  # H100s of a worker
GROUPED = "llama-3-8b"  # four queries to a head of keys, so a fourth of the blocks where those are of key heads
SHORT_SHARES = (0.70, 0.95)  # of the paper's six; 0.95 is the one that its text has numbers for
STARVATION_S = 30.0  # the paper gives no threshold; its longest wait without any was about this (section 4.4, TTFT)

# The systems compared: a policy, and where it runs.
SYSTEMS: Mapping[str, tuple[str, Topology]] = {
    "aligned": ("aligned", Topology.DISAGGREGATED),
    "aligned_slo": ("aligned_slo", Topology.DISAGGREGATED),
    "distserve": ("distserve", Topology.DISAGGREGATED),
    "vllm": ("fcfs", Topology.COLOCATED),
    "fastgen": ("fastgen", Topology.COLOCATED),
    "vllm, chunked": ("sarathi", Topology.COLOCATED),
    "aligned_slo, colocated": ("aligned_slo", Topology.COLOCATED),
}
COMPARED = ("aligned", "aligned_slo", "distserve", "vllm", "fastgen")
BASELINES, CORE = ("vllm", "distserve", "fastgen"), ("aligned", "aligned_slo", "distserve", "vllm")
STEADY = "steady"  # ten minutes: rates; all other parts are bursts
WITHOUT_PREFETCH, WITHOUT_BOTH, FCFS_BATCHES = "aligned w/o P", "aligned w/o P&B", "aligned w/o B"
PAPERS = {"aligned": {"pack_share": None}}  # slack packed is not AlignedServe's

COLUMNS: Mapping[str, str] = {
    "lengths": "lengths",
    "model": "model",
    "kernel": "kernel",
    "workers": "workers",
    "system": "system",
    "all.tokens_per_s": "tokens/s",
    "all.loaded_tokens_per_s": "of ten minutes",
    "straggler_share": "stragglers",
    "all.tbt_s.p50": "p50 TBT",
    "all.tbt_s.p99": "p99 TBT",
    "all.tpot_s.p99": "p99 TPOT",
    "all.ttft_s.mean": "TTFT",
    "iteration.within_30ms": "within 30 ms",
    "ledger.batch": "batch",
    "ledger.spread": "longest/mean",
    "ledger.switch_share": "switching",
    "utilisation": "busiest",
}
COMPARISON: Mapping[str, str] = {
    "part": "part",
    "lengths": "lengths",
    "model": "model",
    "kernel": "kernel",
    "workers": "workers",
    "system": "system",
    **{f"throughput.{name}": f"tokens/s by {name}" for name in BASELINES},
    **{f"latency.{name}": f"{name} by p99 TBT" for name in BASELINES},
}
_MORE = (
    "policy",
    "topology",
    "seed",
    "all.num_sent",
    "all.end_to_end_s.p99",
    "duration_s",
    "num_iterations",
    "num_evictions",
    "num_preemptions",
    "ledger.prefetch_not_ready_s",
    "ledger.waiting_for_prefill_s",
    "num_requests",
)
_RECORDED = ("part", *COLUMNS, *_MORE, "code", "workload", *STEADY_FIGURES)


# --- what is served


def synthetic(short_share: float) -> str:
    """Return the mix of section 4.1: short prompts under one thousand tokens, long ones from one to eight thousand.

    How long answers are and when requests come is not said. Here: 32 to 256 tokens, and all within a few seconds.
    """
    long_share = round(1.0 - short_share, 2)
    prompts = f"mix({short_share}: uniform(1,999), {long_share}: uniform(1000,8000))"
    return f"prompt={prompts}, output=uniform(32,256), rate={_RATE}"


def applications() -> dict[str, str]:
    """Return the three recordings; prompts are cut to what every worker's memory holds."""
    sources = {
        "sharegpt": source_or("sharegpt_full", "sharegpt"),
        "longbench": source_or("longbench", "arxiv"),
        "azure": "azure_conv",
    }
    return {name: f"{source}, max_prompt={_MAX_PROMPT}, rate={_RATE}" for name, source in sources.items()}


_RATE, _MAX_PROMPT = 100, 16000  # requests/s: more than any of these serves, as how fast they work it off is measured
OUTSTANDING = 512  # in steady state: twice what a decode worker may run


# --- on what


@dataclass(frozen=True, slots=True)
class PaperCell:
    """Prefill and decode workers, or as many colocated ones."""

    num_prefill: int = 1
    num_decode: int = 1
    context_len: int = 18_000  # longer than OPT's, as in the paper: its longest prompts have 8 000 tokens, ours 16 000

    def cluster(self, topology: Topology) -> ClusterConfig:
        """Return the sizes of a GPU: vLLM's limits at the time of the paper.

        Host memory as half of the paper's machine.
        """
        is_colocated = not topology.is_separate
        return ClusterConfig(
            model=ModelSectionConfig(max_context_len=self.context_len),
            router=RouterConfig(
                max_queued_requests=MANY,
                max_queued_tokens=MANY,
                max_prefill_tokens_per_worker=32768,
                max_candidate_requests=64,
            ),
            batching=BatchingConfig(starvation_s=STARVATION_S),
            pool=PoolConfig(memory_bytes=400 * GIB),
            prefill=PrefillWorkerConfig(count=self.num_prefill, max_running_requests=64, max_num_batched_tokens=8192),
            decode=DecodeWorkerConfig(
                count=self.num_decode + (self.num_prefill if is_colocated else 0),
                max_running_requests=256,
                max_num_batched_tokens=2048,
                max_waiting_requests=MANY,
                swap_space_bytes=64 * GIB,
            ),
        )


PAIR = PaperCell()
EIGHT = PaperCell(2, 6)  # the paper's machine; how it divides its accelerators is not said


@dataclass(frozen=True, slots=True)
class AlignedServeLoad:
    """One point of a figure."""

    lengths: str
    line: str
    num_requests: int
    model: str = "opt-2.7b"
    kernel: AttentionKernel = STRAGGLER
    cell: PaperCell = PAIR
    is_steady: bool = False  # ten minutes with as many requests in the air as the pool needs to choose from

    def case(self, part: str, system: str, seed: int) -> LabelledCase:
        policy, topology = SYSTEMS[system]
        cluster = with_policy(self.cell.cluster(topology), policy, PAPERS.get(policy), topology=topology)
        return self._case(part, system, seed, cluster)

    def ablated(self, part: str, name: str, seed: int) -> LabelledCase:
        """Return AlignedServe without batching by length (FCFS), without prefetching (no buffers), or without both."""
        settings = self.cell.cluster(Topology.DISAGGREGATED)
        if name in (FCFS_BATCHES, WITHOUT_BOTH):
            fcfs = msgspec.structs.replace(settings.batching, policy="fcfs")
            settings = msgspec.structs.replace(settings, batching=fcfs)
        buffer_share = 0.0 if name in (WITHOUT_PREFETCH, WITHOUT_BOTH) else 0.5
        settings = with_policy(settings, "aligned", PAPERS["aligned"])
        return self._case(part, name, seed, settings, buffer_share=buffer_share)

    def _case(
        self, part: str, system: str, seed: int, cluster: ClusterConfig, *, buffer_share: float = 0.5
    ) -> LabelledCase:
        labels: dict[str, str | float] = {
            "part": part,
            "lengths": self.lengths,
            "model": self.model,
            "kernel": self.kernel.value,
            "workers": f"{self.cell.num_prefill}+{self.cell.num_decode}",
            "system": system,
            "topology": cluster.chosen_topology.value,
            "num_requests": OUTSTANDING if self.is_steady else self.num_requests,
        }
        worker = WorkerSpec(self.model, "h100", DEGREE.get(self.model, 1), self.kernel)
        machines = ClusterHardware(worker, buffer_share=buffer_share)
        workload = line(self.line, seed, num_requests=self.num_requests)
        if self.is_steady:
            closed = self.line.replace(f"rate={_RATE}", f"outstanding={OUTSTANDING}")
            workload = line(closed, seed, duration_s=LEAST_S)
        labelled = cluster_case(labels, machines, cluster, workload)
        config = replace(labelled.case.config, timeline_of=labelled.case.config.decode_name(0))
        return labelled._replace(case=replace(labelled.case, config=config))


def further_figures(result: SimulationResult) -> Row:
    """Return further figures: iterations of one decode worker, and the iteration logs of all."""
    durations_s = [one.ended_s - one.started_s for one in result.timeline]
    log, num = result.iteration_log, max(result.iteration_log.num_iterations, 1)
    return {
        "iteration.within_30ms": sum(one <= 0.03 for one in durations_s) / max(len(durations_s), 1),
        "ledger.batch": log.num_requests / num,
        "ledger.spread": log.sum_of_spreads / num,
        "ledger.switch_share": log.num_switch_iterations / num,
        "ledger.prefetch_not_ready_s": log.prefetch_not_ready_s,
        "ledger.waiting_for_prefill_s": log.waiting_for_prefill_s,
        "straggler_share": log.straggler_share,
    }


# --- parts


HEADLINE = AlignedServeLoad("95% short", synthetic(0.95), 600)


def headline(num_requests: int, seeds: Sequence[int]) -> list[LabelledCase]:
    """Return the point that the paper's text has numbers for, with both kernels and every system."""
    loads = [replace(HEADLINE, kernel=kernel, num_requests=num_requests) for kernel in KERNELS]
    return [load.case("headline", system, seed) for load in loads for system in SYSTEMS for seed in seeds]


def figures_7_and_9(num_requests: int) -> list[LabelledCase]:
    """Return short requests among long ones, on the four models; fewer short ones on the smallest."""
    points = [(model, SHORT_SHARES[-1]) for model in DEGREE] + [("opt-2.7b", share) for share in SHORT_SHARES[:-1]]
    loads = [AlignedServeLoad(f"{share:.0%} short", synthetic(share), num_requests, model) for model, share in points]
    return [load.case("figures 7, 9", system, 1) for load in loads for system in COMPARED]


def figures_8_and_10(num_requests: int) -> list[LabelledCase]:
    loads = [
        AlignedServeLoad(name, text, num_requests // (4 if name == "longbench" else 1), "opt-13b", kernel)
        for (name, text), kernel in product(applications().items(), KERNELS)
    ]
    return [load.case("figures 8, 10", system, 1) for load in loads for system in COMPARED]


def eight_accelerators(num_requests: int) -> list[LabelledCase]:
    load = replace(HEADLINE, cell=EIGHT, num_requests=num_requests)
    return [load.case("eight accelerators", system, 1) for system in COMPARED]


def figures_13_and_14(num_requests: int, seeds: Sequence[int]) -> list[LabelledCase]:
    texts = applications()
    azure = AlignedServeLoad("azure", texts["azure"], num_requests, "opt-13b")
    names = (FCFS_BATCHES, WITHOUT_PREFETCH, WITHOUT_BOTH)
    cases = [azure.ablated("figure 14", name, seed) for name, seed in product(names, seeds)]
    cases += [azure.case("figure 14", "aligned", seed) for seed in seeds]
    others = [
        AlignedServeLoad(name, texts[name], num_requests // (4 if name == "longbench" else 1), "opt-13b")
        for name in ("sharegpt", "longbench")
    ]
    return cases + [load.ablated("figure 13", FCFS_BATCHES, 1) for load in others]


def steady_state() -> list[list[LabelledCase]]:
    """Return all figures as rates of ten minutes, part by part: five seeds of the headline, one of everything else."""
    texts = applications()
    point = AlignedServeLoad("95% short", synthetic(0.95), 0, "opt-13b", SCHEDULED, is_steady=True)
    recorded = [replace(point, lengths=name, line=text) for name, text in texts.items()]
    bounds = (BALANCED, AttentionKernel.PAGED_V1_WORST_ORDER, STRAGGLER)
    kernels = [replace(point, kernel=kernel) for kernel in bounds]
    grouped = [replace(point, kernel=kernel, model=GROUPED) for kernel in OTHER_KERNELS]
    models = [replace(point, model=model) for model in DEGREE if model != point.model]
    models.append(replace(point, lengths="70% short", line=synthetic(0.7)))
    azure, ablations = replace(point, lengths="azure", line=texts["azure"]), (WITHOUT_PREFETCH, WITHOUT_BOTH)
    return [
        [point.case(STEADY, system, 1) for system in COMPARED],
        *([load.case(f"{STEADY}, kernels", system, 1) for system in CORE] for load in kernels),
        *([load.case(f"{STEADY}, recordings", system, 1) for system in COMPARED] for load in recorded),
        [azure.ablated(f"{STEADY}, parts", name, 1) for name in (FCFS_BATCHES, *ablations)],
        *([point.case(STEADY, system, seed) for system in COMPARED] for seed in range(2, LEAST_SEEDS + 1)),
        *([load.case(f"{STEADY}, grouped heads", system, 1) for system in CORE] for load in grouped),
        *([load.case(f"{STEADY}, models", system, 1) for system in CORE] for load in models),
        [replace(point, cell=EIGHT).case(f"{STEADY}, eight accelerators", system, 1) for system in CORE],
    ]


# --- what comes of it


def comparisons(rows: Sequence[Row]) -> list[Row]:
    """Return ours by each baseline, at every point where all of them ran."""
    means = over_seeds(rows, (*_POINT, "system"))
    points = dict.fromkeys(tuple(row[name] for name in _POINT) for row in means)
    compared: list[Row] = []
    for point in points:
        labels = dict(zip(_POINT, point, strict=True))
        by_system = {row["system"]: row for row in pick(means, **labels)}
        if all(name in by_system for name in COMPARED):
            compared += [labels | _ratios(by_system, system) for system in ("aligned", "aligned_slo")]
    return compared


_POINT = ("part", "lengths", "model", "kernel", "workers")


def _ratios(by_system: Mapping[str, Row], system: str) -> Row:
    ours, throughput, latency = by_system[system], "all.tokens_per_s", "all.tbt_s.p99"
    row: Row = {"system": system}
    for name in BASELINES:
        row[f"throughput.{name}"] = ours[throughput] / by_system[name][throughput]
        row[f"latency.{name}"] = by_system[name][latency] / ours[latency]
    return row


def show(rows: Sequence[Row], compared: Sequence[Row]) -> None:
    print_parts(rows, (*_POINT, "system"), COLUMNS)
    print_table(compared, COMPARISON, title="ours by theirs: more than 1 is better")


def parts_of(*, is_quick: bool) -> list[list[LabelledCase]]:
    """Return the whole experiment, part by part; or the headline in little."""
    if is_quick:
        return [headline(200, (1,))]
    return [
        headline(HEADLINE.num_requests, (1, 2, 3)),
        figures_13_and_14(400, (1, 2, 3)),
        figures_7_and_9(400),
        figures_8_and_10(400),
        eight_accelerators(1600),
        *steady_state(),
    ]


def main() -> None:
    """Simulate, show, record; what is done is recorded after every part."""
    options = read_options(__doc__)
    parts = parts_of(is_quick=options.is_quick)
    rows = perform("alignedserve", options, parts, _RECORDED, figures, further_figures)
    show(rows, comparisons(rows))


def figures(rows: Sequence[Row]) -> Row:
    return {"comparisons": chosen(comparisons(rows), COMPARISON)}


if __name__ == "__main__":
    main()
