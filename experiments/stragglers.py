"""What stragglers in decode attention cost: three kernels, five systems, a 70B model on eight H100 a worker.

    python -m experiments.stragglers [--seconds 60] [--kernels NAME ...] [--systems NAME ...] [--told] [--record]

Few key heads on a device leave a long context to few multiprocessors. Contexts differ widely here, as 5 % of the
prompts have 8 000 to 16 000 tokens; workers are bound by decodes. Every system has four workers, which learn costs.
Requests have no objectives, but in the second system, where mean gaps may take 40 ms.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from math import ceil

from alignedserve.config.sections import Topology
from alignedserve.costmodel.hardware import hardware
from alignedserve.costmodel.model import AttentionKernel
from alignedserve.costmodel.work import IterationWork
from benchmarks.measuring.arguments import parser_of
from experiments.alignedserve import OUTSTANDING, PaperCell, further_figures
from experiments.common import LabelledCase, chosen, cluster_case, line, print_table, run, write_record
from lab.costmodel.choice import WorkerSpec, make_cost_model
from lab.costmodel.list_schedule import DIVISIONS, Division, ListScheduledModel, Multiprocessors, accelerator_of
from lab.sim.policies import ClusterHardware, with_policy

WORKER = WorkerSpec("llama-3-70b", "h100", tensor_parallel=8)
CELL = PaperCell(2, 2)
LENGTHS = "prompt=mix(0.95: uniform(1,999), 0.05: uniform(8000,16000)), output=uniform(256,1024)"
_RESIDENT = 2  # blocks of FlashAttention-2 on a multiprocessor, by its rule
_BLOCK, _MAX_PARTS = 128, 128  # tokens of the least part of a context; parts
_NEARLY, _FILLED = 0.85, 0.8  # of the best filling of the last wave; of the places, from which no context is divided


def upstream_part(work: IterationWork, on: Multiprocessors) -> float:
    """Return the longest part of a context by FlashAttention-2's `num_splits_heuristic`, as its callers use it today.

    Example: 64 contexts of one key head on 132 multiprocessors come in 4 parts each, as 256 parts fill 264 places.
    """
    num_places, longest = _RESIDENT * on.num_multiprocessors, work.max_decode_context_len
    num_parts = _num_parts(work.num_decodes * on.num_heads, num_places, max(ceil(longest / _BLOCK), 1))
    return longest if num_parts == 1 else min(longest, ceil(ceil(longest / _BLOCK) / num_parts) * _BLOCK)


@cache
def _num_parts(num_blocks: int, num_places: int, length: int) -> int:
    if num_blocks >= _FILLED * num_places:
        return 1
    waves = {
        parts: num_blocks * parts / num_places
        for parts in range(1, min(_MAX_PARTS, num_places, length) + 1)
        if parts == 1 or ceil(length / parts) != ceil(length / (parts - 1))
    }
    filled = {parts: number / ceil(number) for parts, number in waves.items()}
    return next(parts for parts, share in filled.items() if share >= _NEARLY * max(filled.values()))


_OF_KEY_HEADS = replace(DIVISIONS[AttentionKernel.PAGED_V1], per_query_head=False)
KERNELS: Mapping[str, Division | None] = {
    "balanced": None,
    "flash-attention-2": replace(DIVISIONS[AttentionKernel.FLASH_ATTENTION_2], longest_part=upstream_part),
    "one split": replace(_OF_KEY_HEADS, source="no context is divided, as in batch-invariant mode"),
}
SYSTEMS: Mapping[str, tuple[str, Topology, str]] = {  # policy, topology, objectives
    "aligned_slo": ("aligned_slo", Topology.ELASTIC, ""),
    "aligned_slo, 40 ms": ("aligned_slo", Topology.ELASTIC, ", ttft=10, tpot=0.04"),
    "aligned_slo, separate": ("aligned_slo", Topology.DISAGGREGATED, ""),
    "distserve": ("distserve", Topology.DISAGGREGATED, ""),
    "sarathi": ("sarathi", Topology.COLOCATED, ""),
}
COLUMNS: Mapping[str, str] = {
    "kernel": "kernel",
    "system": "system",
    "all.loaded_tokens_per_s": "tokens/s",
    "straggler_share": "attention lost",
    "all.tbt_s.p50": "p50 gap",
    "all.tbt_s.p99": "p99 gap",
    "all.longest_gap_s": "longest gap",
    "all.tpot_s.p99": "p99 TPOT",
    "ledger.batch": "batch",
    "ledger.spread": "longest/mean",
    "num_evictions": "evictions",
}
_MORE = ("all.tokens_per_s", "all.ttft_s.mean", "utilisation", "seed", "code", "workload", "sent_s")


def case_of(kernel: str, system: str, seconds: float, *, is_told: bool = False) -> LabelledCase:
    policy, topology, objectives = SYSTEMS[system]
    cluster = with_policy(CELL.cluster(topology), policy, topology=topology)
    workload = line(f"{LENGTHS}, outstanding={OUTSTANDING}{objectives}", 1, duration_s=seconds)
    labelled = cluster_case({"kernel": kernel, "system": system}, ClusterHardware(WORKER), cluster, workload)
    costs, division = make_cost_model("roofline", WORKER), KERNELS[kernel]
    if division is not None:
        on = accelerator_of(WORKER.shape, hardware(WORKER.hardware).num_multiprocessors, WORKER.tensor_parallel)
        costs = ListScheduledModel(costs, division, on)
    config = replace(labelled.case.config, decode_costs=costs, prefill_costs=costs, learns_costs=not is_told)
    return labelled._replace(case=replace(labelled.case, config=config))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals, simulated")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--processes", type=int, default=2, help="simulations at a time")
    parser.add_argument("--told", action="store_true", help="workers know the true costs")
    parser.add_argument("--record", action="store_true", help="in results/stragglers.json")
    given = parser.parse_args()
    case = partial(case_of, seconds=given.seconds, is_told=given.told)
    cases = [case(kernel, system) for kernel in given.kernels for system in given.systems]
    rows = run(cases, processes=given.processes, also=further_figures)
    print_table(rows, COLUMNS)
    if given.record:
        write_record("stragglers", {"runs": chosen(rows, (*COLUMNS, *_MORE))})


if __name__ == "__main__":
    main()
