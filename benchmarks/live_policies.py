"""Real-time chat beside best-effort documents, live, under every policy in every topology in which it runs.

    python -m benchmarks.live_policies                      # 100 minutes; what is recorded already is kept
    python -m benchmarks.live_policies --policy aligned_slo fcfs --topology elastic --load light --duration 20
    python -m benchmarks.live_policies --anew               # forget what is recorded
    python -m benchmarks.live_policies --page               # only the table of the page

A model of 125M OPT's shape with random weights in bfloat16. Real-time: Poisson, prompts log-normal around 100 tokens,
answers around 60; TTFT 0.4 s, TPOT 0.2 s. Best-effort: 24 requests outstanding, prompts 512 to 1 024, answers 32 to
128. Two loads, that differ in the rate of chat. Each run begins with documents outstanding already, so that none is
measured from a cold start, and after its first 15 s as many documents end as begin: with 64 outstanding that took
longer than the run, and what held many of them at a time seemed to be the fastest. Per topology first each kind alone,
under `aligned_slo`: best-effort alone gives its throughput, real-time alone the share of the workers' time that it
takes. Beside each run stands what the simulator makes of the same traffic (other draws from the same distributions),
with costs fitted to the recording of those runs, and with `--own-costs`, which measures again what lacks it, also with
costs fitted to the recording of the very run.
The table stands in docs/benchmarks.md; tests/unit/docs/test_live_policies.py holds page and record together.
"""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from alignedserve.cli.commands.simulation.replay import replay_folder
from alignedserve.config.loading import load_config
from alignedserve.config.sections import Topology
from alignedserve.replay.fitting import fit_machine
from alignedserve.replay.run_file import read_run_metadata
from alignedserve.replay.simulated import SimulatedMachine, fitted_machine, simulate
from alignedserve.scheduling.policies import POLICIES
from alignedserve.scheduling.policy import Mechanism
from alignedserve.sim.policies import with_policy
from alignedserve.sim.result import ALL, ClassResult, Measure
from alignedserve.workload.build import build_workload
from alignedserve.workload.catalogue import Library
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.models import make_opt_125m
from benchmarks.measuring.page_tables import put_table
from benchmarks.measuring.recording import read_figures, write_result
from benchmarks.measuring.server import TOPOLOGIES, served, settings_of, traffic_report

RECORD = "serving/live_policies"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
NUM_SIMULATED = 5  # runs of the simulator, whose means are taken
LEARNING_S = 10.0  # so that workers have learned what iterations cost
_STEADY_S = 15.0  # then, of every run, before anything counts
CHAT, DOCUMENTS = "rt", "be"
LOADS = {"light": 1.0, "heavy": 2.0}  # chats per second
_REAL_TIME = "rt: prompt=lognormal(100,300), output=lognormal(60,120), rate={rate}, ttft=0.4, tpot=0.2"
_BEST_EFFORT = "be: prompt=uniform(512,1024), output=uniform(32,128), outstanding=24, tier=flex"
# What a policy has here beside its own: the paper's form of it.
_SETTINGS_OF = {"alise": ("decode.swap_format=int8",)}
_HEAD = (
    "| topology, load | policy | both held | simulated | TTFT p50, p90, longest, s | TPOT p50, p90, s | longest gap, s "
    "| documents, tokens/s | simulated |"
)
OWN_COSTS = "simulated_own_costs"  # of a row: with costs fitted to its own run
_DIFFERS = 0.1  # from where on a difference between live and simulated is shown in bold
Row = dict[str, Any]


def systems() -> Iterator[tuple[str, str]]:
    """Walk the policies that run live, each with every topology in which it does."""
    for name, entry in sorted(POLICIES.items()):
        if Mechanism.KNOWN_LENGTHS not in entry.needs:
            yield from ((name, topology) for topology in TOPOLOGIES if Topology(topology) in entry.topologies)


def real_time(load: str) -> str:
    """Return the line of this load's chat."""
    return _REAL_TIME.format(rate=LOADS[load])


# --- live


def measure_alone(folder: Path, topology: str, recording: Path, duration_s: float) -> dict[str, Row]:
    """Measure each kind of work alone under `aligned_slo`, and leave a recording of it all."""
    options = ("--policy", "aligned_slo", "--record", str(recording))
    with served(folder, settings_of(topology), *options) as port:
        # First, as a chat's objective bounds iterations for a while after it.
        documents = row_of(traffic_report(port, folder, [_BEST_EFFORT], duration_s, _STEADY_S))
        traffic_report(port, folder, [real_time("heavy")], LEARNING_S)
        chat = {load: row_of(traffic_report(port, folder, [real_time(load)], duration_s)) for load in LOADS}
        return {**chat, DOCUMENTS: documents}


def measure(
    folder: Path, policy: str, topology: str, loads: Sequence[str], duration_s: float, recording: Path
) -> dict[str, Row]:
    """Measure a policy in a topology, under each of these loads in turn, and leave a recording of them."""
    settings = [*settings_of(topology), *_SETTINGS_OF.get(policy, ())]
    with served(folder, settings, "--policy", policy, "--record", str(recording)) as port:
        traffic_report(port, folder, [real_time("heavy"), _BEST_EFFORT], LEARNING_S)
        return {
            load: row_of(traffic_report(port, folder, [real_time(load), _BEST_EFFORT], duration_s, _STEADY_S))
            for load in loads
        }


def row_of(report: Mapping[str, Any]) -> Row:
    """Return what a row keeps of a report of `bench serve`, by class."""
    return {
        one["name"]: {
            "completed": one["num_completed"],
            "failures": one["failures"],
            "held": one["slo_attainment"],
            "tokens_per_s": one["output_tokens_per_s"],
            "ttft_s": _percentiles(one["ttft_s"]),
            "tpot_s": _percentiles(one["tpot_s"]),
            "longest_gap_s": one["tbt_s"] and one["tbt_s"]["max"],
        }
        for one in report["classes"]
    }


def _percentiles(distribution: Mapping[str, float] | None) -> dict[str, float] | None:
    if distribution is None:
        return None
    return {name: round(distribution[name], 4) for name in ("p50", "p90", "p99", "max")}


# --- simulated


def machine_of(recording: Path) -> SimulatedMachine:
    """Return a machine with the costs of iterations and copies fitted to this recording."""
    metadata = read_run_metadata(recording)
    return fitted_machine(metadata, fit_machine(replay_folder(recording)[1], metadata.layout.block_bytes))


def simulated(machine: SimulatedMachine, policy: str, topology: str, load: str, duration_s: float) -> Row | None:
    """Return what the simulator predicts for both kinds under a policy: means over draws of the traffic.

    Documents' tokens count that came before the last arrival, as live, where they are cut off. None: the policy needs
    hidden caches, whose costs no recording of another policy tells.
    """
    if Mechanism.HIDDEN_CACHE in POLICIES[policy].needs:
        return None
    cluster = load_config(None, [*settings_of(topology), *_SETTINGS_OF.get(policy, ())])
    machine = replace(machine, cluster=with_policy(cluster, policy, topology=Topology(topology)))
    traffic = "; ".join((real_time(load), _BEST_EFFORT))
    runs = [
        simulate(build_workload(traffic, seed=seed, library=Library(), duration_s=duration_s), machine, seed)
        for seed in range(NUM_SIMULATED)
    ]
    return {name: _simulated_class([run[name] for run in runs]) for name in runs[0] if name != ALL}


def _simulated_class(runs: Sequence[ClassResult]) -> dict[str, Any]:
    loaded = [run.tokens_per_s if run.loaded_tokens_per_s is None else run.loaded_tokens_per_s for run in runs]
    return {
        "held": _mean([run.attainment for run in runs]),
        "tokens_per_s": _mean(loaded),
        "ttft_s": _mean_percentiles([run.ttft_s for run in runs]),
        "tpot_s": _mean_percentiles([run.tpot_s for run in runs]),
        "longest_gap_s": _mean([None if run.tbt_s is None else run.tbt_s.distribution.max for run in runs]),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return round(statistics.fmean(present), 4) if present else None


def _mean_percentiles(measures: Sequence[Measure | None]) -> dict[str, float | None]:
    found = [one.distribution for one in measures if one is not None]
    return {name: _mean([getattr(one, name) for one in found]) for name in ("p50", "p90", "p99", "max")}


# --- the table


def table(figures: Mapping[str, Any]) -> str:
    """Return the table: per topology and load first each kind alone, then every policy that was measured."""
    rows = [_HEAD, "|---" * (_HEAD.count("|") - 1) + "|"]
    for topology, of_topology in figures["topologies"].items():
        alone = of_topology["alone"]
        documents = round(alone[DOCUMENTS][DOCUMENTS]["tokens_per_s"])
        for load in LOADS:
            chat = _chat_cells(alone[load])
            rows.append(f"| {topology}, {load} | each alone (`aligned_slo`) | {chat} | {documents} | |")
            for policy, measured in of_topology["both"].items():
                if load in measured:
                    rows.append(f"| | `{policy}` | {_cells(measured[load])} |")
    return "\n".join(rows) + "\n"


def _cells(measured: Mapping[str, Any]) -> str:
    live, by_own = measured["live"], measured.get(OWN_COSTS)
    tokens = live[DOCUMENTS]["tokens_per_s"]
    predicted = [one[DOCUMENTS]["tokens_per_s"] for one in (measured["simulated"], by_own) if one is not None]
    shown = [_bold(f"{expected:.0f}", abs(expected - tokens) > _DIFFERS * tokens) for expected in predicted]
    return f"{_chat_cells(live, measured['simulated'], by_own)} | {tokens:.0f} | {', '.join(shown) or '-'}"


def _chat_cells(live: Row, *predicted: Row | None) -> str:
    chat = live[CHAT]
    held = chat["held"] or 0.0
    shares = [one[CHAT]["held"] or 0.0 for one in predicted if one is not None]
    expected = ", ".join(_bold(f"{share:.0%}", abs(share - held) > _DIFFERS) for share in shares)
    ttft, tpot = chat["ttft_s"], chat["tpot_s"]
    times = [
        ", ".join(_seconds(ttft and ttft[name]) for name in ("p50", "p90", "max")),
        ", ".join(_seconds(tpot and tpot[name], 3) for name in ("p50", "p90")),
        _seconds(chat["longest_gap_s"]),
    ]
    return " | ".join([f"{held:.0%}", expected, *times])


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


def _seconds(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def with_table(page: str) -> str:
    """Return the page with the table as the record has it now."""
    figures = read_figures(RECORD)
    return page if figures is None else put_table(page, "chat beside documents, live", table(figures))


# --- all of it


def measure_all(
    figures: dict[str, Any],
    folder: Path,
    wanted: Sequence[tuple[str, str]],
    loads: Sequence[str],
    has_own_costs: bool,
) -> None:
    """Measure what `figures` do not have yet of these policies, topologies and loads; write the record after each.

    `has_own_costs`: a row without a simulation by its own costs counts as missing.
    """
    duration_s = figures["duration_s"]
    for topology in dict.fromkeys(topology for _, topology in wanted):
        of_topology = figures["topologies"].setdefault(topology, {"both": {}})
        both: dict[str, dict[str, Row]] = of_topology["both"]
        missing = {
            policy: [load for load in loads if _is_missing(both.get(policy, {}).get(load), has_own_costs)]
            for policy, in_topology in wanted
            if in_topology == topology
        }
        if not any(missing.values()):
            continue
        recording = folder.parent / f"{topology}-alone"
        of_topology["alone"] = measure_alone(folder, topology, recording, duration_s)
        machine = machine_of(recording)
        for policy, of_policy in missing.items():
            if not of_policy:
                continue
            own = folder.parent / f"{topology}-{policy}"
            live = measure(folder, policy, topology, of_policy, duration_s, own)
            own_machine = machine_of(own)
            for load in of_policy:
                row = both.setdefault(policy, {})[load] = {
                    "live": live[load],
                    "simulated": simulated(machine, policy, topology, load, duration_s),
                    OWN_COSTS: simulated(own_machine, policy, topology, load, duration_s),
                }
                print(f"{topology}, {load}, {policy}: {_cells(row)}", flush=True)
            write_result(RECORD, figures, command="python -m benchmarks.live_policies")


def _is_missing(row: Row | None, has_own_costs: bool) -> bool:
    return row is None or (has_own_costs and OWN_COSTS not in row)


def main() -> None:
    """Measure, record, and write the table into its page."""
    parser = parser_of(__doc__)
    parser.add_argument("--policy", nargs="+", choices=sorted({name for name, _ in systems()}))
    parser.add_argument("--topology", nargs="+", default=TOPOLOGIES, choices=TOPOLOGIES)
    parser.add_argument("--load", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument("--duration", type=float, default=30.0)
    parser.add_argument(
        "--own-costs", action="store_true", help="measure again what was not simulated by its own costs"
    )
    parser.add_argument("--anew", action="store_true", help="forget what is recorded")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the table of the page")
    arguments = parser.parse_args()
    if not arguments.page:
        known = None if arguments.anew else read_figures(RECORD)
        figures = known if known and known["duration_s"] == arguments.duration else None
        figures = figures or {"duration_s": arguments.duration, "topologies": {}}
        figures |= {"real_time": {load: real_time(load) for load in LOADS}, "best_effort": _BEST_EFFORT}
        chosen = [
            (name, topology)
            for name, topology in systems()
            if topology in arguments.topology and name in (arguments.policy or [name])
        ]
        with tempfile.TemporaryDirectory() as name:
            folder = make_opt_125m(Path(name) / "opt-125m")
            measure_all(figures, folder, chosen, arguments.load, arguments.own_costs)
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()
