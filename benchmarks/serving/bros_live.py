"""BROS on a live worker whose memory is short: shared blocks, whole caches swapped, recomputing; and FCFS.

    python -m benchmarks.serving.bros_live [--part mixed alone] [--system NAME ...] [--duration 20] [--add]

The 125M OPT shape in bfloat16, one colocated worker with 96 MiB of blocks (160, 2 560 tokens). `mixed`: real-time
chats beside best-effort documents, of which more are outstanding than memory holds. `alone`: chats alone, in the place
of the paper's Figure 12. `deciding`: the share of a worker's busy time that goes into deciding and handing over to the
computing thread, for Figure 14. Normalised latency: the mean time of a request by its output tokens.
"""

import argparse
import re
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.scheduling.live_policies import load, make_model, served
from benchmarks.support.recording import read_figures, write_result

NAME = "bros_live"
MEMORY = ("decode.kv_cache_bytes=96MiB",)
WHOLE = "scheduling.policy_params.share_blocks=false"
NO_CACHE = "prefix_cache.enabled=false"  # what is compared are blocks alone
LENGTHS = "prompt=lognormal(100,300), output=lognormal(60,120)"
REAL_TIME = f"rt: {LENGTHS}, rate=1.5, ttft=0.8, tpot=0.4"
BEST_EFFORT = "be: prompt=uniform(64,256), output=uniform(64,192), outstanding=32, tier=flex"
ALONE = f"rt: {LENGTHS}, rate=4, ttft=0.8, tpot=0.4"
WARM_UP_S = 6.0  # in which a worker learns what iterations cost


class System(NamedTuple):
    """One way to serve both kinds."""

    policy: str
    settings: tuple[str, ...] = ()


SYSTEMS = {
    "shared": System("bros"),
    "whole": System("bros", (WHOLE, NO_CACHE)),
    "recomputing": System("bros", (WHOLE, NO_CACHE, "decode.swap_space_bytes=0")),
    "fcfs": System("fcfs", (NO_CACHE,)),
}
PARTS = {"mixed": [REAL_TIME, BEST_EFFORT], "alone": [ALONE]}
_SERIES = re.compile(
    r'^alignedserve_(decode_seconds_total|evictions_total|iterations_total)\{(?:[^}]*part="(\w+)")?[^}]*\} (\S+)', re.M
)


def counters(port: int) -> dict[str, float]:
    """Return what the worker counted since its start."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return {part or name: float(value) for name, part, value in _SERIES.findall(answer.read().decode())}


def measure(folder: Path, system: System, traffic: list[str], duration_s: float) -> dict[str, Any]:
    """Return what clients saw of each kind, on a server of its own, and what the worker counted."""
    with served(folder, system.policy, "colocated", more_settings=(*MEMORY, *system.settings)) as port:
        load(port, folder, traffic, WARM_UP_S)
        before = counters(port)
        report = load(port, folder, traffic, duration_s)["report"]
        counted = {name: value - before.get(name, 0.0) for name, value in counters(port).items()}
    part_s = {name: value for name, value in counted.items() if not name.endswith("_total")}
    busy_s = sum(part_s.values()) - part_s["waiting"]
    return {
        **{one["name"]: _class_figures(one) for one in report["classes"]},
        "deciding": round(part_s["turnaround"] / busy_s, 4),
        "iterations": counted["iterations_total"],
        "evictions": counted.get("evictions_total", 0.0),
    }


def _class_figures(one: dict[str, Any]) -> dict[str, Any]:
    percentiles = {
        name: {key: round(one[name][key], 4) for key in ("p50", "p99")} for name in ("ttft_s", "tpot_s") if one[name]
    }
    mean_output = one["output_tokens"] / max(one["num_completed"], 1)
    return {
        "num_completed": one["num_completed"],
        "requests_per_s": round(one["requests_per_s"], 3),
        "output_tokens_per_s": round(one["output_tokens_per_s"], 1),
        "held": one["slo_attainment"],
        "s_per_token": round(one["end_to_end_s"]["mean"] / mean_output, 4) if one["end_to_end_s"] else None,
        **percentiles,
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--system", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--duration", type=float, default=20.0)
    parser.add_argument("--add", action="store_true", help="keep what is recorded, and add to it")
    options = parser.parse_args()
    described = {"traffic": PARTS, "duration_s": options.duration, "memory": list(MEMORY)}
    figures: dict[str, Any] = (read_figures(NAME) if options.add else None) or {**described, "runs": {}}
    assert {name: figures[name] for name in described} == described, "what is recorded is of other traffic"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "opt-125m"
        make_model(folder)
        for part in options.part:
            for system in options.system:
                measured = measure(folder, SYSTEMS[system], PARTS[part], options.duration)
                print(part, system, measured, flush=True)
                figures["runs"].setdefault(part, {}).setdefault(system, []).append(measured)
                write_result(NAME, figures)


if __name__ == "__main__":
    main()
