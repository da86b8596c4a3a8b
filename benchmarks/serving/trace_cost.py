"""What traces cost a running cluster: processor time of all its processes, and its throughput.

    python -m benchmarks.serving.trace_cost --rounds 8

One elastic worker of the pocket model, and a collector of traces in this process. Rounds of the same answers, in pairs:
every call asks by its `traceparent` to be traced, or not to be. Target: under 2 % with every call traced. Processor
time says so on a busy machine, too; the rate needs quiet cores.
"""

import argparse
import asyncio
import secrets
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
from typing_extensions import override

from benchmarks.support.kill_cluster import KillCluster
from benchmarks.support.process_cpu import cpu_seconds, spent
from benchmarks.support.recording import write_result

_ANSWERS = 16  # at a time
_SETTLED_S = 2.0  # after a round, in which the last steps are told and the last traces sent


class _Collector(BaseHTTPRequestHandler):
    """Takes every export, and counts its bytes."""

    num_bytes = 0

    def do_POST(self) -> None:
        """Answer that all was taken."""
        _Collector.num_bytes += len(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    @override
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def collector() -> Iterator[str]:
    """Collect traces; yield the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


async def _round(
    client: httpx.AsyncClient, pid: int, options: argparse.Namespace, *, is_traced: bool
) -> dict[str, Any]:
    """Return what a round of answers took."""
    places = asyncio.Semaphore(_ANSWERS)
    body = {"model": "pocket", "prompt": "Spell cat. " * 8, "max_tokens": options.tokens, "ignore_eos": True}

    async def ask() -> int:
        trace = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{int(is_traced):02x}"
        async with places:
            answer = await client.post("/v1/completions", json=body, headers={"traceparent": trace})
        return int(answer.json()["usage"]["completion_tokens"])

    before, bytes_before, began = cpu_seconds([pid]), _Collector.num_bytes, monotonic()
    num_tokens = sum(await asyncio.gather(*(ask() for _ in range(options.answers))))
    taken_s = monotonic() - began
    await asyncio.sleep(_SETTLED_S)
    by_kind = spent(before, cpu_seconds([pid]))
    return {
        "cpu_s": round(sum(by_kind.values()), 3),
        "gateway_cpu_s": by_kind.get("gateways", 0.0),
        "tokens_per_s": round(num_tokens / taken_s, 1),
        "exported_bytes": _Collector.num_bytes - bytes_before,
    }


async def _measure(url: str, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    pairs = []
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:
        await _round(client, pid, options, is_traced=True)
        for number in range(options.rounds):
            order = (False, True) if number % 2 else (True, False)
            rounds = {is_traced: await _round(client, pid, options, is_traced=is_traced) for is_traced in order}
            pairs.append(rounds)
            print(rounds, flush=True)
    ratios = {
        name: [round(pair[True][name] / pair[False][name], 4) for pair in pairs]
        for name in ("cpu_s", "gateway_cpu_s", "tokens_per_s")
    }
    return {
        "answers": options.answers,
        "tokens": options.tokens,
        "ratio_traced_over_not": {name: round(statistics.median(values), 4) for name, values in ratios.items()},
        "ratios": ratios,
        "pairs": [{"traced": pair[True], "not_traced": pair[False]} for pair in pairs],
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="pairs")
    parser.add_argument("--answers", type=int, default=96, help="of a round")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    options = parser.parse_args()
    with collector() as endpoint, tempfile.TemporaryDirectory(prefix="traces-") as name:
        settings = ("batches.enabled=false", f"tracing.endpoint={endpoint}", "tracing.sample_ratio=0")
        cluster = KillCluster(Path(name), ("pocket", *(word for one in settings for word in ("--set", one))))
        cluster.start()
        try:
            figures = asyncio.run(_measure(cluster.url, cluster.pid, options))
        finally:
            cluster.stop()
    print(figures["ratio_traced_over_not"])
    write_result("trace_cost", figures)


if __name__ == "__main__":
    main()
