"""Output tokens per second of three workers, on three hosts of namespaces and on one: what links between hosts cost.

python -m benchmarks.serving.hosts.hosts_throughput   # as root; target: three hosts reach 80 % of one

The workers, their threads, the gateways and the clients are as many in both, and the cores are the same. Tokens are the
server's count of each answer: where the cores are busy, several tokens of a stream come as one chunk.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alignedserve.loadgen.client import CompletionApi, CompletionCall, CompletionOutcome, OpenAiClient
from benchmarks.support.process_cpu import cpu_seconds, spent
from benchmarks.support.recording import write_result
from tests.harnesses.hosts.cluster_demo import clear_former
from tests.harnesses.hosts.namespace_hosts import NamespaceHosts
from tests.harnesses.hosts.rehearsal import SETTINGS, Rehearsal

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


@dataclass(frozen=True, slots=True)
class Round:
    """Figures of one round."""

    tokens_per_s: float
    chunks_per_s: float  # that clients got: no more than the tokens
    cpu_ms_per_token: dict[str, float]  # by what a process does


class Load:
    """Streams, so many at each gateway, one request after the other, and the CPU time of the hosts' processes."""

    def __init__(self, clients: Sequence[OpenAiClient], hosts: NamespaceHosts) -> None:
        self._clients = clients
        self._roots = [host.process.pid for host in hosts.hosts if host.process is not None]
        self._outcomes: list[CompletionOutcome] = []
        self._is_over = False

    async def measure(self, num_streams: int, duration_s: float) -> Round:
        """Return what came of so many seconds, after a warm-up."""
        async with contextlib.AsyncExitStack() as stack:
            for client in self._clients:
                await stack.enter_async_context(client)
            streams = [asyncio.ensure_future(self._ask(client)) for client in self._clients for _ in range(num_streams)]
            await asyncio.sleep(_WARM_UP_S)
            begin_s, before = time.monotonic(), await self._cpu_seconds()
            await asyncio.sleep(duration_s)
            end_s, after = time.monotonic(), await self._cpu_seconds()
            self._is_over = True
            await asyncio.gather(*streams)
        num_tokens = sum(tokens_between(outcome, begin_s, end_s) for outcome in self._outcomes)
        num_chunks = sum(begin_s <= at < end_s for outcome in self._outcomes for at in outcome.token_times_s)
        taken_s = end_s - begin_s
        cpu = {kind: round(1000 * seconds / num_tokens, 4) for kind, seconds in spent(before, after).items()}
        return Round(round(num_tokens / taken_s, 1), round(num_chunks / taken_s, 1), cpu)

    async def _ask(self, client: OpenAiClient) -> None:
        while not self._is_over:
            self._outcomes.append(CompletionOutcome())
            await client.complete(_CALL, self._outcomes[-1])
            if (failure := self._outcomes[-1].failure) is not None:
                raise RuntimeError(f"a request failed: {failure.label}: {failure.message}")

    async def _cpu_seconds(self) -> Mapping[tuple[int, str], float]:
        found = await asyncio.to_thread(cpu_seconds, self._roots)
        return {**found, (0, "clients"): sum(os.times()[:2])}


def tokens_between(outcome: CompletionOutcome, begin_s: float, end_s: float) -> float:
    """Return the tokens of an answer that came between two times, as if all had come evenly from the first one on."""
    first_s, last_s = outcome.token_times_s[0], outcome.ended_s
    shared_s = min(last_s, end_s) - max(first_s, begin_s)
    return outcome.num_tokens * max(shared_s, 0.0) / (last_s - first_s)


def measure(base: Path, num_hosts: int, options: argparse.Namespace) -> dict[str, Any]:
    """Start the cluster on so many hosts and return its figures, by round."""
    clear_former(base)
    hosts = NamespaceHosts(num_hosts, base, [Path(entry) for entry in sys.path if Path(entry).is_dir()])
    rehearsal = Rehearsal(hosts, (*SETTINGS, *(_ONE_HOST if num_hosts == 1 else ()), *options.set))
    rehearsal.prepare()
    with hosts:
        rehearsal.up()
        nodes = rehearsal.status()["nodes"]
        urls = [url for node in nodes for url in node["urls"]]
        rounds: list[Round] = []
        for _ in range(options.rounds):
            clients = [OpenAiClient(url=url, api_key=rehearsal.api_key) for url in urls]
            rounds.append(asyncio.run(Load(clients, hosts).measure(options.streams, options.duration)))
            print(f"{num_hosts} hosts, {len(urls)} gateways: {rounds[-1]}", flush=True)
        near = round(near_share(rehearsal, nodes), 3) if num_hosts > 1 else 1.0
    return {
        "num_hosts": num_hosts,
        "actors": [node["actors"] for node in nodes],
        "answered_near": near,
        "rounds": list(map(asdict, rounds)),
    }


def near_share(rehearsal: Rehearsal, nodes: Sequence[dict[str, Any]]) -> float:
    """Return the share of answers that came from a worker on the host of their gateway."""
    workers = {node["hostname"]: node["actors"] for node in nodes}
    found = [(host, rehearsal.num_answers(index)) for index, host in enumerate(rehearsal.hosts.hosts)]
    num_near = sum(count for host, counts in found for name, count in counts.items() if name in workers[host.name])
    return num_near / sum(sum(counts.values()) for _, counts in found)


def median_of(runs: Sequence[dict[str, Any]], num_hosts: int) -> dict[str, Any]:
    """Return the medians over all rounds on so many hosts."""
    rounds = [one for run in runs if run["num_hosts"] == num_hosts for one in run["rounds"]]
    kinds = sorted({kind for one in rounds for kind in one["cpu_ms_per_token"]})
    cpu = {kind: statistics.median(one["cpu_ms_per_token"].get(kind, 0.0) for one in rounds) for kind in kinds}
    return {
        "tokens_per_s": statistics.median(one["tokens_per_s"] for one in rounds),
        "answered_near": statistics.median(run["answered_near"] for run in runs if run["num_hosts"] == num_hosts),
        "chunks_per_s": statistics.median(one["chunks_per_s"] for one in rounds),
        "cpu_ms_per_token": cpu,
        "cpu_ms_per_token_in_all": round(sum(cpu.values()), 3),
    }


def main() -> None:
    """Measure three hosts, one host, and three hosts again; or what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=Path("/run/alignedserve-throughput"))
    parser.add_argument("--streams", type=int, default=8, help="at each gateway")
    parser.add_argument("--duration", type=float, default=10.0, help="seconds of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hosts", type=int, nargs="+", default=[_NUM_WORKERS, 1, _NUM_WORKERS], metavar="N")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--name", default="hosts_throughput")
    options = parser.parse_args()
    runs = [measure(options.base, num_hosts, options) for num_hosts in options.hosts]
    medians = {str(num_hosts): median_of(runs, num_hosts) for num_hosts in sorted(set(options.hosts))}
    figures = {"streams": options.streams, "medians": medians, "runs": runs}
    if {1, _NUM_WORKERS} <= set(options.hosts):
        ratio = medians[str(_NUM_WORKERS)]["tokens_per_s"] / medians["1"]["tokens_per_s"]
        figures["ratio"] = round(ratio, 3)
        print(f"three hosts reach {100 * ratio:.0f} % of one")
    print(write_result(options.name, figures))


if __name__ == "__main__":
    main()
