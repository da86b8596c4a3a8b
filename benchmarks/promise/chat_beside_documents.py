"""Chat beside a backlog of documents, simulated, in every topology: what chat keeps, and what documents still get.

    python -m benchmarks.promise.chat_beside_documents  # about two minutes

A model of 125M OPT's shape on two cores: an iteration takes 15 ms and 0.9 ms for each token. Chat: Poisson, 0.4/s for
each worker, prompts of 60 to 200 tokens, answers of 40; TTFT 2 s, TPOT 1 s. Documents: 400 at once, prompts of 512 to
1 024 tokens, answers of 700, at best effort; a worker's memory holds 16 of them. Five minutes. Targets: chat attains
beside documents what it attains alone, no first token comes later than its objective, and documents get 85 % of the
tokens that they get alone.
"""

import random
from typing import Any

from alignedserve.config.sections import (
    BatchingConfig,
    ClusterConfig,
    DecodeWorkerConfig,
    PoolConfig,
    PrefillWorkerConfig,
    RouterConfig,
    SchedulingConfig,
    Topology,
)
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.request import RequestClass, Slo
from alignedserve.costmodel.hardware import LinkModel
from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from lab.sim.config import SimConfig, SimLinks
from lab.sim.result import ClassResult, Measure
from lab.sim.simulation import Simulation
from lab.workload.requests import TimedRequest, Workload, WorkloadDescription

LAYOUT = BlockLayout(block_size=16, num_layers=12, num_kv_heads=12, head_dim=64, dtype="float32")
LINKS = SimLinks(LinkModel(0.0005, 2e9), LinkModel(0.0005, 2e9), 0.0005)
COSTS = LinearIterationModel(
    LinearCoefficients(base_s=0.015, prompt_token_s=0.0009, decode_s=0.0009, context_token_s=5e-7), swap_token_s=2e-5
)
WORKER_BLOCKS = 1400
DURATION_S = 300.0
RATE = 0.4  # chat, for each worker that decodes
NUM_DOCUMENTS = 400  # for each worker that decodes
CHAT_SLO = Slo(ttft_s=2.0, tpot_s=1.0)
SHAPES: dict[str, tuple[Topology, int, int]] = {  # topology, workers that decode, blocks of the pool
    "elastic, 1": (Topology.ELASTIC, 1, 0),
    "elastic, 2": (Topology.ELASTIC, 2, 0),
    "colocated, 2": (Topology.COLOCATED, 2, 0),
    "disaggregated, 1 + 1": (Topology.DISAGGREGATED, 1, 20_000),
    "disaggregated, 1 + 1, a small pool": (Topology.DISAGGREGATED, 1, 700),
    "disaggregated, 2 + 2, a small pool": (Topology.DISAGGREGATED, 2, 700),
}


def config_of(topology: Topology, num_workers: int, pool_blocks: int) -> SimConfig:
    memory_bytes = WORKER_BLOCKS * LAYOUT.block_bytes
    cluster = ClusterConfig(
        topology=topology,
        scheduling=SchedulingConfig(policy="aligned_slo"),
        router=RouterConfig(prefill_order="least_slack"),
        batching=BatchingConfig(policy="density_first"),
        pool=PoolConfig(memory_bytes=max(pool_blocks, 1) * LAYOUT.block_bytes),
        prefill=PrefillWorkerConfig(
            count=num_workers, kv_cache_bytes=memory_bytes, candidate_buffer_bytes=memory_bytes // 4 * num_workers
        ),
        decode=DecodeWorkerConfig(count=num_workers, kv_cache_bytes=memory_bytes, max_running_requests=64),
    )
    return SimConfig(cluster, LAYOUT, LINKS, COSTS, duration_s=DURATION_S, seed=1)


def workload_of(seed: int, num_documents: int, rate: float, *, duration_s: float = DURATION_S) -> Workload:
    """Draw chat at this rate (0: none), and documents that all come at once."""
    rng = random.Random(seed)
    requests = [
        TimedRequest(0.0, rng.randrange(512, 1024), 700, 700, "documents", RequestClass.BEST_EFFORT)
        for _ in range(num_documents)
    ]
    now = 5.0
    while rate and (now := now + rng.expovariate(rate)) < duration_s - 15.0:
        requests.append(TimedRequest(now, rng.randrange(60, 200), 40, 64, "chat", slo=CHAT_SLO))
    return Workload(WorkloadDescription("chat beside documents", seed), tuple(requests))


def measure(name: str, seeds: range) -> dict[str, Any]:
    topology, num_workers, pool_blocks = SHAPES[name]
    config = config_of(topology, num_workers, pool_blocks)

    def run(seed: int, num_documents: int, rate: float) -> dict[str, ClassResult]:
        return Simulation(config, workload_of(seed, num_documents * num_workers, rate * num_workers)).run().classes

    beside = [run(seed, NUM_DOCUMENTS, RATE) for seed in seeds]
    alone = [run(seed, 0, RATE)["chat"] for seed in seeds]
    documents_alone = [run(seed, NUM_DOCUMENTS, 0.0)["documents"] for seed in seeds]
    tokens = [
        result["documents"].tokens_per_s / other.tokens_per_s
        for result, other in zip(beside, documents_alone, strict=True)
    ]
    return {
        "name": name,
        "alone": _chat_of(alone),
        "beside": _chat_of([result["chat"] for result in beside]),
        "document_tokens_per_s": sum(result["documents"].tokens_per_s for result in beside) / len(beside),
        "share_of_documents_alone": min(tokens),
    }


def _chat_of(results: list[ClassResult]) -> dict[str, float]:
    return {
        "attainment": min(result.attainment or 0.0 for result in results),
        "ttft_p50_s": max(_at(result.ttft_s, 50) for result in results),
        "ttft_p90_s": max(_at(result.ttft_s, 90) for result in results),
        "ttft_max_s": max(_at(result.ttft_s, -1) for result in results),
        "gap_max_s": max(_at(result.max_tbt_s, -1) for result in results),
    }


def _at(measure: Measure | None, percent: int) -> float:
    return measure.curve[percent] if measure is not None else float("inf")


def main() -> None:
    """Measure and print every shape; write the result."""
    parser = parser_of(__doc__, name="scheduling/chat_beside_documents")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    rows = []
    for name in SHAPES:
        row = measure(name, range(1, arguments.seeds + 1))
        rows.append(row)
        chat = row["beside"]
        print(
            f"{name:36} attained {chat['attainment']:6.1%} (alone {row['alone']['attainment']:6.1%})"
            f"  TTFT p50 {chat['ttft_p50_s']:5.2f}, p90 {chat['ttft_p90_s']:5.2f}, max {chat['ttft_max_s']:6.2f} s"
            f"  longest gap {chat['gap_max_s']:6.2f} s"
            f"  documents {row['document_tokens_per_s']:6.1f}/s, {row['share_of_documents_alone']:.0%} of alone",
            flush=True,
        )
    write_result(arguments.name, rows)


if __name__ == "__main__":
    main()
