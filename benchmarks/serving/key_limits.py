"""Cost of counting a request against its key's limit, by the number of keys and gateways.

    python -m benchmarks.serving.key_limits

The pure parts alone (core/quotas.py), without links: a gateway's call for a request of a random key and the state
server's count of it, on one thread; every gateway gives a sign of life five times in LEASE_S, which is not timed.
`call_bytes`: a call as it is sent.
"""

import argparse
import random
import statistics
import time
from typing import Any

import msgspec

from alignedserve.core.quotas import LEASE_S, OwnShare, QuotaPool
from alignedserve.messages.state import UseQuota
from benchmarks.support.recording import write_result

CASES = ((1, 1), (1, 64), (100, 4), (100, 64), (10_000, 4), (10_000, 64))
_PER_MINUTE = 1_000_000
_STEP_S = 0.01


class Counts:
    """Gateways and the state server, between which everything arrives at once."""

    def __init__(self, num_keys: int, num_gateways: int) -> None:
        self.now = 0.0
        self.rng = random.Random(0)
        self.num_keys = num_keys
        names = [f"gateway-{number}" for number in range(num_gateways)]
        self.pool = QuotaPool(_PER_MINUTE, num_keys, names, 0.0)
        self.shares = {name: OwnShare(_PER_MINUTE / num_gateways, num_keys, name, 0.0) for name in names}
        self.last_s = dict.fromkeys(names, -LEASE_S)
        for _ in range(int(2 * LEASE_S / _STEP_S)):
            self.step()

    def step(self) -> None:
        """Let time pass; gateways that were silent for long give a sign of life."""
        self.now += _STEP_S
        for name in [name for name, last_s in self.last_s.items() if self.now - last_s > LEASE_S / 5]:
            self.call(name, None)

    def call(self, name: str, key_number: int | None) -> int:
        """Count a request; return the size of the call."""
        call = self.shares[name].call(name, key_number, self.now)
        wait_s = self.pool.on_call(call, self.now)
        assert key_number is None or not wait_s, "a request that is let in is refused"
        self.shares[name].on_answer(self.now, self.now)
        self.last_s[name] = self.now
        return len(msgspec.msgpack.encode(UseQuota(call.process_id, call.seen_s, call.spent, call.key_number)))


def measure(num_keys: int, num_gateways: int, num_requests: int) -> dict[str, Any]:
    """Return one row of the result."""
    counts = Counts(num_keys, num_gateways)
    times_s, sizes = [], []
    for _ in range(num_requests):
        counts.step()
        name = counts.rng.choice(list(counts.shares))
        key_number = counts.rng.randrange(num_keys)
        begin = time.perf_counter()
        size = counts.call(name, key_number)
        times_s.append(time.perf_counter() - begin)
        sizes.append(size)
    return {
        "keys": num_keys,
        "gateways": num_gateways,
        "us_per_request": round(statistics.median(times_s) * 1e6, 1),
        "call_bytes": round(statistics.median(sizes)),
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    arguments = parser.parse_args()
    rows = []
    for num_keys, num_gateways in CASES:
        rows.append(measure(num_keys, num_gateways, arguments.requests))
        print(rows[-1], flush=True)
    write_result("key_limits", rows)


if __name__ == "__main__":
    main()
