"""From the command to the first token, and what a cluster takes while it is idle.

python -m benchmarks.serving.startup            # targets: ready in 20 s or less, at most 3 GiB idle
"""

import argparse
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from benchmarks.support.recording import write_result

_READY_TIMEOUT_S = 120.0
_IDLE_S = 5.0


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(port: int) -> None:
    """Wait until /ready answers 200."""
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.05)
    raise TimeoutError("the server was not ready in time")


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


def measure(arguments: list[str]) -> tuple[float, dict[str, int]]:
    """Measure one start: seconds to /ready, memory once idle."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "alignedserve"), "serve", "--port", str(port), *arguments]
    began_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_ready(port)
        ready_s = time.monotonic() - began_s
        time.sleep(_IDLE_S)
        return ready_s, memory_bytes(psutil.Process(process.pid))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def main() -> None:
    """Measure several starts of each topology; print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    figures = {}
    for name, arguments in {"disaggregated": [], "colocated": ["--set", "topology=colocated"]}.items():
        starts = [measure(arguments) for _ in range(rounds)]
        total = [sum(sizes.values()) / 2**20 for _, sizes in starts]
        figures[name] = {
            "ready_s": [round(seconds, 1) for seconds, _ in starts],
            "ready_s_median": round(statistics.median(seconds for seconds, _ in starts), 1),
            "idle_pss_mib_median": round(statistics.median(total)),
            "idle_pss_mib_by_process": {key: round(size / 2**20) for key, size in sorted(starts[-1][1].items())},
        }
        print(name, figures[name])
    write_result("startup", figures)


if __name__ == "__main__":
    main()
