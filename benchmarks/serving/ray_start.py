"""`ray start` of a head, as cluster.yaml has it and with Ray's dashboard and log monitor: seconds, processes, memory.

python -m benchmarks.serving.ray_start            # as root: each start has namespaces of its own, and ends with them
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile

from benchmarks.support.recording import write_result

_NETWORK = (
    "ip link set lo up; ip link add name inside type veth peer name outside; "
    "ip addr add 10.99.0.1/24 dev inside; ip link set inside up; ip link set outside up; "
    "mount -t tmpfs tmpfs /dev/shm; "
)
_SPACES = ("unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "sh", "-c")
_START = """
import json, subprocess, sys, time
import psutil
command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=6379", "--disable-usage-stats"]
began_s = time.monotonic()
subprocess.run([*command, "--object-store-memory=83886080", *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)
seconds = time.monotonic() - began_s
others = [one for one in psutil.process_iter() if one.pid not in (1, psutil.Process().pid)]
found = [one for one in others if "ray" in " ".join(one.cmdline())]
print(json.dumps({"seconds": seconds, "processes": len(found), "bytes": sum(one.memory_info().rss for one in found)}))
"""
CASES = {
    "cluster.yaml": ("--include-dashboard=false", "--include-log-monitor=false"),
    "with the dashboard and the log monitor": ("--dashboard-host=127.0.0.1",),
}


def start(options: tuple[str, ...]) -> dict[str, float]:
    """Start a head in namespaces of its own; return the seconds until the command ended, processes and their memory."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        here = [sys.executable, "-c", _START, f"--temp-dir={folder}", *options]
        done = subprocess.run([*_SPACES, f'{_NETWORK}"$@"', "start", *here], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="ray_start")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, case in CASES.items():
            found[name].append(start(case))
            print(name, found[name][-1], flush=True)
    medians = {
        name: {key: statistics.median(one[key] for one in starts) for key in starts[0]}
        for name, starts in found.items()
    }
    write_result(options.name, {"medians": medians, "starts": found})


if __name__ == "__main__":
    main()
