"""A worker with 32 requests is killed, and a standby takes over: how soon does each answer go on?

    python -m benchmarks.prefix_cache.standby_takeover [--losses 3] [--requests 32] [--prompt 512]

A server of the 125M OPT shape with two colocated workers (requests do not move by themselves), and the pool of the
node for prefix blocks, or without any prefix cache. One worker is stopped until the router has given it up, so that
the other gets all requests; when all answer, the first comes back, with nothing in its memory, and the other gets
SIGKILL. The time is from the blow to the token that ends the longest gap after it, for each request: one or two tokens
may have been on their way to the client.
Target: within 1 s for all, with the prefix cache.
"""

import argparse
import asyncio
import random
import signal
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from alignedserve.loadgen.client import CompletionApi, CompletionCall, CompletionOutcome, OpenAiClient
from benchmarks.batches.kills import kill_cluster
from benchmarks.scheduling.live_policies import make_model
from benchmarks.serving.worker_loss import num_blocks, restored, settled_blocks
from benchmarks.support.kill_cluster import KillCluster
from benchmarks.support.kill_schedules import Target
from benchmarks.support.recording import write_result

SYSTEMS = {
    "without": ("prefix_cache.enabled=false",),
    "with a pool": ("prefix_cache.host_bytes=3GiB",),
}
_SETTINGS = (
    "topology=colocated",
    "decode.count=2",
    "engine.threads_per_worker=2",
    "decode.kv_cache_bytes=3GiB",
    "decode.max_running_requests=64",
    "model.max_context_len=1024",
    "links.peer_timeout_s=2.0",
    "batches.enabled=false",
)
_FLOWING = 8  # tokens that every stream has before the blow
_FIRST_TOKEN_ID = 100
_SETTLE_S = 2.0
_PATIENCE_S = 120.0


def calls(count: int, prompt_len: int, seed: int) -> list[CompletionCall]:
    """Return completions of prompts that have nothing in common."""
    rng = random.Random(seed)
    fields = {"model": "opt-125m", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    prompts = [[rng.randrange(_FIRST_TOKEN_ID, 40_000) for _ in range(prompt_len)] for _ in range(count)]
    return [CompletionCall(CompletionApi.COMPLETIONS, {"prompt": prompt, **fields}) for prompt in prompts]


async def take_over(cluster: KillCluster, client: OpenAiClient, asked: list[CompletionCall], whole: int) -> list[float]:
    """Return the seconds from the blow to each request's next token."""
    standby, victim = cluster.processes(Target.DECODE)
    standby.send_signal(signal.SIGSTOP)
    await _until(lambda blocks: blocks < whole, client)
    outcomes = [CompletionOutcome() for _ in asked]
    tasks = [asyncio.create_task(client.complete(*pair)) for pair in zip(asked, outcomes, strict=True)]
    try:
        await _all(outcomes, lambda one: len(one.token_times_s) >= _FLOWING)
        standby.send_signal(signal.SIGCONT)
        await restored(client, whole)
        await asyncio.sleep(_SETTLE_S)
        assert not any(task.done() for task in tasks), "a stream ended before the blow"
        killed_s = time.monotonic()
        victim.kill()
        await _all(outcomes, lambda one: len(_after(one, killed_s)) > _FLOWING)
    finally:
        standby.send_signal(signal.SIGCONT)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return sorted(_goes_on_s(one, killed_s) for one in outcomes)


def _after(outcome: CompletionOutcome, killed_s: float) -> list[float]:
    return [at - killed_s for at in outcome.token_times_s if at > killed_s]


def _goes_on_s(outcome: CompletionOutcome, killed_s: float) -> float:
    """Return when the longest gap after the blow ended; tokens that were on their way came before it."""
    times = [0.0, *_after(outcome, killed_s)]
    return max(pairwise(times), key=lambda gap: gap[1] - gap[0])[1]


async def _all(outcomes: list[CompletionOutcome], is_true: Any) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not all(map(is_true, outcomes)):
        if time.monotonic() > deadline_s:
            raise TimeoutError("the answers do not flow")
        await asyncio.sleep(0.02)


async def _until(is_true: Any, client: OpenAiClient) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not is_true(await num_blocks(client)):
        if time.monotonic() > deadline_s:
            raise TimeoutError("the router has not noticed")
        await asyncio.sleep(0.1)


async def measure(cluster: KillCluster, options: argparse.Namespace) -> dict[str, Any]:
    """Return what the losses of one system did."""
    rows = []
    async with OpenAiClient(url=cluster.url) as client:
        whole = await settled_blocks(client)
        for seed in range(options.losses):
            times = await take_over(cluster, client, calls(options.requests, options.prompt, seed), whole)
            rows.append({"median_s": round(statistics.median(times), 3), "last_s": round(times[-1], 3)})
            print(rows[-1], flush=True)
            await asyncio.sleep(_SETTLE_S)  # until the router tells that it has one worker less
            await restored(client, whole)
            await asyncio.sleep(_SETTLE_S)
    return {
        "median_s": statistics.median(row["median_s"] for row in rows),
        "last_s": statistics.median(row["last_s"] for row in rows),
        "losses": rows,
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    options = parser.parse_args()
    figures: dict[str, Any] = {"requests": options.requests, "prompt_tokens": options.prompt, "settings": _SETTINGS}
    with tempfile.TemporaryDirectory(prefix="standby-") as name:
        folder = Path(name) / "opt-125m"
        make_model(folder)
        for system in options.system:
            more = (
                f"model.path={folder}",
                "model.random_weights=true",
                "model.dtype=bfloat16",
                *_SETTINGS,
                *SYSTEMS[system],
            )
            settings = tuple(part for setting in more for part in ("--set", setting))
            print(system, flush=True)
            run = Path(name) / system.replace(" ", "-")
            run.mkdir()
            with kill_cluster(run, settings) as cluster:
                figures[system] = asyncio.run(measure(cluster, options))
    print(write_result("standby_takeover", figures))


if __name__ == "__main__":
    main()
