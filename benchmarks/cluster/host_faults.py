"""A cluster of three hosts of namespaces whose network fails: what a trace with known answers shows of it.

python -m benchmarks.cluster.host_faults  # as root

Targets: nothing lost or corrupted, a lost host given up within 5 s, no pause before a token over 10 s where one was.
"""

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from tests.harnesses.hosts.cluster_demo import clear_former, replay_with_fault
from tests.harnesses.hosts.namespace_hosts import NamespaceHosts
from tests.harnesses.hosts.rehearsal import SETTINGS, Rehearsal

_NUM_HOSTS = 3
_FAULT_AT_S = 5.0
# Seconds of the fault (0: until the trace ends) and of the trace.
CASES = {"cut": (20.0, 35.0), "loss": (8.0, 15.0), "delay": (8.0, 15.0), "slow": (8.0, 15.0), "kill": (0.0, 20.0)}


def measure(rehearsal: Rehearsal, fault: str, rate: float) -> dict[str, Any]:
    """Return what came of one fault."""
    heal_after, duration = CASES[fault]
    options = argparse.Namespace(fault=fault, fault_at=_FAULT_AT_S, heal_after=heal_after, duration=duration, rate=rate)
    return {"fault_s": heal_after or duration - _FAULT_AT_S, **asdict(replay_with_fault(rehearsal, options))}


def main() -> None:
    """Start the cluster once and let it have every fault in turn."""
    parser = parser_of(__doc__, name="faults/host_faults")
    parser.add_argument("--base", type=Path, default=Path("/run/alignedserve-host-faults"))
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    parser.add_argument("--only", choices=sorted(CASES), action="append")
    options = parser.parse_args()
    clear_former(options.base)
    kept = [Path(entry) for entry in sys.path if Path(entry).is_dir()]
    hosts = NamespaceHosts(_NUM_HOSTS, options.base, kept)
    rehearsal = Rehearsal(hosts, SETTINGS)
    rehearsal.prepare()
    with hosts:
        began_s = time.monotonic()
        rehearsal.up()
        up_s = time.monotonic() - began_s
        found = {fault: measure(rehearsal, fault, options.rate) for fault in options.only or CASES}
        rehearsal.ray("down")
    print(write_result(options.name, {"settings": SETTINGS, "num_hosts": _NUM_HOSTS, "up_s": up_s, "faults": found}))


if __name__ == "__main__":
    main()
