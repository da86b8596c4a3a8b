"""Output tokens per second of three workers, on three hosts of namespaces and on one: what links between hosts cost.

python -m benchmarks.serving.hosts_throughput   # as root; target: three hosts reach 80 % of one

The workers, their threads, the gateways and the clients are as many in both, and the cores are the same.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignedserve.evaluation.cluster_demo import clear_former
from alignedserve.evaluation.namespace_hosts import NamespaceHosts
from alignedserve.evaluation.rehearsal import SETTINGS, Rehearsal
from alignedserve.loadgen.client import CompletionApi, CompletionCall, CompletionOutcome, OpenAiClient
from benchmarks.support.recording import write_result

_NUM_WORKERS = 3
_NUM_TOKENS = 128
_WARM_UP_S = 5.0
_ONE_HOST = (f"decode.count={_NUM_WORKERS}", f"gateway.count={_NUM_WORKERS}")
_CALL = CompletionCall(
    CompletionApi.CHAT,
    {
        "model": "pocket",
        "messages": [{"role": "user", "content": "spell otter"}],
        "temperature": 0,
        "max_tokens": _NUM_TOKENS,
        "ignore_eos": True,
    },
)


async def tokens_per_second(clients: Sequence[OpenAiClient], num_streams: int, duration_s: float) -> float:
    """Return the output tokens that arrive per second while so many streams are open at each gateway."""
    begin_s = time.perf_counter() + _WARM_UP_S
    end_s = begin_s + duration_s
    outcomes: list[CompletionOutcome] = []

    async def ask(client: OpenAiClient) -> None:
        while time.perf_counter() < end_s:
            outcomes.append(CompletionOutcome())
            await client.complete(_CALL, outcomes[-1])
            if (failure := outcomes[-1].failure) is not None:
                raise RuntimeError(f"a request failed: {failure.label}: {failure.message}")

    for client in clients:
        await client.__aenter__()
    try:
        await asyncio.gather(*(ask(client) for client in clients for _ in range(num_streams)))
    finally:
        for client in clients:
            await client.__aexit__(None, None, None)
    return sum(begin_s <= at < end_s for outcome in outcomes for at in outcome.token_times_s) / duration_s


def measure(base: Path, num_hosts: int, options: argparse.Namespace) -> dict[str, Any]:
    """Start the cluster on so many hosts and return its throughputs, one per round."""
    clear_former(base)
    hosts = NamespaceHosts(num_hosts, base, [Path(entry) for entry in sys.path if Path(entry).is_dir()])
    rehearsal = Rehearsal(hosts, (*SETTINGS, *(_ONE_HOST if num_hosts == 1 else ())))
    rehearsal.prepare()
    with hosts:
        rehearsal.up()
        nodes = rehearsal.status()["nodes"]
        urls = [url for node in nodes for url in node["urls"]]
        rounds = [
            asyncio.run(
                tokens_per_second(
                    [OpenAiClient(url=url, api_key=rehearsal.api_key) for url in urls],
                    options.streams,
                    options.duration,
                )
            )
            for _ in range(options.rounds)
        ]
        rehearsal.ray("down")
    print(f"{num_hosts} hosts, {len(urls)} gateways: {[round(one) for one in rounds]} tokens/s", flush=True)
    return {"num_hosts": num_hosts, "actors": [node["actors"] for node in nodes], "tokens_per_s": rounds}


def main() -> None:
    """Measure three hosts, one host, and three hosts again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=Path("/run/alignedserve-throughput"))
    parser.add_argument("--streams", type=int, default=8, help="at each gateway")
    parser.add_argument("--duration", type=float, default=10.0, help="seconds of a round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found = [measure(options.base, num_hosts, options) for num_hosts in (_NUM_WORKERS, 1, _NUM_WORKERS)]
    several, one, again = (one["tokens_per_s"] for one in found)
    ratio = statistics.median([*several, *again]) / statistics.median(one)
    print(f"three hosts reach {100 * ratio:.0f} % of one")
    print(write_result("hosts_throughput", {"streams": options.streams, "runs": found, "ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
