"""`alignedserve bench engine` on the workloads whose shares of the ceilings have a target: W1, W3, one request alone.

    python -m benchmarks.engine [--rounds 3]

Every run is a process of its own; the median of the rounds by wall time counts, with its own ceilings.
"""

import argparse
import json
import subprocess
from typing import Any

from benchmarks.scheduling.live_policies import ALIGNEDSERVE
from benchmarks.support.recording import write_result

CASES = (("opt-125m", "w1"), ("opt-125m", "w3"), ("llama-0.5b", "one"))
DTYPES = ("float32", "bfloat16")
SHOWN = ("output_tokens_per_s", "share_of_gemm_floor", "share_of_weight_reading", "outside_forward_share")


def run(shape: str, workload: str, dtype: str) -> dict[str, Any]:
    """Return everything that one run says."""
    command = [ALIGNEDSERVE, "bench", "engine", "--shape", shape, "--workload", workload, "--dtype", dtype, "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, Any] = json.loads(answer.stdout)
    return {"workload": workload, **figures}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    figures = []
    for shape, workload in CASES:
        for dtype in DTYPES:
            runs = [run(shape, workload, dtype) for _ in range(arguments.rounds)]
            figures.append(sorted(runs, key=lambda one: float(one["wall_s"]))[len(runs) // 2])
            print(shape, workload, dtype, {name: round(figures[-1][name], 3) for name in SHOWN}, flush=True)
    print(write_result("engine", figures))


if __name__ == "__main__":
    main()
