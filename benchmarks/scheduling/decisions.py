"""Deciding one iteration: what `plan` of each policy costs on a worker that holds many requests.

    python -m benchmarks.scheduling.decisions                     # every policy; targets: 0.5 ms at 100 candidates,
    python -m benchmarks.scheduling.decisions --policy apt_serve  # 2 ms at 1 600, 10 ms at 20 000

Half of the requests decode, 192 at most, of 256 places; the others wait. Lengths, classes, SLOs and progress are drawn
from one seed. Three situations are timed, each on a view of its own: blocks are free, a tenth of what is held ("room");
none is, and decodes need some ("short"); they are free, and all who wait are past their SLO ("late"). Processor time is
what counts, as on a machine that does other work the clock counts that work too; the clock's median is beside it.
"""

import statistics
import time
from typing import Any

import numpy as np

from alignedserve.config.sections import Topology
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, RequestClass, SamplingParams, Slo
from alignedserve.costmodel.hardware import hardware
from alignedserve.costmodel.model_shapes import model_shape
from alignedserve.costmodel.roofline import RooflineModel
from alignedserve.scheduling.policies import all_policies, make_policy, policy_entry
from alignedserve.scheduling.policy import DeviceMemory, IterationHistory, IterationLimits, Mechanism, WorkerView
from alignedserve.scheduling.table import Ints, RequestTable
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result

CANDIDATES = (100, 1600, 20_000)
SITUATIONS = ("room", "short", "late")
MAX_RUNNING = 256
NUM_RUNNING = 192
BLOCK_SIZE = 16
NOW = 60.0
SEED = 20250401


def view_of(situation: str, num_requests: int, policy: str) -> WorkerView:
    rng = np.random.default_rng(SEED)
    table = _requests(num_requests, rng)
    running = np.sort(rng.choice(num_requests, min(NUM_RUNNING, num_requests // 2), replace=False))
    _start(table, running, rng)
    if situation == "late":
        table.arrival_s[:] -= 30.0
    held = int(table.num_blocks.sum())
    num_free = 0 if situation == "short" else held // 10
    mechanisms = policy_entry(policy).needs | policy_entry(policy).uses
    memory = DeviceMemory(
        num_blocks=held + num_free,
        num_free=num_free,
        block_size=BLOCK_SIZE,
        num_free_host=100_000 if Mechanism.SWAP in mechanisms else 0,
        hidden_ratio=0.5 if Mechanism.HIDDEN_CACHE in mechanisms else None,
        has_shared_blocks=Mechanism.SHARED_BLOCKS in mechanisms,
    )
    costs = RooflineModel(model_shape("opt-13b"), hardware("a100-40g"))
    history = IterationHistory(num_iterations=1000, last_s=0.05, mean_s=0.05, max_s=0.2)
    limits = IterationLimits(MAX_RUNNING, max_tokens=2048)
    return WorkerView(table, memory, limits, history, costs, NOW, can_evict=_is_colocated(policy))


def _is_colocated(policy: str) -> bool:
    """Return whether it decides for workers that prefill and decode.

    Elsewhere every request holds the blocks that it needs.
    """
    return Topology.COLOCATED in policy_entry(policy).topologies


def _requests(num_requests: int, rng: np.random.Generator) -> RequestTable:
    table = RequestTable()
    prompt_lens = np.clip(rng.lognormal(5.5, 1.0, num_requests), 4, 1900).astype(int)
    arrivals = np.sort(NOW - rng.exponential(2.0, num_requests))
    for number, (prompt_len, arrival_s) in enumerate(zip(prompt_lens.tolist(), arrivals.tolist(), strict=True)):
        is_real_time = rng.random() < 0.6
        request = Request(
            RequestId(f"request-{number}"),
            (1,) * prompt_len,
            SamplingParams(max_tokens=512),
            "gateway",
            arrival_s,
            RequestClass.REAL_TIME if is_real_time else RequestClass.BEST_EFFORT,
            Slo(1.0, 0.2) if is_real_time else Slo(deadline_s=600.0),
        )
        table.add(request, arrival_s, predicted_len=float(rng.integers(1, 512)))
    return table


def _start(table: RequestTable, running: Ints, rng: np.random.Generator) -> None:
    table.num_generated[running] = rng.integers(1, 200, len(running))
    table.num_cached[running] = table.context_len[running] - 1
    table.num_blocks[running] = -(-table.num_cached[running] // BLOCK_SIZE)
    table.first_token_s[running] = NOW - table.num_generated[running] * 0.05
    table.last_token_s[running] = table.last_run_s[running] = table.waits_since_s[running] = NOW - 0.05
    table.service_s[running] = table.num_generated[running] * 0.05


def measure(policy: str, num_requests: int, situation: str, rounds: int) -> dict[str, Any]:
    view = view_of(situation, num_requests, policy)
    decider = make_policy(policy)
    plan = decider.plan(view)
    processor_s, wall_s = [], []
    for _ in range(rounds):
        begin, begin_wall = time.thread_time(), time.perf_counter()
        decider.plan(view)
        processor_s.append(time.thread_time() - begin)
        wall_s.append(time.perf_counter() - begin_wall)
    return {
        "policy": policy,
        "candidates": num_requests,
        "situation": situation,
        "p50_ms": round(1e3 * statistics.median(processor_s), 3),
        "p90_ms": round(1e3 * statistics.quantiles(processor_s, n=10)[8], 3),
        "wall_p50_ms": round(1e3 * statistics.median(wall_s), 3),
        "shares": len(plan.scheduled),
        "evictions": len(plan.evictions),
    }


def main() -> None:
    """Measure; print and record."""
    parser = parser_of(__doc__, rounds=50, name="scheduling/decisions")
    parser.add_argument("--policy", nargs="+", choices=sorted(all_policies()), default=sorted(all_policies()))
    given = parser.parse_args()
    rows = []
    for policy in given.policy:
        for num_requests in CANDIDATES:
            for situation in SITUATIONS:
                if situation == "short" and not _is_colocated(policy):
                    continue
                rows.append(measure(policy, num_requests, situation, given.rounds))
                print(rows[-1])
    write_result(given.name, rows)


if __name__ == "__main__":
    main()
