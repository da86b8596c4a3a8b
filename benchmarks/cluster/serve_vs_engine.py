"""Share of engine speed that the whole system keeps: 128 requests at once, through gateway, router and workers.

    python -m benchmarks.cluster.serve_vs_engine [--topology elastic disaggregated] [--workers 2] [--rounds 3]
    python -m benchmarks.cluster.serve_vs_engine --add ...  # further rounds beside those that are recorded

The 125M OPT shape, in bfloat16 where the machine multiplies that natively, else in float32. A round is the engine
alone in a process of its own, then `bench serve` against a fresh server per topology and number of workers, which share
the cores; medians count. On this machine clients, gateway and router have the same cores as the workers. Target: 92 %
of the engine with the default topology, elastic, and the number of workers that it chooses.
"""

import multiprocessing
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from alignedserve.runtime.device.cores import has_native_bfloat16
from benchmarks.engine.benchmark_spec import EngineBenchmarkSpec
from benchmarks.engine.throughput import run_engine_benchmark
from benchmarks.engine.workloads import parse_workload
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.models import make_opt_125m
from benchmarks.measuring.recording import read_figures, write_result
from benchmarks.measuring.server import TOPOLOGIES, load_report, served, settings_of

NAME = "serving/serve_vs_engine"
WORKLOAD = "w4"
POLICY = "fcfs"
DTYPE = "bfloat16" if has_native_bfloat16() else "float32"
PATIENCE = "gateway.first_token_timeout_s=600"  # the last of a burst waits for minutes on a slow machine


def write_trace(path: Path) -> int:
    """Return the workload's lengths as a trace in Azure's format, all arriving at once; how many tokens it answers."""
    groups = parse_workload(WORKLOAD)
    rows = [f"0.0,{group.prompt_len},{group.output_len}" for group in groups for _ in range(group.num_requests)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    return sum(group.num_requests * group.output_len for group in groups)


def engine_tokens_per_s() -> float:
    """Return the rate of the engine alone, in a process of its own."""
    spec = EngineBenchmarkSpec(model="opt-125m", groups=parse_workload(WORKLOAD), dtype=DTYPE)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run_engine_benchmark, (spec,)).output_tokens_per_s


class System(NamedTuple):
    """A server to measure."""

    topology: str
    num_workers: int | None = None  # None: as many as it chooses

    @property
    def name(self) -> str:
        return self.topology if self.num_workers is None else f"{self.topology}, decode.count={self.num_workers}"


def run_served(folder: Path, trace: Path, system: System, num_tokens: int) -> float:
    """Return the output tokens per second from the first request to the last answer, as clients see them."""
    counts = [] if system.num_workers is None else [f"decode.count={system.num_workers}"]
    settings = [*settings_of(system.topology), f"model.dtype={DTYPE}", PATIENCE, *counts]
    with served(folder, settings, "--policy", POLICY) as port:
        report = load_report(port, "--tokenizer", str(folder), "--trace", str(trace))
    total = report["total"]
    assert total["num_completed"] == total["num_sent"], "a request failed"
    assert total["output_tokens"] == num_tokens, "an answer of another length"
    return num_tokens / float(report["duration_s"])


def main() -> None:
    """Measure, print and record."""
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--topology", nargs="+", default=TOPOLOGIES, choices=TOPOLOGIES)
    parser.add_argument("--workers", nargs="+", type=int, default=[], help="and elastic workers, so many each")
    parser.add_argument("--add", action="store_true", help="keep the rounds that are recorded, and add to them")
    arguments = parser.parse_args()
    systems = [System(topology) for topology in arguments.topology]
    systems += [System("elastic", num_workers) for num_workers in arguments.workers]
    recorded = read_figures(NAME) if arguments.add else None
    rates: dict[str, list[float]] = recorded["output_tokens_per_s"] if recorded else {}
    with tempfile.TemporaryDirectory() as name:
        folder, trace = make_opt_125m(Path(name) / "model"), Path(name) / "trace.csv"
        num_tokens = write_trace(trace)
        for _ in range(arguments.rounds):
            rates.setdefault("engine", []).append(engine_tokens_per_s())
            for system in systems:
                rate = run_served(folder, trace, system, num_tokens)
                rates.setdefault(system.name, []).append(rate)
            print(rates, flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    shares = {name: median / medians["engine"] for name, median in medians.items() if name != "engine"}
    print(shares)
    print(write_result(NAME, {"dtype": DTYPE, "output_tokens_per_s": rates, "share_of_engine": shares}))


if __name__ == "__main__":
    main()
