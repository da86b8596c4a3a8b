"""The router is killed while its model streams: do streams pause, and is any request lost?

    python -m benchmarks.serving.router_loss --rounds 3

Eight streams of the pocket model flow when the router gets SIGKILL; while the next one starts, short requests come at a
fixed rate. A pause is the longest time between two tokens of a stream after the blow, beside the longest in as much
time before it. Targets: no request refused or cut; no pause above 0.2 s, as streams need no router; and no pause above
what the cores allow, which the start of a process of Python takes as well.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from alignedserve.loadgen.client import CompletionOutcome, OpenAiClient
from benchmarks.serving.worker_loss import calls
from benchmarks.support.kill_cluster import KillCluster
from benchmarks.support.kill_schedules import Target
from benchmarks.support.recording import write_result

_COMMON = ("model.dtype=float32", "batches.enabled=false")
_SHAPES = {"elastic": ("decode.count=2",), "separate": ("topology=disaggregated",)}
_SETTLED_S = 3.0
_RATE = 4.0  # requests per second that come while there is no router
_SHORT_TOKENS = 16


async def measure(cluster: KillCluster, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the row of every loss."""
    rows: list[dict[str, Any]] = []
    async with OpenAiClient(url=cluster.url) as client:
        for number in range(options.rounds):
            rows.append(await _one_round(client, cluster, options, number))
            print(rows[-1], flush=True)
    return rows


async def _one_round(
    client: OpenAiClient, cluster: KillCluster, options: argparse.Namespace, number: int
) -> dict[str, Any]:
    streams = calls(options.tokens, seed=number)
    shorts = [call for seed in range(20) for call in calls(_SHORT_TOKENS, seed=1000 + 20 * number + seed)]
    outcomes = [CompletionOutcome() for _ in streams]
    flowing = asyncio.Event()

    def on_text(*_: object) -> None:
        if all(one.token_times_s for one in outcomes):
            flowing.set()

    tasks = [asyncio.create_task(client.complete(*pair, on_text)) for pair in zip(streams, outcomes, strict=True)]
    await flowing.wait()
    await asyncio.sleep(_SETTLED_S)
    assert not any(task.done() for task in tasks), "a stream ended before the blow: more --tokens are needed"
    victim = cluster.processes(Target.ROUTER)[-1]
    killed_s = time.monotonic()
    victim.kill()
    short_outcomes: list[CompletionOutcome] = []
    short_tasks = []
    for call in shorts[: int(_RATE * options.seconds)]:
        short_outcomes.append(CompletionOutcome())
        short_tasks.append(asyncio.create_task(client.complete(call, short_outcomes[-1])))
        await asyncio.sleep(1 / _RATE)
    await asyncio.gather(*tasks, *short_tasks)
    back_s = min(one.token_times_s[0] for one in short_outcomes if one.token_times_s)
    pauses = [_longest_gap_s(one, killed_s, killed_s + options.seconds) for one in outcomes]
    return {
        "pause_max_s": round(max(pauses), 3),
        "pause_p50_s": round(statistics.median(pauses), 3),
        "gap_max_before_s": round(max(_longest_gap_s(one, killed_s - _SETTLED_S, killed_s) for one in outcomes), 3),
        "router_back_s": round(back_s - killed_s, 2),  # to the first token of a request that came after the blow
        "streams_that_outlasted_it": sum(one.token_times_s[-1] > back_s + 1.0 for one in outcomes),
        "streams_cut": sum(one.failure is not None or one.num_tokens != options.tokens for one in outcomes),
        "requests": len(short_outcomes),
        "requests_lost": sum(one.failure is not None for one in short_outcomes),
        "ttft_max_s": round(max(one.token_times_s[0] - one.sent_s for one in short_outcomes if one.token_times_s), 2),
    }


def _longest_gap_s(outcome: CompletionOutcome, after_s: float, until_s: float) -> float:
    pairs = itertools.pairwise(outcome.token_times_s)
    return max((later - earlier for earlier, later in pairs if later > after_s and earlier < until_s), default=0.0)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1500, help="of each stream: they have to outlast the loss")
    parser.add_argument("--seconds", type=float, default=10.0, help="for which requests come after the blow")
    parser.add_argument("--shape", choices=sorted(_SHAPES), default="elastic")
    parser.add_argument("--loaded", action="store_true", help="note that other programs used the cores")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="router-loss-") as name:
        settings = (*_COMMON, *_SHAPES[options.shape])
        cluster = KillCluster(Path(name), ("pocket", *(word for one in settings for word in ("--set", one))))
        cluster.start()
        try:
            rounds = asyncio.run(measure(cluster, options))
        finally:
            cluster.stop()
    figures = {
        "shape": options.shape,
        "rounds": rounds,
        "pause_max_s": max(one["pause_max_s"] for one in rounds),
        "requests_lost": sum(one["requests_lost"] for one in rounds),
        "cores_were_loaded": options.loaded,
    }
    print(figures)
    print(write_result(f"router_loss_{options.shape}", figures))


if __name__ == "__main__":
    main()
