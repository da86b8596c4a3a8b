"""Aligned batches against first come, first served: the demo, with both, in turn.

    python -m benchmarks.scheduling.alignment  # the mixed trace with more load than the decode worker holds
    python -m benchmarks.scheduling.alignment --rate 2 --max-running-requests 64 --trace

Targets on the mixed trace: the spread of running batches (p90 of longest over mean context) at most half of that of
fcfs; at most 12 % of the iterations in batch switch; throughput no lower.

Alignment needs a pool to choose from: the decode worker runs few requests at a time, so that they wait. On this
machine's kernels, whose cost follows the sum of the lengths, a narrower batch is not faster by itself.
"""

import argparse
import json
import statistics
import subprocess
from typing import Any

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.server import ALIGNEDSERVE

POLICIES = ("fcfs", "density_first")


def run_demo(policy: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run one demo and return its report."""
    command = [ALIGNEDSERVE, "demo", "--json", "--set", "topology=disaggregated", "--batching", policy]
    command += ["--duration", str(options.duration), "--rate", str(options.rate), "--seed", str(seed)]
    command += ["--set", f"decode.max_running_requests={options.max_running_requests}"]
    command += [] if options.trace else ["--mixed"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise SystemExit(f"{policy}: {finished.stdout[-2000:]}{finished.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(finished.stdout)
    return report


def figures(report: dict[str, Any]) -> dict[str, float]:
    """Return the figures that count of one demo."""
    total, alignment = report["load"]["total"], report["alignment"]
    return {
        "num_completed": total["num_completed"],
        "num_lost": total["num_sent"] - total["num_completed"],
        "output_tokens_per_s": total["output_tokens_per_s"],
        "requests_per_s": total["requests_per_s"],
        "end_to_end_p50_s": total["end_to_end_s"]["p50"],
        "end_to_end_p99_s": total["end_to_end_s"]["p99"],
        "tbt_p50_s": total["tbt_s"]["p50"],
        "tbt_p99_s": total["tbt_s"]["p99"],
        **alignment,
    }


def main() -> None:
    """Measure; print and record."""
    parser = parser_of(__doc__, rounds=2)
    parser.add_argument("--rate", type=float, default=14.0)
    parser.add_argument("--duration", type=float, default=40.0)
    parser.add_argument("--max-running-requests", type=int, default=8)
    parser.add_argument("--trace", action="store_true", help="the trace's own prompt lengths")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    for seed in range(options.rounds):
        for policy in POLICIES:
            runs[policy].append(figures(run_demo(policy, options, seed)))
            print(seed, policy, runs[policy][-1], flush=True)
    medians = {
        policy: {name: statistics.median(run[name] for run in rows) for name in rows[0]}
        for policy, rows in runs.items()
    }
    fcfs, aligned = (medians[policy] for policy in POLICIES)
    summary = {
        "spread_p90_ratio": aligned["spread_p90"] / fcfs["spread_p90"],
        "throughput_ratio": aligned["output_tokens_per_s"] / fcfs["output_tokens_per_s"],
        "switch_share": aligned["switch_share"],
    }
    print(summary)
    write_result(
        "scheduling/alignment_trace" if options.trace else "scheduling/alignment",
        {"options": vars(options), "summary": summary, "medians": medians, "runs": runs},
    )


if __name__ == "__main__":
    main()
