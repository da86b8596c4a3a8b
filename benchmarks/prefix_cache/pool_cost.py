"""The cost of keeping every block in the pool of the node, where no prompt begins like another.

    python -m benchmarks.prefix_cache.pool_cost [--rounds 6] [--requests 16]

Two servers of the 125M OPT shape with one worker each, one with a pool for prefix blocks and one without; both have the
worker's own prefix cache. They get the same rounds of requests in turn, each round with prompts of its own, 256 tokens
in and 64 out: while one works the other waits. Target: under 1 % of throughput.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from alignedserve.loadgen.client import CompletionApi, CompletionCall, CompletionOutcome, OpenAiClient
from benchmarks.scheduling.live_policies import make_model, served
from benchmarks.support.recording import write_result

_SETTINGS = ("decode.count=1", "batches.enabled=false", "model.max_context_len=1024", "decode.kv_cache_bytes=1GiB")
SYSTEMS = {"without": "prefix_cache.host_bytes=0", "with a pool": "prefix_cache.host_bytes=2GiB"}
_PROMPT_LEN, _OUTPUT_LEN = 256, 64
_FIRST_TOKEN_ID, _NUM_TOKEN_IDS = 100, 40_000


async def round_s(client: OpenAiClient, model: str, rng: random.Random, count: int) -> float:
    """Return the seconds that new requests, sent together, take until all have ended."""
    fields = {"model": model, "max_tokens": _OUTPUT_LEN, "temperature": 0, "ignore_eos": True}
    prompts = [[rng.randrange(_FIRST_TOKEN_ID, _NUM_TOKEN_IDS) for _ in range(_PROMPT_LEN)] for _ in range(count)]
    asked = [CompletionCall(CompletionApi.COMPLETIONS, {"prompt": prompt, **fields}) for prompt in prompts]
    outcomes = [CompletionOutcome() for _ in asked]
    began_s = time.perf_counter()
    await asyncio.gather(*(client.complete(*pair) for pair in zip(asked, outcomes, strict=True)))
    assert all(one.failure is None for one in outcomes), "a request failed"
    return time.perf_counter() - began_s


async def measure(ports: dict[str, int], rounds: int, count: int) -> dict[str, list[float]]:
    """Return the seconds of every round by system, the first of each left out."""
    taken: dict[str, list[float]] = {name: [] for name in ports}
    rng = random.Random(1)
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(OpenAiClient(url=f"http://127.0.0.1:{port}", timeout_s=120.0))
            for name, port in ports.items()
        }
        model = await next(iter(clients.values())).model_name()
        for number in range(rounds + 1):
            order = list(clients) if number % 2 else list(clients)[::-1]
            for name in order:
                taken[name].append(await round_s(clients[name], model, rng, count))
            print({name: round(times[-1], 3) for name, times in taken.items()}, flush=True)
    return {name: times[1:] for name, times in taken.items()}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name) / "opt-125m"
        make_model(folder)
        ports = {
            system: stack.enter_context(served(folder, "aligned_slo", "colocated", more_settings=(*_SETTINGS, setting)))
            for system, setting in SYSTEMS.items()
        }
        taken = asyncio.run(measure(ports, options.rounds, options.requests))
    pairs = zip(taken["with a pool"], taken["without"], strict=True)
    figures: dict[str, Any] = {
        "requests": options.requests,
        "prompt_tokens": _PROMPT_LEN,
        "output_tokens": _OUTPUT_LEN,
        "rounds_s": {name: [round(one, 4) for one in times] for name, times in taken.items()},
        "ratio": round(statistics.median(pooled / alone for pooled, alone in pairs), 4),
    }
    print(figures["ratio"], write_result("prefix_pool_cost", figures))


if __name__ == "__main__":
    main()
