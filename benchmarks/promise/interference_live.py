"""The frontier of interference, live: chat beside documents under each bound, in each topology, on this machine.

    python -m benchmarks.promise.interference_live  # about 40 minutes, on a quiet machine
    python -m benchmarks.promise.interference_live --topology elastic --bound none 1.1 --duration 20

A model of 125M OPT's shape with random weights in bfloat16. Chat: Poisson, 0.5 requests/s, prompts of 60 to 200
tokens, answers of 40; TTFT 2 s, TPOT 1 s. Documents: 16 `flex` streams outstanding, prompts 512 to 1 024, answers 100
to 300. For each topology first each kind alone, then both under every bound; each server is started anew, and the first
twenty seconds of its load do not count, in which it learns what iterations cost. Beside what clients saw stand the two
counters of the workers, as they were and alone by the cost model, over all of it. Targets at 1.1: p99 of TPOT at most
1.15 times that of chat alone, documents at 40 % or more of what they get alone.
"""

import re
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.models import make_opt_125m
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.server import TOPOLOGIES, served, settings_of, traffic_report

CHAT = "chat: prompt=uniform(60,200), output=40, rate=0.5, ttft=2, tpot=1"
DOCUMENTS = "documents: prompt=uniform(512,1024), output=uniform(100,300), outstanding=16, tier=flex"
BOUNDS = ("none", "2", "1.5", "1.2", "1.1", "1.05")
_WARM_UP_S = 20.0
_SIDE = re.compile(r"^alignedserve_real_time_(alone|beside)_seconds_total\{[^}]*\} (\S+)", re.MULTILINE)


def load(port: int, folder: Path, traffic: Sequence[str], duration_s: float) -> dict[str, Any]:
    """Return what `bench serve` saw of this traffic, by class."""
    report = traffic_report(port, folder, traffic, duration_s, _WARM_UP_S)
    return {one["name"]: one for one in report["classes"]}


def sides_s(port: int) -> dict[str, float]:
    """Return the seconds of iterations in gaps of chat, alone by the cost model and as they were, since the start."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        found = _SIDE.findall(answer.read().decode())
    return {side: sum(float(value) for name, value in found if name == side) for side in ("alone", "beside")}


def measure(folder: Path, topology: str, bound: str, traffic: Sequence[str], duration_s: float) -> dict[str, Any]:
    """Serve under this bound and return what this traffic got."""
    settings = [*settings_of(topology), *([] if bound == "none" else [f"scheduling.interference={bound}"])]
    with served(folder, settings) as port:
        classes = load(port, folder, traffic, duration_s)
        return {"bound": bound, "sides_s": sides_s(port), "classes": classes}


def measure_topology(folder: Path, topology: str, bounds: Sequence[str], duration_s: float) -> list[dict[str, Any]]:
    """Return each kind alone, then both under every bound."""
    alone = measure(folder, topology, "none", [CHAT], duration_s)["classes"]["chat"]
    documents = measure(folder, topology, "none", [DOCUMENTS], duration_s)["classes"]["documents"]
    rows = []
    for bound in bounds:
        row = measure(folder, topology, bound, [CHAT, DOCUMENTS], duration_s)
        chat, beside = row["classes"]["chat"], row["classes"]["documents"]
        row |= {
            "topology": topology,
            "tpot_p50_ratio": chat["tpot_s"]["p50"] / alone["tpot_s"]["p50"],
            "tpot_p99_ratio": chat["tpot_s"]["p99"] / alone["tpot_s"]["p99"],
            "share_of_documents_alone": beside["output_tokens_per_s"] / documents["output_tokens_per_s"],
            "alone": alone,
            "documents_alone": documents,
        }
        rows.append(row)
        sides = row["sides_s"]
        print(
            f"| {topology} | {bound} | {row['tpot_p50_ratio']:.2f} | {row['tpot_p99_ratio']:.2f} | "
            f"{beside['output_tokens_per_s']:.0f} | {row['share_of_documents_alone']:.0%} | "
            + (f"{sides['beside'] / sides['alone']:.2f} |" if sides["alone"] else "- |"),
            flush=True,
        )
    return rows


def main() -> None:
    """Measure, print and record."""
    parser = parser_of(__doc__, name="serving/interference_live")
    parser.add_argument("--topology", nargs="+", default=TOPOLOGIES, choices=TOPOLOGIES)
    parser.add_argument("--bound", nargs="+", default=BOUNDS, choices=BOUNDS)
    parser.add_argument("--duration", type=float, default=90.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = make_opt_125m(Path(name) / "opt-125m")
        rows = [
            row
            for topology in arguments.topology
            for row in measure_topology(folder, topology, arguments.bound, arguments.duration)
        ]
    print(f"written to {write_result(arguments.name, {'duration_s': arguments.duration, 'rows': rows})}")


if __name__ == "__main__":
    main()
