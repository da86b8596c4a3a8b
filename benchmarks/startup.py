"""Time from the command to a cluster that is ready and to a whole answer, and what it takes while it is idle.

python -m benchmarks.startup            # targets: ready, and answered, in 20 s or less; at most 3 GiB idle
python -m benchmarks.startup --only smollm2 --name serving/startup_smollm2
"""

import json
import signal
import statistics
import subprocess
import time
import urllib.request
from typing import Any, NamedTuple

import psutil

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.server import ALIGNEDSERVE, READY_TIMEOUT_S, free_port, wait_ready

_IDLE_S = 5.0
CASES = {
    "pocket": ["pocket"],  # as `make serve`: elastic
    "disaggregated": ["pocket", "--set", "topology=disaggregated"],
    "smollm2": ["smollm2"],  # as `make serve MODEL=smollm2`
}


class Start(NamedTuple):
    """Seconds from the command, and memory once idle."""

    ready_s: float
    answered_s: float
    answer: str
    memory: dict[str, int]


def ask(port: int) -> str:
    """Return the answer to a short question."""
    message = {"role": "user", "content": "What is the capital of France?"}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as listed:
        model = json.load(listed)["data"][0]["id"]
    body: dict[str, Any] = {"model": model, "messages": [message], "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=READY_TIMEOUT_S) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def memory_bytes(root: psutil.Process) -> dict[str, int]:
    """Return the proportional set size of every process of the cluster, by what it is.

    Shared pages are counted once.
    """
    sizes: dict[str, int] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            command = process.cmdline()[0].split("/")[-1] if process.cmdline() else process.name()
            sizes[command] = sizes.get(command, 0) + process.memory_full_info().pss
        except psutil.Error:
            continue
    return sizes


def measure(arguments: list[str]) -> Start:
    """Measure one start."""
    port = free_port()
    command = [ALIGNEDSERVE, "serve", *arguments, "--port", str(port)]
    began_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_ready(port)
        ready_s = time.monotonic() - began_s
        answer = ask(port)
        answered_s = time.monotonic() - began_s
        time.sleep(_IDLE_S)
        return Start(ready_s, answered_s, answer, memory_bytes(psutil.Process(process.pid)))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def figures_of(starts: list[Start]) -> dict[str, Any]:
    """Return what several starts say."""
    total = [sum(start.memory.values()) / 2**20 for start in starts]
    return {
        "ready_s": [round(start.ready_s, 1) for start in starts],
        "ready_s_median": round(statistics.median(start.ready_s for start in starts), 1),
        "answered_s": [round(start.answered_s, 1) for start in starts],
        "answered_s_median": round(statistics.median(start.answered_s for start in starts), 1),
        "answer": starts[-1].answer,
        "idle_pss_mib_median": round(statistics.median(total)),
        "idle_pss_mib_by_process": {key: round(size / 2**20) for key, size in sorted(starts[-1].memory.items())},
    }


def main() -> None:
    """Measure several starts of each case; print and record."""
    parser = parser_of(__doc__, rounds=3, name="serving/startup")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    figures = {}
    for name in options.only:
        figures[name] = figures_of([measure(CASES[name]) for _ in range(options.rounds)])
        print(name, figures[name])
        write_result(options.name, figures)


if __name__ == "__main__":
    main()
