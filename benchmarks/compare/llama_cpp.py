"""The engine against llama.cpp on a GGUF file: prompts of equal length, all at once, greedy, the same threads.

llama.cpp plays by its own `llama-batched-bench`, started anew for every round; what counts is the time that it reports,
from the first prompt's beginning to the last token, without loading. It feeds random tokens instead of choosing the
likeliest, so it spares what choosing costs. AlignedServe is the engine that workers run, in a process of its own that
sleeps meanwhile, its threads waiting as those of `alignedserve serve` do. Rounds alternate, medians count.

    sh benchmarks/compare/build_llama_cpp.sh
    python -m benchmarks.compare.llama_cpp [FILE.gguf] [--streams 1 16 64] [--rounds 3] [--llama-cpp FOLDER]
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.model.built_in import smollm2_file
from benchmarks.compare.contender_process import ROOT, Contender
from benchmarks.support.recording import write_result

BINARIES = ROOT / ".llama.cpp" / "build" / "bin"
PROGRAM = "llama-batched-bench"
SHORTEST_CONTEXT = 8192
TARGETS = {1: 1.4, 16: 5.0, 64: 6.0}  # times llama.cpp, of SmolLM2-135M in Q4_1


def main() -> None:
    """Run every number of streams, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file; SmolLM2-135M-Instruct where it is installed")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", help="of AlignedServe's activations and cache")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-cpp", type=Path, default=BINARIES, help=f"the folder of {PROGRAM}")
    parser.add_argument("--name", default="llama_cpp", help="of the file under benchmarks/results")
    arguments = parser.parse_args()
    if not (arguments.llama_cpp / PROGRAM).exists():
        raise SystemExit(f"no {PROGRAM} in {arguments.llama_cpp}: run sh benchmarks/compare/build_llama_cpp.sh")
    arguments.model = arguments.model or smollm2_file()
    rows = []
    for num_streams in arguments.streams:
        rows.append(compare(num_streams, arguments))
        print(line_of(rows[-1]), flush=True)
        figures = {"model": arguments.model.name, "dtype": arguments.dtype, "rows": rows}
        write_result(arguments.name, figures, command=command_of(arguments))


def command_of(arguments: argparse.Namespace) -> str:
    """Return what repeats the run, wherever llama.cpp and the model lie."""
    streams = " ".join(map(str, arguments.streams))
    lengths = f"--prompt-len {arguments.prompt_len} --output-len {arguments.output_len}"
    rest = f"--dtype {arguments.dtype} --rounds {arguments.rounds} --name {arguments.name}"
    return f"python -m benchmarks.compare.llama_cpp --streams {streams} {lengths} {rest}"


def compare(num_streams: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return output tokens per second, prompts included in the time, of both, and the median ratio of neighbours."""
    lengths = [(arguments.prompt_len, arguments.output_len)] * num_streams
    module = ["-m", "benchmarks.compare.contenders", "alignedserve"]
    ours = Contender([sys.executable, *module, str(arguments.model), arguments.dtype, json.dumps(lengths)])
    theirs = llama_cpp(num_streams, arguments)
    seconds: dict[str, list[float]] = {"alignedserve": [], "llama.cpp": []}
    loads = []
    for _ in range(arguments.rounds):
        seconds["alignedserve"].append(ours.play())
        seconds["llama.cpp"].append(theirs())
        loads.append(psutil.getloadavg()[0])
    ours.close()
    pairs = zip(seconds["llama.cpp"], seconds["alignedserve"], strict=True)
    num_tokens = num_streams * arguments.output_len
    return {
        "streams": num_streams,
        "prompt_len": arguments.prompt_len,
        "output_len": arguments.output_len,
        "output_tokens_per_s": {name: num_tokens / statistics.median(values) for name, values in seconds.items()},
        "ratio": statistics.median(their_s / our_s for their_s, our_s in pairs),
        "seconds": seconds,
        "load": loads,
    }


def llama_cpp(num_streams: int, arguments: argparse.Namespace) -> Callable[[], float]:
    """Return what plays one round and returns its seconds."""
    lengths = {"-npp": arguments.prompt_len, "-ntg": arguments.output_len, "-npl": num_streams}
    context = num_streams * (arguments.prompt_len + arguments.output_len)
    options = {"-m": arguments.model, **lengths, "-t": num_cores(), "-c": max(context, SHORTEST_CONTEXT)}
    command = [str(arguments.llama_cpp / PROGRAM), "--output-format", "jsonl"]
    command += [str(part) for option in options.items() for part in option]

    def play() -> float:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        figures = next(json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{"))
        return float(figures["t"])

    return play


def line_of(row: dict[str, Any]) -> str:
    """Return one row of the table."""
    rates = "  ".join(f"{name} {rate:7.1f}" for name, rate in row["output_tokens_per_s"].items())
    target = TARGETS.get(row["streams"])
    return f"{row['streams']:3} streams  {rates}  |  {row['ratio']:.2f} x" + (f" (target {target})" if target else "")


if __name__ == "__main__":
    main()
