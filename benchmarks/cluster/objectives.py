"""Default objectives of several starts beside a busy process: the same machine must not draw them by lot.

python -m benchmarks.cluster.objectives pocket  # target: the largest is at most 1.5 times the smallest

Nothing is kept from start to start (engine.calibration_s); `/metrics` says what chats get that name none.
"""

import os
import re
import subprocess
import sys
import tempfile
import urllib.request

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.server import served

_OBJECTIVE = re.compile(r'alignedserve_default_objective_seconds\{.*objective="(\w+)"\} (\S+)')
_BUSY = "while True: pass"


def objectives_of(model: str) -> dict[str, float]:
    """Return the default objectives of a start of its own, in seconds."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home
        with served(model) as port, urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as metrics:
            return {name: float(seconds) for name, seconds in _OBJECTIVE.findall(metrics.read().decode())}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--starts", type=int, default=6)
    arguments = parser.parse_args()
    busy = subprocess.Popen([sys.executable, "-c", _BUSY])
    try:
        starts = [objectives_of(arguments.model) for _ in range(arguments.starts)]
    finally:
        busy.kill()
    for name in starts[0]:
        seconds = [start[name] for start in starts]
        print(f"{name}: {seconds} s, within a factor of {max(seconds) / min(seconds):.2f}")


if __name__ == "__main__":
    main()
