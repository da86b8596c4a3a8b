"""Real-time chat beside best-effort documents, live, under every policy in every topology in which it runs.

    python -m benchmarks.promise.live_policies                                  # 100 minutes, on a quiet machine
    python -m benchmarks.promise.live_policies --policy edf --topology elastic --duration 20
    python -m benchmarks.promise.live_policies --recordings FOLDER              # keep the recordings of all runs there
    python -m benchmarks.promise.live_policies --recordings FOLDER --simulate   # simulate them again, measure nothing
    python -m benchmarks.promise.live_policies --page                           # only the table of the page

What is recorded already is kept; `--anew` measures the chosen rows again.

A model of 125M OPT's shape with random weights in bfloat16. Real-time: Poisson, prompts log-normal around 100 tokens,
answers around 60; TTFT 0.4 s, TPOT 0.2 s. Best-effort: 24 requests outstanding, prompts 512 to 1 024, answers 32 to
128. Two loads, that differ in the rate of chat. Each run begins with documents outstanding already, so that none is
measured from a cold start, and after its first 15 s as many documents end as begin: with 64 outstanding that took
longer than the run, and what held many of them at a time seemed to be the fastest. Per topology first each kind alone,
under `aligned_slo`: best-effort alone gives its throughput, real-time alone the share of the workers' time that it
takes. Beside each run stands what the simulator makes of the same arrivals and lengths, with costs fitted to the
recording of those runs, and to that of the very run, and how far its runs lie apart.
The record has all of it, docs/benchmarks.md a table, and tests/unit/docs/test_live_policies.py compares them.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from alignedserve.config.sections import Topology
from alignedserve.scheduling.policies import all_policies
from alignedserve.scheduling.policy import Mechanism
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.models import make_opt_125m
from benchmarks.measuring.page_tables import put_table
from benchmarks.measuring.recording import read_figures, write_result
from benchmarks.measuring.server import TOPOLOGIES, served, traffic_report
from benchmarks.promise.live_load import BEST_EFFORT, CHAT, DOCUMENTS, LOADS, SEED, STEADY_S, real_time, settings
from benchmarks.promise.live_simulations import machine_of, simulated
from lab.commands.machine import describe_machine

RECORD = "serving/live_policies"
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
LEARNING_S = 10.0  # so that workers have learned what iterations cost
OWN_COSTS = "simulated_own_costs"  # of a row: with costs fitted to its own run
Row = dict[str, Any]


def systems() -> Iterator[tuple[str, str]]:
    for name, entry in sorted(all_policies().items()):
        if Mechanism.KNOWN_LENGTHS not in entry.needs:
            yield from ((name, topology) for topology in TOPOLOGIES if Topology(topology) in entry.topologies)


# --- live


def measure_alone(folder: Path, topology: str, recording: Path, duration_s: float) -> dict[str, Row]:
    options = ("--policy", "aligned_slo", "--record", str(recording))
    with served(folder, settings("aligned_slo", topology), *options) as port:
        # First, as a chat's objective bounds iterations for a while after it.
        documents = row_of(traffic_report(port, folder, [BEST_EFFORT], duration_s, STEADY_S))
        traffic_report(port, folder, [real_time("heavy")], LEARNING_S)
        chat = {load: row_of(traffic_report(port, folder, [real_time(load)], duration_s)) for load in LOADS}
        return {**chat, DOCUMENTS: documents}


def measure(
    folder: Path, policy: str, topology: str, loads: Sequence[str], duration_s: float, recording: Path
) -> dict[str, Row]:
    with served(folder, settings(policy, topology), "--policy", policy, "--record", str(recording)) as port:
        traffic_report(port, folder, [real_time("heavy"), BEST_EFFORT], LEARNING_S)
        return {
            load: row_of(traffic_report(port, folder, [real_time(load), BEST_EFFORT], duration_s, STEADY_S, seed=SEED))
            for load in loads
        }


def row_of(report: Mapping[str, Any]) -> Row:
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


# --- the table


def table(figures: Mapping[str, Any]) -> str:
    """Return the table: what chat held and documents had, each alone and by policy; light and heavy load."""
    topologies = figures["topologies"]
    policies = sorted({policy for of in topologies.values() for policy in of["both"]})
    rows = [f"| | {' | '.join(topologies)} |", "|---" * (len(topologies) + 1) + "|"]
    alone = (_alone_cell(of["alone"]) for of in topologies.values())
    rows.append(f"| each alone (`aligned_slo`) | {' | '.join(alone)} |")
    for policy in policies:
        cells = (_cell(of["both"].get(policy, {})) for of in topologies.values())
        rows.append(f"| `{policy}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _alone_cell(alone: Mapping[str, Row]) -> str:
    held = ", ".join(_held(alone[load]) for load in LOADS)
    return f"{held}; {alone[DOCUMENTS][DOCUMENTS]['tokens_per_s']:.0f}"


def _cell(measured: Mapping[str, Any]) -> str:
    live = [measured[load]["live"] for load in LOADS if load in measured]
    return f"{', '.join(map(_held, live))}; {', '.join(map(_documents, live))}" if live else "-"


def _held(live: Row) -> str:
    return f"{live[CHAT]['held'] or 0.0:.0%}"


def _documents(live: Row) -> str:
    return f"{live[DOCUMENTS]['tokens_per_s']:.0f}"


def with_table(page: str) -> str:
    figures = read_figures(RECORD)
    return page if figures is None else put_table(page, "chat beside documents, live", table(figures))


# --- all of it


def measure_all(
    figures: dict[str, Any],
    folder: Path,
    recordings: Path,
    wanted: Sequence[tuple[str, str]],
    loads: Sequence[str],
) -> None:
    """Measure what `figures` do not have yet of these policies, topologies and loads; write the record after each."""
    duration_s = figures["duration_s"]
    for topology in dict.fromkeys(topology for _, topology in wanted):
        of_topology = figures["topologies"].setdefault(topology, {"both": {}})
        both: dict[str, dict[str, Row]] = of_topology["both"]
        missing = {
            policy: [load for load in loads if load not in both.get(policy, {})]
            for policy, in_topology in wanted
            if in_topology == topology
        }
        if not any(missing.values()):
            continue
        _check_machine(topology, of_topology)
        of_topology["alone"] = measure_alone(
            folder, topology, _new_recording(recordings / f"{topology}-alone"), duration_s
        )
        for policy, of_policy in missing.items():
            if not of_policy:
                continue
            recording = _new_recording(recordings / f"{topology}-{policy}")
            live = measure(folder, policy, topology, of_policy, duration_s, recording)
            both.setdefault(policy, {}).update({load: {"live": live[load]} for load in of_policy})
            simulate_again(both[policy], recordings, policy, topology, duration_s)
            write_record(figures)


def _forget(figures: dict[str, Any], rows: Sequence[tuple[str, str]]) -> None:
    for policy, topology in rows:
        figures["topologies"].get(topology, {"both": {}})["both"].pop(policy, None)


def _new_recording(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _check_machine(topology: str, of_topology: dict[str, Any]) -> None:
    machine = describe_machine()["cpu"]
    if of_topology["both"] and of_topology["machine"] != machine:
        raise RuntimeError(
            f"rows of {topology} are of {of_topology['machine']}, which this is not: --anew forgets them"
        )
    of_topology["machine"] = machine


def simulate_again(rows: dict[str, Row], recordings: Path, policy: str, topology: str, duration_s: float) -> None:
    """Simulate the rows of a policy, by load, with the costs of these recordings, where they tell some."""
    costs = {"simulated": recordings / f"{topology}-alone", OWN_COSTS: recordings / f"{topology}-{policy}"}
    for name, recording in costs.items():
        machine = machine_of(recording) if recording.exists() else None
        if machine is not None:
            for load, row in rows.items():
                row[name] = simulated(machine, policy, topology, load, duration_s)
    for load, row in rows.items():
        print(f"{topology}, {load}, {policy}: {_cell({load: row})}", flush=True)


def write_record(figures: Mapping[str, Any]) -> None:
    write_result(RECORD, figures, command="python -m benchmarks.promise.live_policies")


def main() -> None:
    """Measure, record, and write the table into its page."""
    parser = parser_of(__doc__)
    parser.add_argument("--policy", nargs="+", choices=sorted({name for name, _ in systems()}))
    parser.add_argument("--topology", nargs="+", default=TOPOLOGIES, choices=TOPOLOGIES)
    parser.add_argument("--load", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument("--duration", type=float, default=30.0)
    parser.add_argument("--recordings", type=Path, help="a folder that keeps them")
    parser.add_argument("--simulate", action="store_true", help="measure nothing, simulate again what they have")
    parser.add_argument("--anew", action="store_true", help="forget the chosen rows first")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the table of the page")
    arguments = parser.parse_args()
    chosen = [
        (name, topology)
        for name, topology in systems()
        if topology in arguments.topology and name in (arguments.policy or [name])
    ]
    if arguments.simulate:
        if arguments.recordings is None:
            parser.error("--simulate needs --recordings")
        figures = read_figures(RECORD)
        for policy, topology in chosen:
            rows = figures["topologies"].get(topology, {"both": {}})["both"].get(policy, {})
            simulate_again(rows, arguments.recordings, policy, topology, figures["duration_s"])
        write_record(figures)
    elif not arguments.page:
        known = read_figures(RECORD)
        figures = known if known and known["duration_s"] == arguments.duration else None
        if figures is not None and arguments.anew:
            _forget(figures, chosen)
        figures = figures or {"duration_s": arguments.duration, "topologies": {}}
        figures |= {"real_time": {load: real_time(load) for load in LOADS}, "best_effort": BEST_EFFORT}
        with tempfile.TemporaryDirectory() as made:
            folder = make_opt_125m(Path(made) / "opt-125m")
            measure_all(figures, folder, arguments.recordings or Path(made), chosen, arguments.load)
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()
