"""The default beside every baseline that knows classes, simulated on the same loads of chat and documents.

    python -m benchmarks.promise.classed_policies  # about fifteen minutes of processor time
    python -m benchmarks.promise.classed_policies --load overload --shape "elastic, 1" --seeds 1

Machine, documents and topologies are those of `benchmarks.promise.chat_beside_documents`, whose chat is the first
load. Rates are for each worker that decodes. Where a policy has a size that depends on the machine (the tokens of an
iteration), several are tried, and the one with the best attainment is recorded. Of all seeds the worst attainment, TTFT
and gap count, and the mean rate of documents' tokens.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from alignedserve.config.sections import BatchingConfig, RouterConfig, SchedulingConfig
from alignedserve.core.request import RequestClass, Slo
from alignedserve.scheduling.factory import resolve_policy
from alignedserve.scheduling.policies import policy_entry
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import read_figures, write_result
from benchmarks.promise import chat_beside_documents
from benchmarks.promise.chat_beside_documents import CHAT_SLO, DURATION_S, NUM_DOCUMENTS, RATE
from lab.sim.config import SimConfig
from lab.sim.result import ClassResult, Measure
from lab.sim.simulation import Simulation
from lab.workload.requests import TimedRequest, Workload, WorkloadDescription

_BUDGETS = [{"token_budget": budget} for budget in (64, 512)]  # Sarathi-Serve's is of an A100
POLICIES: dict[str, list[dict[str, int]]] = {  # settings that are tried
    "aligned_slo": [{}],
    "fcfs_classed": [{}],
    "sarathi_classed": _BUDGETS,
    "edf": _BUDGETS,
    "srpt": _BUDGETS,
    "qoserve": [{"least_tokens": 32, "token_budget": 512}, {}],
}
SHAPES = ("elastic, 1", "disaggregated, 1 + 1")
NO_SLO = Slo()
TIGHT = Slo(ttft_s=1.0, tpot_s=0.1)


@dataclass(frozen=True)
class Load:
    """Chat at a rate, beside documents that all come at once."""

    rate: float
    slo: Slo = CHAT_SLO
    long_share: float = 0.0  # of the chats have prompts of 800 to 1 200 tokens
    document_slo: Slo = NO_SLO


LOADS = {
    "usual": Load(RATE),
    "tight": Load(2.0, TIGHT),
    "long prompts": Load(1.0, Slo(ttft_s=2.0, tpot_s=0.1), long_share=0.3),
    "lines": Load(1.0, TIGHT, document_slo=Slo(deadline_s=200.0)),
    "overload": Load(7.0, TIGHT),
}


def config_of(policy: str, settings: Mapping[str, int], shape: str) -> tuple[SimConfig, int]:
    """Configure a cluster under this policy, with its own order and batches; return also the workers that decode."""
    topology, num_workers, pool_blocks = chat_beside_documents.SHAPES[shape]
    config = chat_beside_documents.config_of(topology, num_workers, pool_blocks)
    cluster = msgspec.structs.replace(
        config.cluster,
        scheduling=SchedulingConfig(policy=policy, policy_params=dict(settings)),
        router=RouterConfig(max_queued_requests=100_000, max_queued_tokens=100_000_000),
        batching=BatchingConfig(),
    )
    return replace(config, cluster=resolve_policy(cluster)), num_workers


def workload_of(load: Load, seed: int, num_workers: int) -> Workload:
    rng = random.Random(seed)
    documents = {"request_class": RequestClass.BEST_EFFORT, "slo": load.document_slo}
    requests = [
        TimedRequest(0.0, rng.randrange(512, 1024), 700, 700, "documents", **documents)  # type: ignore[arg-type]
        for _ in range(NUM_DOCUMENTS * num_workers)
    ]
    requests.extend(_chats(load, rng, num_workers))
    return Workload(WorkloadDescription("chat beside documents", seed), tuple(requests))


def _chats(load: Load, rng: random.Random, num_workers: int) -> Iterator[TimedRequest]:
    now = 5.0
    while (now := now + rng.expovariate(load.rate * num_workers)) < DURATION_S - 15.0:
        prompt_len = rng.randrange(800, 1200) if rng.random() < load.long_share else rng.randrange(60, 200)
        yield TimedRequest(now, prompt_len, 40, 64, "chat", slo=load.slo)


def best_of(policy: str, load: str, shape: str, seeds: Sequence[int]) -> dict[str, Any]:
    rows = [measure(policy, settings, load, shape, seeds) for settings in POLICIES[policy]]
    return max(rows, key=lambda row: (row["attainment"], row["document_tokens_per_s"]))


def measure(policy: str, settings: Mapping[str, int], load: str, shape: str, seeds: Sequence[int]) -> dict[str, Any]:
    config, num_workers = config_of(policy, settings, shape)
    results = [Simulation(config, workload_of(LOADS[load], seed, num_workers)).run().classes for seed in seeds]
    chats: list[ClassResult] = [result["chat"] for result in results]
    return {
        "load": load,
        "shape": shape,
        "policy": policy,
        "settings": settings,
        "attainment": min(chat.attainment or 0.0 for chat in chats),
        "ttft_p99_s": max(_at(chat.ttft_s, 99) for chat in chats),
        "longest_gap_s": max(chat.longest_gap_s or 0.0 for chat in chats),
        "completed": min(chat.num_by_ending["completed"] / chat.num_sent for chat in chats),
        "document_tokens_per_s": sum(result["documents"].tokens_per_s for result in results) / len(results),
    }


def _at(measure: Measure | None, percent: int) -> float:
    return measure.curve[percent] if measure is not None else float("inf")


def main() -> None:
    """Measure and print every policy on every load and shape; write the result."""
    parser = parser_of(__doc__, name="scheduling/classed_policies")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--load", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--policy", nargs="+", default=list(POLICIES), choices=POLICIES)
    arguments = parser.parse_args()
    recorded = read_figures(arguments.name) or []
    rows = {(row["shape"], row["load"], row["policy"]): row for row in recorded}  # of others stay
    for shape in arguments.shape:
        topology = chat_beside_documents.SHAPES[shape][0]
        for load in arguments.load:
            for policy in arguments.policy:
                if topology not in policy_entry(policy).topologies:
                    continue
                row = best_of(policy, load, shape, range(1, arguments.seeds + 1))
                rows[shape, load, policy] = row
                print(
                    f"{shape:22} {load:14} {policy:16} {row['settings']!s:24} attained {row['attainment']:6.1%}"
                    f"  TTFT p99 {row['ttft_p99_s']:6.2f} s  longest gap {row['longest_gap_s']:6.2f} s"
                    f"  completed {row['completed']:4.0%}  documents {row['document_tokens_per_s']:6.1f}/s",
                    flush=True,
                )
    write_result(arguments.name, list(rows.values()))


if __name__ == "__main__":
    main()
