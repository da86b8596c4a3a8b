"""Faults of policies that were found by reading: what each cost where it shows, in the simulator.

    python -m benchmarks.scheduling.policy_faults [--label before]  # results/policy_faults_LABEL.json

`before` is a run of this file on the commit before they were mended. docs/policies has the reasons, a page per policy.
Llama-2-13B on A100-80G by the roofline model, the lengths of the Azure conversations.
"""

import argparse
import statistics
from dataclasses import dataclass
from itertools import product
from typing import Any

from alignedserve.cli.commands.options import SimulateOptions
from alignedserve.cli.commands.simulate_cases import plan_cases
from alignedserve.microbench.scheduling.benchmark import range_to_best
from alignedserve.microbench.scheduling.pool_arrivals import Arrivals
from alignedserve.sim.sweep import run_cases
from benchmarks.support.recording import write_result
from kvpool.policies import make_batch_former
from kvpool.policies.batch_former import BatchLimits

_CHAT = "azure_conv, arrivals=recorded, ttft=1, tpot=0.1"
_REAL_TIME = "rt: azure_conv, rate=2, ttft=1, tpot=0.1"
_WITH_DEADLINES = f"{_REAL_TIME}; be: azure_conv, class=be, max_tokens=1024, deadline=uniform(15,60), rate=2"
_BLOCK_SIZE, _LIMITS = 16, BatchLimits(4000, 128, 36)
_NUM_BATCHES, _BATCH_EVERY_S = 600, 0.02


@dataclass(frozen=True, slots=True)
class Fault:
    """Simulations in which a fault shows."""

    name: str
    policies: tuple[str, ...]
    workload: str
    rates: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    def run(self) -> list[dict[str, Any]]:
        """Simulate every policy at every rate: one row each."""
        options = SimulateOptions(
            policies=self.policies, workload=self.workload, rates=self.rates, duration_s=60.0, overrides=self.overrides
        )
        rows = []
        for planned in plan_cases(options):
            (outcome,) = run_cases([planned.case])
            if outcome.result is None:
                raise SystemExit(outcome.traceback or outcome.error)
            row: dict[str, Any] = {"fault": self.name, "policy": planned.policy, "rate": planned.rate}
            for name, of in outcome.result.classes.items():
                assert of.ttft_s is not None
                row[name] = {
                    "attainment": of.attainment,
                    "requests_per_s": of.requests_per_s,
                    "ttft_p50_s": of.ttft_s.distribution.p50,
                    "ttft_p99_s": of.ttft_s.distribution.p99,
                    "tbt_p99_s": of.tbt_s.distribution.p99 if of.tbt_s is not None else None,
                }
            rows.append(row)
        return rows


FAULTS = (
    Fault("long prompts wait for the end of all decodes", ("bros", "fcfs"), _CHAT, ("4", "6")),
    Fault(
        "made-up memory overruns 64 bits",
        ("accelgen:watermark=0", "accelgen"),
        _CHAT,
        ("2", "3"),
        ("topology=disaggregated",),
    ),
    Fault("20 ms a token up to a deadline", ("aligned", "aligned_slo"), _WITH_DEADLINES),
)


def starving_batches(lengths: str, num_pooled: int) -> dict[str, Any]:
    """Form batches from a pool where leaves starve; return how wide they are, of the last two thirds."""
    arrivals = Arrivals(lengths, _BLOCK_SIZE, _LIMITS.max_blocks, 0)
    former = make_batch_former("density_first", block_size=_BLOCK_SIZE, starvation_s=2.0)
    pool = {one.request_id: one for one in arrivals.take(num_pooled)}
    for one in pool.values():
        former.insert(one, 0.0)
    ratios = []
    for number in range(_NUM_BATCHES):
        now = number * _BATCH_EVERY_S
        batch = former.form(_LIMITS, now)
        assert batch is not None, "a pool of requests that fit gives no batch"
        if number >= _NUM_BATCHES // 3 and number % 5 == 0:
            ratios.append(range_to_best(batch, list(pool.values()), _LIMITS, _BLOCK_SIZE))
        for request_id in batch.request_ids:
            former.remove(request_id)
            del pool[request_id]
        for one in arrivals.take(len(batch.request_ids)):
            former.insert(one, now)
            pool[one.request_id] = one
    deciles = statistics.quantiles(ratios, n=10)
    return {"lengths": lengths, "pooled": num_pooled, "range_to_best_p50": deciles[4], "range_to_best_p90": deciles[8]}


def main() -> None:
    """Simulate; print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="after")
    label = parser.parse_args().label
    figures = {
        "simulated": [row for fault in FAULTS for row in fault.run()],
        "starving_batches": [starving_batches(*case) for case in product(("azure", "lognormal"), (200, 1000, 10000))],
    }
    for row in [*figures["simulated"], *figures["starving_batches"]]:
        print(row)
    print(write_result(f"policy_faults_{label}", figures))


if __name__ == "__main__":
    main()
