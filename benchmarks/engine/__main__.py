"""`alignedserve bench engine` on the workloads whose shares of the ceilings have a target: W1, W3, one request alone.

    python -m benchmarks.engine [--rounds 3]
    python -m benchmarks.engine --blocks        # one request alone with weights of 4 bits

Every run is a process of its own; the median of the rounds by wall time counts, with its own ceilings.
"""

import argparse
import json
import subprocess
from typing import Any

from benchmarks.support.command import ALIGNEDSERVE
from benchmarks.support.recording import write_result

SHAPES = (("opt-125m", "w1"), ("opt-125m", "w3"), ("llama-0.5b", "one"))
DTYPES = ("float32", "bfloat16")
CASES = [(shape, work, dtype) for shape, work in SHAPES for dtype in DTYPES]
IN_BLOCKS = [("llama-0.5b", "one", "bfloat16")]
BLOCKS = "Q4_1"
SHOWN = ("output_tokens_per_s", "share_of_gemm_floor", "share_of_weight_reading", "outside_forward_share")


def run(shape: str, workload: str, dtype: str, quantization: str | None) -> dict[str, Any]:
    """Return everything that one run says."""
    command = [ALIGNEDSERVE, "bench", "engine", "--shape", shape, "--workload", workload, "--dtype", dtype, "--json"]
    command += [] if quantization is None else ["--quantization", quantization]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, Any] = json.loads(answer.stdout)
    return {"workload": workload, **figures}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", action="store_true", help=f"one request alone, with weights in {BLOCKS}")
    arguments = parser.parse_args()
    quantization = BLOCKS if arguments.blocks else None
    figures = []
    for case in IN_BLOCKS if arguments.blocks else CASES:
        runs = [run(*case, quantization) for _ in range(arguments.rounds)]
        figures.append(sorted(runs, key=lambda one: float(one["wall_s"]))[len(runs) // 2])
        print(*case, {name: round(figures[-1][name], 3) for name in SHOWN}, flush=True)
    print(write_result("engine_blocks" if arguments.blocks else "engine", figures))


if __name__ == "__main__":
    main()
