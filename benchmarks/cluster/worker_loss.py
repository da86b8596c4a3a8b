"""A worker is killed while it streams: how long do its answers pause, and are they what they would have been?

    python -m benchmarks.cluster.worker_loss                    # two elastic workers, the other takes over
    python -m benchmarks.cluster.worker_loss --shape separate-2 # two prefill and two decode workers, one is lost
    python -m benchmarks.cluster.worker_loss --shape separate   # one of each: nobody can take over
    python -m benchmarks.cluster.worker_loss --shape separate --target pool  # or "prefill worker"
    python -m benchmarks.cluster.worker_loss --shape lone --new-chat         # nothing streams; a request comes after it

Eight streams of the pocket model, in float32, so that a token does not depend on its batch. When all flow, the latest
worker that decodes gets SIGKILL. A pause is the longest time between two tokens of a stream after that; the streams of
a worker are told apart by it, as half of them are on each of two. Targets: no pause of 1 s or more with another
worker alive, none of 2 s without; no answer changed or cut.

With `--new-chat` nothing streams when the process is killed. A request is sent right after it: the pause is its wait
for the first token, or between two tokens where that is longer.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from alignedserve.client.openai_client import CompletionApi, CompletionCall, CompletionOutcome, OpenAiClient
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.kill_cluster import KillCluster, kill_cluster
from benchmarks.measuring.kill_schedules import Target
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.server import options_of

SHAPES = {
    "lone": ("decode.count=1",),
    "elastic": ("decode.count=2",),
    "colocated": ("topology=colocated", "decode.count=2"),
    "separate": ("topology=disaggregated",),
    "separate-2": ("topology=disaggregated", "prefill.count=2", "decode.count=2"),
}
_COMMON = ("model.dtype=float32", "batches.enabled=false")
_NUM_STREAMS = 8
_WORDS = 60  # of a prompt
_FLOWING = 20  # tokens that every stream has before the blow
_SETTLED_S, _BACK_S = 4.0, 90.0


def calls(model: str, max_tokens: int, seed: int) -> list[CompletionCall]:
    rng = random.Random(seed)
    prompts = [" ".join(f"{rng.randrange(1000)}" for _ in range(_WORDS)) for _ in range(_NUM_STREAMS)]
    fields = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return [CompletionCall(CompletionApi.COMPLETIONS, {"prompt": prompt, **fields}) for prompt in prompts]


async def stream_all(
    client: OpenAiClient,
    asked: list[CompletionCall],
    cluster: KillCluster | None = None,
    target: Target = Target.DECODE,
) -> tuple[list[CompletionOutcome], float]:
    """Stream all at once; with a `cluster` kill one of its workers meanwhile. Return when that was, too."""
    outcomes, flowing = [CompletionOutcome() for _ in asked], asyncio.Event()

    def on_text(*_: object) -> None:
        if min(len(one.token_times_s) for one in outcomes) >= _FLOWING:
            flowing.set()

    tasks = [asyncio.create_task(client.complete(*pair, on_text)) for pair in zip(asked, outcomes, strict=True)]
    killed_s = time.monotonic()
    if cluster is not None:
        await flowing.wait()
        victim = cluster.processes(target)[-1]
        assert not any(task.done() for task in tasks), "a stream ended before the blow: more --tokens are needed"
        killed_s = time.monotonic()
        victim.kill()
    await asyncio.gather(*tasks)
    return outcomes, killed_s


async def ask_after_loss(
    client: OpenAiClient, call: CompletionCall, cluster: KillCluster, target: Target
) -> tuple[CompletionOutcome, float]:
    """Kill a process while nothing runs, then ask. Return when it was killed, too."""
    victim, outcome = cluster.processes(target)[-1], CompletionOutcome()
    killed_s = time.monotonic()
    victim.kill()
    await client.complete(call, outcome, lambda *_: None)
    return outcome, killed_s


def pause_s(outcome: CompletionOutcome, killed_s: float) -> float:
    """Return the longest time between two tokens that ended after the blow."""
    times = outcome.token_times_s
    if times and times[0] > killed_s:
        times = [killed_s, *times]  # it was asked after the blow
    gaps = [later - earlier for earlier, later in itertools.pairwise(times) if later > killed_s]
    return max(gaps, default=0.0)


async def measure(cluster: KillCluster, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    async with OpenAiClient(url=cluster.url) as client:
        whole = await settled_blocks(client)
        for number in range(options.losses):
            asked = calls(options.model, options.tokens, number)
            expected, began_s = await stream_all(client, asked)
            if options.new_chat:
                outcome, killed_s = await ask_after_loss(client, asked[0], cluster, options.target)
                outcomes, expected = [outcome], expected[:1]
            else:
                outcomes, killed_s = await stream_all(client, asked, cluster, options.target)
            rows.append(_row(outcomes, killed_s, expected, began_s))
            print(rows[-1], flush=True)
            await restored(client, whole)
    return rows


def _row(
    outcomes: list[CompletionOutcome], killed_s: float, expected: list[CompletionOutcome], began_s: float
) -> dict[str, Any]:
    pauses = sorted(round(pause_s(one, killed_s), 3) for one in outcomes)
    pairs = zip(outcomes, expected, strict=True)
    return {
        "pauses_s": pauses,
        "longest_s": pauses[-1],
        "longest_undisturbed_s": round(max(pause_s(one, began_s) for one in expected), 3),
        "num_failed": sum(one.failure is not None for one in outcomes),
        "num_changed": sum(one.text != other.text for one, other in pairs),
    }


async def settled_blocks(client: OpenAiClient) -> int:
    """Return the blocks of all workers, once none has registered for a while."""
    seen, since_s = 0, time.monotonic()
    while not seen or time.monotonic() - since_s < _SETTLED_S:
        if (found := await num_blocks(client)) != seen:
            seen, since_s = found, time.monotonic()
        await asyncio.sleep(0.2)
    return seen


async def restored(client: OpenAiClient, whole: int) -> None:
    deadline_s = time.monotonic() + _BACK_S
    while await num_blocks(client) < whole:
        if time.monotonic() > deadline_s:
            raise TimeoutError("the worker was not back in time")
        await asyncio.sleep(0.2)


async def num_blocks(client: OpenAiClient) -> int:
    page = (await client.get("/metrics")).decode()
    return sum(
        int(float(line.split()[1])) for line in page.splitlines() if line.startswith("alignedserve_worker_blocks{")
    )


def main() -> None:
    """Measure, print and record."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="elastic")
    targets = {one.value: one for one in (Target.DECODE, Target.PREFILL, Target.POOL)}
    parser.add_argument("--target", type=targets.__getitem__, default=Target.DECODE, help=", ".join(targets))
    parser.add_argument("--model", default="pocket", help="what is served, by its short name")
    parser.add_argument("--new-chat", action="store_true", help="kill an idle process, then ask")
    parser.add_argument("--losses", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=600)
    options = parser.parse_args()
    settings = options_of((*_COMMON, *SHAPES[options.shape]))
    with (
        tempfile.TemporaryDirectory(prefix="loss-") as name,
        kill_cluster(Path(name), (options.model, *settings)) as cluster,
    ):
        rows = asyncio.run(measure(cluster, options))
    longest = [row["longest_s"] for row in rows]
    figures = {
        "model": options.model,
        "settings": settings,
        "num_streams": 1 if options.new_chat else _NUM_STREAMS,
        "median_longest_pause_s": statistics.median(longest),
        "longest_pause_s": max(longest),
        "num_failed": sum(row["num_failed"] for row in rows),
        "num_changed": sum(row["num_changed"] for row in rows),
        "losses": rows,
    }
    parts = [options.shape]
    if options.new_chat:
        parts += [options.target.value.replace(" ", "_"), "new_chat", options.model]
    print(write_result(f"faults/worker_loss_{'_'.join(parts)}", figures))


if __name__ == "__main__":
    main()
