"""The most that the walls between workers can cost: elastic workers beside one that shares all work evenly.

    python -m experiments.walls [--quick] [--processes 2] [--parts roofline calibrated]

Would prompts split between workers hold more first tokens, and workers of unlike chunk sizes more gaps? Points of the
grid on four accelerators, five seeds each: elastic workers, colocated ones, and workers that compute every iteration
together, in even parts at once: for nothing, which is the most that splits could do, and by tensor parallelism. A part
is a cost model (docs/costmodels.md). What is done is recorded at once, and not done again. docs/experiments/walls.md
has what was found.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product
from statistics import mean

import msgspec

from alignedserve.config.sections import Topology
from alignedserve.costmodel.hardware import LinkModel
from alignedserve.costmodel.model import CostModel, chunk_within
from alignedserve.costmodel.work import IterationWork
from benchmarks.measuring.intervals import interval
from experiments.common import (
    RESULTS,
    STEADY_FIGURES,
    LabelledCase,
    Labels,
    Row,
    chosen,
    pick,
    print_table,
    read_options,
    run,
    write_record,
)
from experiments.grid.points import MIXED, SEEDS, TIGHT, Point
from experiments.grid.systems import HARDWARE, MODEL, UNION, System
from lab.costmodel.choice import WorkerSpec, make_cost_model
from lab.sim.config import SimConfig
from lab.sim.policies import ClusterHardware
from lab.sim.result import SimulationResult
from lab.sim.sweep import Case

NAME = "walls"
PARTS = ("roofline", "calibrated")
ACCELERATORS = 4
ELASTIC, COLOCATED = "elastic", "colocated"
PAIRS, FOUR = "pairs, free", "four, free"  # that share each iteration evenly, at no cost
TENSOR_PARALLEL = "pairs, tensor parallel"  # likewise, at what it costs, with half of the weights each
SYSTEMS = (ELASTIC, FOUR, PAIRS, TENSOR_PARALLEL, COLOCATED)
POINTS = (
    Point("azure_conv", 1.02, TIGHT, ACCELERATORS, has_best_effort=False),
    Point("azure_conv", 0.78, TIGHT, ACCELERATORS, has_best_effort=True),
    Point("azure_code", 1.02, TIGHT, ACCELERATORS, has_best_effort=True),
    Point("mooncake", 1.02, MIXED, ACCELERATORS, has_best_effort=False),
    Point("arxiv", 0.78, TIGHT, ACCELERATORS, has_best_effort=False),
    Point("sharegpt", 1.02, MIXED, ACCELERATORS, has_best_effort=True),
)
GAPS_S, DECODES = (0.025, 0.05, 0.2), (32, 64, 128)  # of decodes, and how many there are on all workers together
CONTEXT_LEN, LARGEST_CHUNK = 1024, 2048
_LEAST_INTERVAL = 3  # seeds: an interval of two is too wide to say anything
_AT_ONCE = 6  # simulations between two records
_SUMS = [field.name for field in fields(IterationWork) if field.name != "max_decode_context_len"]
_RECORDED = (
    "part", "point", "system", "policy", "seed", "code", "rate", "rt.num_sent", "rt.attainment", "rt.ttft_attainment",
    "rt.tpot_attainment", "num_handoffs", "num_recomputed_tokens", "duration_s", "workload", *STEADY_FIGURES,
)  # fmt: skip


class SharedCosts:
    """Costs of one worker that is several in one: each computes an even part of every iteration, and reads all weights.

    Parts cost nothing to bring together. See CostModel.
    """

    def __init__(self, costs: CostModel, num_workers: int) -> None:
        self._costs = costs
        self._num_workers = num_workers

    def iteration_s(self, work: IterationWork) -> float:
        """See CostModel."""
        part = work.copy()
        for name in _SUMS:
            setattr(part, name, getattr(work, name) / self._num_workers)
        if 0 < work.num_chunks < self._num_workers:  # each part of a chunk reads all of its keys
            part.num_chunks, part.prompt_keys = 1, work.prompt_keys // work.num_chunks
        return self._costs.iteration_s(part)

    def swap_s(self, num_tokens: float) -> float:
        """See CostModel."""
        return self._costs.swap_s(num_tokens / self._num_workers)


def case_of(part: str, point: Point, system: str) -> LabelledCase:
    """Return the simulation of a system at a point, until all is known of each request."""
    degree = 2 if system == TENSOR_PARALLEL else 1
    machines = ClusterHardware(WorkerSpec(MODEL, HARDWARE, degree), source=part)
    topology = Topology.COLOCATED if system == COLOCATED else Topology.ELASTIC
    config = System(UNION, topology).config(ACCELERATORS, machines)
    if system == TENSOR_PARALLEL:
        config = _joined(config, degree)
    elif system in (PAIRS, FOUR):
        config = _shared(config, 2 if system == PAIRS else ACCELERATORS)
    config = replace(config, ends_when_settled=True, miss_limits={"rt": 1 << 40})
    labels: Labels = {
        "part": part,
        "point": point.of_seed(SEEDS[0]).name,
        "system": system,
        "policy": UNION,
        "rate": point.rate,
        "seed": point.seed,
    }
    return LabelledCase(labels, Case(f"{part} {point.name} {system}", config, point.workload()))


def _joined(config: SimConfig, num: int) -> SimConfig:
    """Return a worker in place of so many, with the limits of all of them."""
    decode = config.cluster.decode
    joined = msgspec.structs.replace(
        decode,
        count=decode.count // num,
        swap_space_bytes=num * decode.swap_space_bytes,
        max_running_requests=num * decode.max_running_requests,
        max_num_batched_tokens=num * decode.max_num_batched_tokens,
    )
    return replace(config, cluster=msgspec.structs.replace(config.cluster, decode=joined))


def _shared(config: SimConfig, num: int) -> SimConfig:
    """Return the same with the memory and the links of all, that share their iterations evenly."""
    config = _joined(config, num)
    decode, host = config.cluster.decode, config.links.host
    roomy = msgspec.structs.replace(decode, kv_cache_bytes=num * decode.kv_cache_bytes)
    return replace(
        config,
        cluster=msgspec.structs.replace(config.cluster, decode=roomy),
        decode_costs=SharedCosts(config.decode_costs, num),
        links=replace(config.links, host=LinkModel(host.latency_s, num * host.bytes_per_s)),
    )


# --- what comes of it


def compared(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each point of each part: what elastic workers miss, and what the others hold more, in points."""
    found: list[Row] = []
    for part, point in product(PARTS, POINTS):
        ours, *others = (pick(rows, part=part, point=point.name, system=system) for system in SYSTEMS)
        if ours:
            first, both = (100 * mean(row[name] for row in ours) for name in ("rt.ttft_attainment", "rt.attainment"))
            row: Row = {"part": part, "point": point.name, "num_seeds": len(ours), "least_seeds": min(map(len, others))}
            row["held"] = both
            row |= {"late_first": 100.0 - first, "late_gaps": first - both}
            for system, theirs in zip(SYSTEMS[1:], others, strict=True):
                row |= _gain(system, theirs, ours)
            found.append(row)
    return chosen(found, found[0]) if found else []


def _gain(system: str, theirs: Sequence[Row], ours: Sequence[Row]) -> Row:
    """Return what a system holds more than elastic workers with the same seeds, in points; None: no such runs yet."""
    held = {row["seed"]: row["rt.attainment"] for row in ours}
    gains = [100 * (row["rt.attainment"] - held[row["seed"]]) for row in theirs if row["seed"] in held]
    gain = interval(gains) if gains else None
    is_enough = len(gains) >= _LEAST_INTERVAL
    return {system: gain and gain.mean, half_of(system): gain.half if gain and is_enough else None}


def half_of(system: str) -> str:
    """Return the name of half of the interval of a system's gain."""
    return f"{system}: half of 95 %"


def rooms() -> list[Row]:
    """Return the prompt tokens/s that four workers have time for: with the decodes on each, or on fewer of them.

    Those have chunks as large as the gaps of their decodes allow. None: the decodes alone take longer than their gap.
    """
    found: list[Row] = []
    for part, gap_s, num_decodes in product(PARTS, GAPS_S, DECODES):
        costs = make_cost_model(part, WorkerSpec(MODEL, HARDWARE))
        found.append({"part": part, "gap_s": gap_s, "num_decodes": num_decodes})
        for num_small in range(1, ACCELERATORS + 1):
            beside = _tokens_per_s(costs, -(-num_decodes // num_small), gap_s)
            large = (ACCELERATORS - num_small) * _tokens_per_s(costs, 0, math.inf)
            found[-1][f"on_{num_small}"] = num_small * beside + large if beside else None
    return chosen(found, found[0])


def _tokens_per_s(costs: CostModel, num_decodes: int, gap_s: float) -> float:
    """Return the tokens/s of prompts that are half computed, beside so many decodes; 0: these alone take too long."""
    work = IterationWork()
    work.add_decodes(num_decodes, num_decodes * CONTEXT_LEN, CONTEXT_LEN)
    num_tokens = chunk_within(costs, work, num_cached=CONTEXT_LEN, at_most=LARGEST_CHUNK, budget_s=gap_s)
    work.add_chunk(num_tokens, CONTEXT_LEN, is_last=False)
    return num_tokens / costs.iteration_s(work)


# --- runs


def cases_of(*, is_quick: bool) -> list[LabelledCase]:
    """Return all simulations, seed by seed; or one point in little."""
    if is_quick:
        return [case_of(PARTS[0], replace(POINTS[0], minutes=0.5), system) for system in SYSTEMS]
    return [case_of(part, point.of_seed(seed), of) for seed, of, part, point in product(SEEDS, SYSTEMS, PARTS, POINTS)]


def recorded_rows() -> list[Row]:
    """Return the runs of the record."""
    path = RESULTS / f"{NAME}.json"
    rows: list[Row] = json.loads(path.read_text())["figures"]["runs"] if path.exists() else []
    return rows


def main() -> None:
    """Simulate what is missing, show and record."""
    options = read_options(__doc__)
    rows = recorded_rows() if options.is_recorded else []
    missing = [case for case in options.select(cases_of(is_quick=options.is_quick)) if not pick(rows, **_key(case))]
    for start in range(0, len(missing), _AT_ONCE):
        done = run(missing[start : start + _AT_ONCE], processes=options.processes, also=_further)
        rows += chosen(done, _RECORDED)
        if options.is_recorded:
            write_record(NAME, {"compared": compared(rows), "rooms": rooms(), "runs": rows})
    print_table(rows, {name: name for name in ("part", "point", "system", "seed", "rt.attainment")}, title="runs")
    for title, of in (("compared", compared(rows)), ("prompt tokens/s", rooms())):
        print_table(of, {name: name for name in (of[0] if of else ())}, title=title)


def _key(case: LabelledCase) -> Labels:
    return {name: case.labels[name] for name in ("part", "point", "system", "seed")}


def _further(result: SimulationResult) -> Row:
    return {"num_handoffs": result.num_handoffs_verified}


if __name__ == "__main__":
    main()
