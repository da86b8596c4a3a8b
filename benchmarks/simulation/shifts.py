"""Effects of a change of the work's mix, and of a lost worker, on elastic workers, colocated ones and fixed splits.

    python -m benchmarks.simulation.shifts [--load 0.7]

Llama-2-13B on four A100, the default policy everywhere, objectives 1 s and 60 ms. Each column has the same requests.

- Mix: for 30 s prompts of 3 000 tokens with answers of 30, then for 30 s prompts of 150 with answers of 450. The rates
  are those at which the cost model finds the workers busy for `--load` of their time in either half, 24 decodes to a
  batch; so the work is constant and only its mix changes. `shares`: attained of what came in each 2 s.
- Loss: conversations; 15 s after the first a worker that decodes is lost with all it holds, and back 6 s later.
  `pauses`: the longest gap of each request that had it then.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from alignedserve.config.sections import Topology
from alignedserve.core.metrics import percentile
from alignedserve.core.request import Slo
from alignedserve.costmodel.choice import make_cost_model
from alignedserve.costmodel.work import IterationWork
from alignedserve.sim.config import SimConfig, SimWorkerLoss
from alignedserve.sim.records import RequestRecord
from alignedserve.sim.simulation import Simulation
from alignedserve.sim.sweep import WorkloadLine
from alignedserve.workload.requests import TimedRequest, Workload, WorkloadDescription
from benchmarks.support.recording import write_result
from benchmarks.support.server_cluster import MACHINES, WORKER, server_cluster

_SLO = Slo(ttft_s=1.0, tpot_s=0.06)
HALF_S, STEP_S, _BATCH = 30.0, 2.0, 24
_LOST_AT_S, _BACK_AFTER_S = 15.0, 6.0
NUM_WORKERS = 4


class Shape(NamedTuple):
    """The lengths of one half."""

    prompt_len: int
    output_len: int


SHAPES = (Shape(3000, 30), Shape(150, 450))


class Column(NamedTuple):
    """Four workers."""

    name: str
    topology: Topology
    num_prefill: int = 0

    def config(self) -> SimConfig:
        """Configure them."""
        return server_cluster("aligned_slo", self.topology, NUM_WORKERS, self.num_prefill)


COLUMNS = (
    Column("elastic", Topology.ELASTIC),
    Column("colocated", Topology.COLOCATED),
    Column("3 + 1", Topology.DISAGGREGATED, 3),
    Column("2 + 2", Topology.DISAGGREGATED, 2),
    Column("1 + 3", Topology.DISAGGREGATED, 1),
)


def seconds_of(shape: Shape) -> float:
    """Return a worker's time for one request, its answer in batches of `_BATCH`."""
    costs = make_cost_model(MACHINES.source, WORKER)
    prompt, decodes = IterationWork(), IterationWork()
    prompt.add_chunk(shape.prompt_len, 0, is_last=True)
    context_len = shape.prompt_len + shape.output_len // 2
    decodes.add_decodes(_BATCH, _BATCH * context_len, context_len)
    return costs.iteration_s(prompt) + shape.output_len * costs.iteration_s(decodes) / _BATCH


def shifting(load: float, seed: int = 0) -> Workload:
    """Return a half of each shape, at the rates that take `load` of all workers' time."""
    rng, requests = random.Random(seed), []
    for half, shape in enumerate(SHAPES):
        rate, now = load * NUM_WORKERS / seconds_of(shape), half * HALF_S
        while (now := now + rng.expovariate(rate)) < (half + 1) * HALF_S:
            prompt_len, output_len = (max(1, round(rng.uniform(0.5, 1.5) * length)) for length in shape)
            requests.append(TimedRequest(now, prompt_len, output_len, None, f"half {half + 1}", slo=_SLO))
    return Workload(WorkloadDescription("a shift of the mix", seed), tuple(requests))


def share_by_arrival(records: Sequence[RequestRecord]) -> list[float | None]:
    """Return the percentage attained of the requests that came in each step."""
    begin_s = min(record.arrival_s for record in records)
    steps: list[list[bool]] = [[] for _ in range(round(2 * HALF_S / STEP_S))]
    for record in records:
        steps[min(int((record.arrival_s - begin_s) / STEP_S), len(steps) - 1)].append(record.has_met_slo)
    return [round(100 * sum(step) / len(step), 1) if step else None for step in steps]


def absorbed_after_s(shares: Sequence[float | None], margin: float = 5.0) -> float | None:
    """Return the seconds after the shift from which on every step is within `margin` of the last 14 s; None: never.

    Those 14 s are where it settles: a split that is wrong for the second half settles low.
    """
    known = [share if share is not None else 100.0 for share in shares]
    shift, settled = round(HALF_S / STEP_S), round(14.0 / STEP_S)
    level = sum(known[-settled:]) / settled
    late = [step for step in range(shift, len(known) - settled) if known[step] < level - margin]
    return (late[-1] + 1 - shift) * STEP_S if late else 0.0


def mix_rows(load: float) -> Iterator[dict[str, Any]]:
    """Simulate the shift in every column."""
    workload = shifting(load)
    for column in COLUMNS:
        simulation = Simulation(column.config(), workload)
        result = simulation.run()
        shares = share_by_arrival(simulation.records())
        yield {
            "case": "mix",
            "column": column.name,
            "attained": [_percent(result.classes[f"half {half}"].attainment) for half in (1, 2)],
            "absorbed_after_s": absorbed_after_s(shares),
            "num_moved": result.num_handoffs_verified,
            "num_requests": len(workload.requests),
            "shares": shares,
        }


def loss_rows(rate: float) -> Iterator[dict[str, Any]]:
    """Simulate the loss of a worker that decodes in every column."""
    line = f"azure_conv, arrivals=recorded, rate={rate}, ttft=1, tpot=0.06"
    workload = WorkloadLine(line, duration_s=HALF_S).build()
    for column in COLUMNS:
        lost = SimWorkerLoss(column.config().decode_name(0), _LOST_AT_S, _BACK_AFTER_S)
        for losses in ((), (lost,)):
            simulation = Simulation(replace(column.config(), losses=losses), workload)
            result = simulation.run()
            records = simulation.records()
            lost_s = min(record.arrival_s for record in records) + _LOST_AT_S
            at_loss = [one for one in records if one.arrival_s < lost_s < one.ended_s and one.max_tbt_s is not None]
            pauses = sorted(one.max_tbt_s or 0.0 for one in at_loss)
            yield {
                "case": "loss" if losses else "no loss",
                "column": column.name,
                "attained": _percent(result.classes["all"].attainment),
                "num_at_loss": len(at_loss),
                "longest_pause_s": round(pauses[-1], 2),
                "p75_pause_s": round(percentile(pauses, 75), 2),
                "shares": share_by_arrival(records)[: round(HALF_S / STEP_S)],
            }


def _percent(share: float | None) -> float:
    return round(100 * (share or 0.0), 1)


def main() -> None:
    """Simulate, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--rate", type=float, default=7.0, help="of the conversations")
    arguments = parser.parse_args()
    rows = []
    for row in chain(mix_rows(arguments.load), loss_rows(arguments.rate)):
        rows.append(row)
        print({key: value for key, value in row.items() if key != "shares"}, flush=True)
    rates = {
        f"rate of half {half}": round(arguments.load * NUM_WORKERS / seconds_of(s), 2)
        for half, s in enumerate(SHAPES, 1)
    }
    print(write_result("shifts", {"load": arguments.load, "step_s": STEP_S, "rates_per_s": rates, "rows": rows}))


if __name__ == "__main__":
    main()
