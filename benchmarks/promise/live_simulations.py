"""What the simulator makes of a row of the live table of policies, with the costs of a recorded run."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from alignedserve.config.loading import load_config
from alignedserve.config.sections import Topology
from alignedserve.core.metrics import describe
from alignedserve.scheduling.policies import policy_entry
from alignedserve.scheduling.policy import Mechanism
from benchmarks.promise.live_load import BEST_EFFORT, CHAT, DOCUMENTS, SEED, STEADY_S, real_time, settings
from lab.commands.simulation.replay import replay_folder
from lab.replay.component_replay import read_run_metadata
from lab.replay.fitting import fit_machine
from lab.replay.simulated import SimulatedMachine, fitted_machine, simulated_requests
from lab.sim.policies import with_policy
from lab.sim.records import RequestRecord
from lab.sim.simulation import BEGIN_S
from lab.workload.build import build_workload
from lab.workload.catalogue import Library

NUM_RUNS = 5  # whose means are taken: the same traffic, with other draws of how long iterations take
Row = dict[str, Any]


def machine_of(recording: Path) -> SimulatedMachine | None:
    """Return a machine with the costs of iterations and copies fitted to this recording.

    None: today's code decides otherwise, so that it cannot be known what its iterations had to compute.
    """
    checks, run = replay_folder(recording)
    if any(check.difference is not None for check in checks):
        return None
    metadata = read_run_metadata(recording)
    return fitted_machine(metadata, fit_machine(run, metadata.layout.block_bytes))


def simulated(machine: SimulatedMachine, policy: str, topology: str, load: str, duration_s: float) -> Row | None:
    """Return what the simulator predicts for the traffic of the live run under a policy: means over several runs.

    As live, `STEADY_S` come before what counts; other than live, documents under way at its end go on. `..._range`: the
    least and the most of any run. None: the policy needs hidden caches, whose costs no recording of another policy
    tells.
    """
    if Mechanism.HIDDEN_CACHE in policy_entry(policy).needs:
        return None
    cluster = load_config(None, settings(policy, topology))
    cluster = msgspec.structs.replace(cluster, engine=machine.cluster.engine)  # as it was settled there
    machine = replace(machine, cluster=with_policy(cluster, policy, topology=Topology(topology)))
    # Clients of the live run name as limit what they want to have.
    traffic = "; ".join(f"{line}, max_tokens=exact" for line in (real_time(load), BEST_EFFORT))
    workload = build_workload(traffic, seed=SEED, library=Library(), duration_s=STEADY_S + duration_s)
    runs = [simulated_requests(workload, machine, seed).records for seed in range(NUM_RUNS)]
    steady_s = BEGIN_S + STEADY_S  # on the simulation's clock
    chats = [_chats([one for one in run if one.class_name == CHAT and one.arrival_s >= steady_s]) for run in runs]
    documents = [
        sum(_tokens_within(one, steady_s, steady_s + duration_s) for one in run if one.class_name == DOCUMENTS)
        / duration_s
        for run in runs
    ]
    return {
        CHAT: {**_means(chats), "held_range": _range([run["held"] for run in chats])},
        DOCUMENTS: {"tokens_per_s": _mean(documents), "tokens_per_s_range": _range(documents)},
    }


def _chats(records: Sequence[RequestRecord]) -> Row:
    ttft, tpot = ([getattr(one, name) for one in records] for name in ("ttft_s", "tpot_s"))
    return {
        "held": statistics.fmean(one.has_met_slo for one in records) if records else None,
        "ttft_s": _percentiles(ttft),
        "tpot_s": _percentiles(tpot),
        "longest_gap_s": max((one.max_tbt_s for one in records if one.max_tbt_s is not None), default=None),
    }


def _tokens_within(record: RequestRecord, begins_s: float, ends_s: float) -> float:
    if record.ttft_s is None:
        return 0.0
    first_s, last_s = record.arrival_s + record.ttft_s, record.ended_s
    if last_s <= first_s:
        return float(record.num_tokens * (begins_s <= first_s < ends_s))
    within_s = max(min(last_s, ends_s) - max(first_s, begins_s), 0.0)
    return record.num_tokens * within_s / (last_s - first_s)


def _percentiles(values: Iterable[float | None]) -> dict[str, float] | None:
    distribution = describe(sorted(value for value in values if value is not None))
    if distribution is None:
        return None
    return {name: getattr(distribution, name) for name in ("p50", "p90", "p99", "max")}


def _means(rows: Sequence[Row]) -> Row:
    found: Row = {}
    for name, value in rows[0].items():
        values = [row[name] for row in rows]
        found[name] = _means([one for one in values if one is not None]) if isinstance(value, dict) else _mean(values)
    return found


def _range(values: Sequence[float | None]) -> list[float]:
    present = [value for value in values if value is not None]
    return [round(min(present), 4), round(max(present), 4)] if present else []


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return round(statistics.fmean(present), 4) if present else None
