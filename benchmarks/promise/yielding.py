"""Chat beside documents with and without passes that stop between layers, live, on this machine.

    python -m benchmarks.promise.yielding                           # ten minutes for each topology, on a quiet machine
    python -m benchmarks.promise.yielding --topology disaggregated  # those of other topologies are kept
    python -m benchmarks.promise.yielding --page                    # only the table of the page
    python -m benchmarks.promise.yielding --simulated               # on any machine: the loads of chat_beside_documents

A model of 125M OPT's shape with random weights in bfloat16. Chat: Poisson, prompts log-normal around 100 tokens,
answers around 60, with TTFT 0.4 s and TPOT 0.2 s. Documents: 64 `flex` streams outstanding, prompts 512 to 1 024,
answers 32 to 128. In every round one server of each setting: first chat alone, then both, after `LEARNING_S` that do
not count; rounds alternate which setting goes first. Chat alone and beside have the same arrivals and lengths, each
round others. Percentiles are means over the rounds, and the ratio is to chat alone of the same setting. Documents count
by all tokens that were computed of their prompts and answers: in a minute few of them end, and which part of each falls
into it is chance. Beside what clients saw stands what the worker's iteration log says of every stop, and one of them as
a timeline. Targets: p99 of TTFT at most 1.25 times that of chat alone, documents at least 90 % of those without stops;
a pass stands still within a layer and 5 ms. The table stands in docs/yielding.md; tests/unit/docs/test_yielding.py
holds page and record together.
"""

import json
import os
import re
import tempfile
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from alignedserve.config.environment import RUN_DIR_VARIABLE
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.models import make_opt_125m
from benchmarks.measuring.page_tables import put_table
from benchmarks.measuring.recording import read_figures, write_result
from benchmarks.measuring.server import CACHE_FILLED_SOON, CHAT, TOPOLOGIES, served, settings_of, traffic_report
from benchmarks.promise.chat_beside_documents import DURATION_S, NUM_DOCUMENTS, RATE, SHAPES, config_of, workload_of
from lab.sim.result import ClassResult
from lab.sim.simulation import Simulation
from lab.workload.requests import Workload

LEARNING_S = 10.0
NUM_LAYERS = 12
SIMULATED = ("elastic, 1", "elastic, 2", "colocated, 2", "disaggregated, 1 + 1", "disaggregated, 2 + 2, a small pool")
DOCUMENTS = "documents: prompt=uniform(512,1024), output=uniform(32,128), outstanding=64, tier=flex"
_COMPUTED = re.compile(r"^alignedserve_(?:prompt_tokens_computed|tokens_generated)_total\{[^}]*\} (\S+)", re.MULTILINE)
RECORD = "serving/yielding"
PAGE = Path(__file__).parents[2] / "docs" / "yielding.md"
_HEAD = (
    "| workers | stops | held | TTFT p50 alone, beside (ratio), ms | p90 | p99 | TPOT p50, s | documents, tokens/s "
    "| until a pass stands still, ms |"
)
Row = dict[str, Any]


def measure(folder: Path, topology: str, rate: float, duration_s: float, seed: int, *, yields: bool) -> Row:
    """Serve chat alone and both kinds; return what clients saw, and the entries of the iteration logs."""
    settings = [*settings_of(topology), CACHE_FILLED_SOON, f"scheduling.yield_between_layers={str(yields).lower()}"]
    chat = CHAT.format(rate=rate)
    with tempfile.TemporaryDirectory(prefix="y") as logs:
        os.environ[RUN_DIR_VARIABLE] = logs
        with served(folder, settings) as port:
            traffic_report(port, folder, [chat, DOCUMENTS], LEARNING_S)  # workers learn what iterations cost
            alone = by_name(traffic_report(port, folder, [chat], duration_s, seed=seed))
            before = computed_tokens(port)
            beside = by_name(traffic_report(port, folder, [chat, DOCUMENTS], duration_s, LEARNING_S, seed=seed))
            computed = (computed_tokens(port) - before) / (LEARNING_S + duration_s)
        entries = [read_log(path) for path in sorted(Path(logs).rglob("*.iterations.jsonl"))]
    return {"yields": yields, "alone": alone["chat"], "beside": beside, "computed_per_s": computed, "entries": entries}


def computed_tokens(port: int) -> float:
    """Return the tokens of prompts and answers that the server has computed so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return sum(map(float, _COMPUTED.findall(answer.read().decode())))


def by_name(report: Row) -> Row:
    """Return the classes of a report."""
    return {one["name"]: one for one in report["classes"]}


def read_log(path: Path) -> list[Row]:
    """Return the entries of one iteration log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def stops_of(entries: Sequence[Row]) -> list[Row]:
    """Return each stop of a worker: when its pass began, stopped, went on and ended."""
    stops, within = list[Row](), list[Row]()
    for entry in entries:
        if entry["is_urgent"]:
            within.append(entry)
            continue
        computing_s = entry["prepare_s"] + entry["forward_s"] + entry["sampling_s"]
        stops += [
            {
                "batch_size": entry["batch_size"],
                "computing_s": computing_s,
                "decided_s": urgent["started_s"] - entry["started_s"],
                "stopping_s": urgent["stopping_s"],
                "urgent_s": urgent["wall_s"],
                "urgent_tokens": urgent["longest"],
                "ended_s": computing_s + entry["yielded_s"],
            }
            for urgent in within
        ]
        within = []
    return stops


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """Return those of interest; None: there are no values."""
    known = list(values)
    if not known:
        return None
    return {name: round(float(np.percentile(known, at)), 5) for name, at in (("p50", 50), ("p99", 99), ("max", 100))}


def timeline(stop: Row) -> list[str]:
    """Return one stop in words, by milliseconds since its pass began."""
    stood_s = stop["decided_s"] + stop["stopping_s"]
    moments = {
        0.0: f"a pass of {stop['batch_size']} requests begins, of {1e3 * stop['computing_s']:.1f} ms",
        stop["decided_s"]: "a chat comes, and the worker decides to stop",
        stood_s: f"the pass stands still, {1e3 * stop['stopping_s']:.1f} ms later; the chat's prompt is computed",
        stood_s + stop["urgent_s"]: "its first token is there; the pass goes on",
        stop["ended_s"]: "the pass ends",
    }
    return [f"{1e3 * at:7.1f} ms  {what}" for at, what in moments.items()]


def summary_of(rows: Sequence[Row]) -> Row:
    """Return the figures of one setting, over its rounds."""
    stops = [stop for row in rows for entries in row["entries"] for stop in stops_of(entries)]
    chat, alone = ([row["beside"]["chat"] for row in rows], [row["alone"] for row in rows])
    figures: Row = {
        "alone_ttft_s": _worst(alone, "ttft_s"),
        "ttft_s": _worst(chat, "ttft_s"),
        "tpot_s": _worst(chat, "tpot_s"),
        "held": min(one["slo_attainment"] for one in chat),
        "documents_per_s": float(np.mean([_documents_per_s(row) for row in rows])),
        "each_documents_per_s": [round(_documents_per_s(row)) for row in rows],
        "num_stops": len(stops),
        "stopping_s": percentiles(stop["stopping_s"] for stop in stops),
        "beyond_a_layer_s": percentiles(
            max(stop["stopping_s"] - stop["computing_s"] / NUM_LAYERS, 0.0) for stop in stops
        ),
        "stood_still_share": _stood_still(rows),
    }
    if stops:
        figures["timeline"] = timeline(sorted(stops, key=lambda stop: stop["stopping_s"])[len(stops) // 2])
    return figures


def _documents_per_s(row: Row) -> float:
    chat = row["beside"]["chat"]
    return float(row["computed_per_s"] - chat["input_tokens_per_s"] - chat["output_tokens_per_s"])


def _worst(classes: Sequence[Row], name: str) -> dict[str, float]:
    """Return the mean of each percentile over the rounds; of the longest the longest."""
    means = {at: float(np.mean([one[name][at] for one in classes])) for at in ("p50", "p90", "p99")}
    return {**means, "max": max(one[name]["max"] for one in classes)}


def _stood_still(rows: Sequence[Row]) -> float:
    """Return the share of the workers' time in which passes stood still; what they had computed is never lost."""
    entries = [entry for row in rows for one in row["entries"] for entry in one]
    stood_s: float = sum(entry["yielded_s"] for entry in entries)
    wall_s: float = sum(entry["wall_s"] for entry in entries)
    return stood_s / max(wall_s, 1e-9)


# --- simulated


def simulated(shape: str, seeds: Iterable[int], duration_s: float) -> Row:
    """Return what chat and documents of `chat_beside_documents` get without stops and with them, in the mean."""
    topology, num_workers, pool_blocks = SHAPES[shape]
    row: Row = {"shape": shape}
    for setting, yields in (("off", False), ("on", True)):
        config = config_of(topology, num_workers, pool_blocks)
        scheduling = msgspec.structs.replace(config.cluster.scheduling, yield_between_layers=yields)
        cluster = msgspec.structs.replace(config.cluster, scheduling=scheduling)
        config = replace(config, cluster=cluster, duration_s=duration_s)
        alone, beside = list[ClassResult](), list[dict[str, ClassResult]]()
        for seed in seeds:
            num_documents = int(NUM_DOCUMENTS * num_workers * duration_s / DURATION_S)
            both = workload_of(seed, num_documents, RATE * num_workers, duration_s=duration_s)
            chats = tuple(one for one in both.requests if one.class_name == "chat")
            alone.append(Simulation(config, Workload(both.description, chats)).run().classes["chat"])
            beside.append(Simulation(config, both).run().classes)
        chat = [classes["chat"] for classes in beside]
        row[setting] = {
            "alone_ttft_s": _mean_ttft(alone),
            "ttft_s": _mean_ttft(chat),
            "longest_gap_s": _longest_gap_s(chat),
            "alone_longest_gap_s": _longest_gap_s(alone),
            "held": min(one.attainment or 0.0 for one in chat),
            "documents_per_s": float(np.mean([classes["documents"].tokens_per_s for classes in beside])),
        }
    row["documents_kept"] = row["on"]["documents_per_s"] / row["off"]["documents_per_s"]
    for setting in ("off", "on"):
        one = row[setting]
        times = "  ".join(
            f"{at} {1e3 * one['ttft_s'][at]:.0f} ({one['ttft_s'][at] / one['alone_ttft_s'][at]:.2f} x alone)"
            for at in ("p50", "p90", "p99")
        )
        print(
            f"{shape:34} {setting:3}  TTFT, ms: {times}  held {one['held']:.1%}  gap {one['longest_gap_s']:.2f} s "
            f"(alone {one['alone_longest_gap_s']:.2f})  documents {one['documents_per_s']:.0f} tokens/s",
            flush=True,
        )
    return row


def _mean_ttft(results: Sequence[ClassResult]) -> dict[str, float]:
    curves = [one.ttft_s.curve for one in results if one.ttft_s is not None]
    return {f"p{at}": float(np.mean([curve[at] for curve in curves])) for at in (50, 90, 99)}


def _longest_gap_s(results: Sequence[ClassResult]) -> float:
    return max((one.max_tbt_s.curve[-1] for one in results if one.max_tbt_s is not None), default=0.0)


# --- the table


def table(figures: Row) -> str:
    """Return the table: for each topology what chat and documents had without stops and with them."""
    rows = [_HEAD, "|---" * (_HEAD.count("|") - 1) + "|"]
    for topology, of_topology in figures.items():
        for setting in ("off", "on"):
            one = of_topology[setting]
            times = " | ".join(
                f"{1e3 * one['alone_ttft_s'][at]:.0f}, {1e3 * one['ttft_s'][at]:.0f} "
                f"({one['ttft_s'][at] / one['alone_ttft_s'][at]:.2f})"
                for at in ("p50", "p90", "p99")
            )
            stops = f"{1e3 * one['stopping_s']['p50']:.0f}" if one["stopping_s"] else ""
            rows.append(
                f"| {topology if setting == 'off' else ''} | {setting} | {one['held']:.1%} | {times} "
                f"| {one['tpot_s']['p50']:.3f} | {one['documents_per_s']:.0f} | {stops} |"
            )
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """Return the page with the table as the record has it now."""
    figures = read_figures(RECORD)
    return page if figures is None else put_table(page, "chat beside documents, live", table(figures["topologies"]))


def main() -> None:
    """Measure, print, record, and write the table into its page."""
    parser = parser_of(__doc__, name=RECORD)
    parser.add_argument("--topology", nargs="+", default=TOPOLOGIES, choices=TOPOLOGIES)
    parser.add_argument("--rate", type=float, default=1.0, help="chats per second")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--duration", type=float, default=60.0)
    parser.add_argument("--simulated", action="store_true", help="simulate instead")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the table of the page")
    arguments = parser.parse_args()
    if arguments.simulated:
        shapes = [simulated(shape, range(arguments.rounds), arguments.duration) for shape in SIMULATED]
        print(f"written to {write_result('scheduling/yielding', shapes)}")
        return
    if not arguments.page:
        loads = {"rate": arguments.rate, "duration_s": arguments.duration, "rounds": arguments.rounds}
        known = read_figures(arguments.name)
        figures = known if known and known["loads"] == loads else {"loads": loads, "topologies": {}}
        with tempfile.TemporaryDirectory() as name:
            folder = make_opt_125m(Path(name) / "opt-125m")
            for topology in arguments.topology:
                of_topology = measure_rounds(folder, topology, arguments.rate, arguments.duration, arguments.rounds)
                figures["topologies"][topology] = of_topology
                print(f"written to {write_result(arguments.name, figures)}", flush=True)
    PAGE.write_text(with_table(PAGE.read_text()))


def measure_rounds(folder: Path, topology: str, rate: float, duration_s: float, num_rounds: int) -> Row:
    """Measure both settings in turns, and print what came out."""
    rows: list[Row] = []
    for number in range(num_rounds):
        order = (False, True) if number % 2 == 0 else (True, False)
        rows += [measure(folder, topology, rate, duration_s, number, yields=yields) for yields in order]
    figures: Row = {}
    for setting, yields in (("off", False), ("on", True)):
        figures[setting] = one = summary_of([row for row in rows if row["yields"] is yields])
        ratios = " ".join(f"{at} {one['ttft_s'][at] / one['alone_ttft_s'][at]:.2f}" for at in ("p50", "p90", "p99"))
        print(
            f"{topology}, {setting:3} held {one['held']:.1%}  documents {one['documents_per_s']:.0f} tokens/s", end="  "
        )
        print(f"stops {one['num_stops']}")
        for title, values in (("alone", one["alone_ttft_s"]), ("beside", one["ttft_s"])):
            print(f"    TTFT {title:6} " + "  ".join(f"{at} {1e3 * value:.0f} ms" for at, value in values.items()))
        print(f"    beside by alone: {ratios}; until a pass stood still: {one['stopping_s']}", flush=True)
    figures["documents_kept"] = figures["on"]["documents_per_s"] / figures["off"]["documents_per_s"]
    print(f"documents with stops, by those without: {figures['documents_kept']:.1%}")
    print("\n".join(figures["on"].get("timeline", [])))
    return figures


if __name__ == "__main__":
    main()
