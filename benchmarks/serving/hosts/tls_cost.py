"""Cost of TLS between nodes for a cluster in which every request's KV and every message cross them.

python -m benchmarks.serving.hosts.tls_cost      # target: less than 5 % of the throughput

Two clusters of two nodes each run in one process, one with TLS and one in clear, and take turns with the same requests.
The pocket model, whose requests are short and whose iterations are quick: larger models have less to encrypt per second
of computing.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

from alignedserve.config.sections import (
    ClusterConfig,
    DecodeWorkerConfig,
    EngineConfig,
    PoolConfig,
    PrefillWorkerConfig,
    Topology,
)
from alignedserve.core.request import SamplingParams
from benchmarks.support.recording import write_result
from tests.support.in_process import RoomCluster
from tests.support.two_nodes import start_two_nodes

_MIB = 1024 * 1024


def config_of() -> ClusterConfig:
    """Return small sizes for the pocket model."""
    return ClusterConfig(
        topology=Topology.DISAGGREGATED,
        engine=EngineConfig(block_size=16, threads_per_worker=1),
        pool=PoolConfig(memory_bytes=128 * _MIB),
        prefill=PrefillWorkerConfig(kv_cache_bytes=64 * _MIB, candidate_buffer_bytes=32 * _MIB),
        decode=DecodeWorkerConfig(kv_cache_bytes=64 * _MIB, max_running_requests=32),
    )


async def round_s(cluster: RoomCluster, prompts: list[list[int]], sampling: SamplingParams) -> float:
    """Return the time of all requests together."""
    began_s = time.perf_counter()
    answers = await asyncio.gather(*(cluster.gateway.generate(one, sampling, timeout_s=120.0) for one in prompts))
    assert all(len(answer.token_ids) == sampling.max_tokens for answer in answers), "an answer was cut short"
    return time.perf_counter() - began_s


async def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the figures."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 200) for _ in range(arguments.prompt)] for _ in range(arguments.requests)]
    sampling = SamplingParams(max_tokens=arguments.tokens, temperature=0.0, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        clusters = {
            kind: await start_two_nodes(config_of(), Path(folder) / kind, has_tls=kind == "tls")
            for kind in ("tls", "clear")
        }
        try:
            rounds = []
            for number in range(arguments.rounds + 1):
                order = list(clusters) if number % 2 else list(clusters)[::-1]
                taken = {kind: await round_s(clusters[kind], prompts, sampling) for kind in order}
                rounds.append(taken)
        finally:
            for cluster in clusters.values():
                await cluster.close()
    seen = rounds[1:]  # the first warms up
    tokens = arguments.requests * arguments.tokens
    return {
        "requests": arguments.requests,
        "prompt_tokens": arguments.prompt,
        "output_tokens": arguments.tokens,
        "rounds": len(seen),
        **{f"{kind}_tokens_per_s": round(tokens / statistics.median(one[kind] for one in seen)) for kind in clusters},
        "share_of_throughput": round(statistics.median(one["clear"] / one["tls"] for one in seen), 4),
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    figures = asyncio.run(measure(parser.parse_args()))
    print(figures)
    write_result("tls_cost", figures)


if __name__ == "__main__":
    main()
