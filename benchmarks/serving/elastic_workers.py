"""Chat beside documents on one elastic worker with all cores, on two that share them, and on a colocated one.

    python -m benchmarks.serving.elastic_workers [--system one two colocated] [--duration 60] [--slow] [--add]

The load of `benchmarks.scheduling.live_policies` under `aligned_slo`, each system on a fresh server; before it, one
request at a time. `--slow`: for a machine of half the speed, chats come half as often and have twice the time.
Throughput of the same systems is in `benchmarks.serving.serve_vs_engine --workers 2`, what the loss of a worker costs
in `benchmarks.serving.worker_loss`.
Targets for one elastic worker: 98 % of chats with both objectives held, as many documents as a colocated one.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.scheduling.live_policies import BEST_EFFORT, REAL_TIME, load, make_model, served
from benchmarks.support.recording import read_figures, write_result

NAME = "elastic_workers"
POLICY = "aligned_slo"
SLOW_REAL_TIME = REAL_TIME.replace("rate=2, ttft=0.4, tpot=0.2", "rate=1, ttft=0.8, tpot=0.4")
LONE = "lone: prompt=uniform(512,512), output=uniform(64,64), outstanding=1"
WARM_UP_S = 10.0  # in which workers learn what iterations cost
LONE_S = 10.0


class System(NamedTuple):
    """Workers that share the cores of this machine."""

    topology: str
    num_workers: int


SYSTEMS = {"one": System("elastic", 1), "two": System("elastic", 2), "colocated": System("colocated", 1)}


def measure(folder: Path, system: System, real_time: str, duration_s: float) -> dict[str, Any]:
    """Return what clients saw of both kinds, on a server of its own."""
    counts = (f"decode.count={system.num_workers}",)
    with served(folder, POLICY, system.topology, more_settings=counts) as port:
        load(port, folder, [real_time], WARM_UP_S)
        (lone,) = load(port, folder, [LONE], LONE_S)["report"]["classes"]
        report = load(port, folder, [real_time, BEST_EFFORT], duration_s)["report"]
    of_class = {one["name"]: one for one in report["classes"]}
    chat, documents = of_class["rt"], of_class["be"]
    return {
        "num_chats": chat["num_completed"],
        "chats_held": chat["slo_attainment"],
        **{f"chat_{name}": _percentiles(chat[name]) for name in ("ttft_s", "tpot_s")},
        "num_documents": documents["num_completed"],
        **{f"lone_{name}": _percentiles(lone[name]) for name in ("ttft_s", "tpot_s")},
    }


def _percentiles(distribution: dict[str, float] | None) -> dict[str, float] | None:
    return distribution and {name: round(distribution[name], 4) for name in ("p50", "p90", "p99")}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--duration", type=float, default=60.0)
    parser.add_argument("--slow", action="store_true", help="chats come half as often and have twice the time")
    parser.add_argument("--add", action="store_true", help="keep what is recorded, and add to it")
    arguments = parser.parse_args()
    real_time = SLOW_REAL_TIME if arguments.slow else REAL_TIME
    traffic = {"real_time": real_time, "best_effort": BEST_EFFORT, "duration_s": arguments.duration}
    figures: dict[str, Any] = (read_figures(NAME) if arguments.add else None) or {**traffic, "systems": {}}
    assert {name: figures[name] for name in traffic} == traffic, "what is recorded is of other traffic"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "opt-125m"
        make_model(folder)
        for system in arguments.system:
            measured = measure(folder, SYSTEMS[system], real_time, arguments.duration)
            print(system, measured, flush=True)
            figures["systems"].setdefault(system, []).append(measured)
            write_result(NAME, figures)


if __name__ == "__main__":
    main()
