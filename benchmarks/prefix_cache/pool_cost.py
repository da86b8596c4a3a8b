"""The cost of keeping every block in the pool of the node, where no prompt begins like another.

    python -m benchmarks.prefix_cache.pool_cost [--rounds 6] [--requests 16]

Two servers of the 125M OPT shape with one worker each, one with a pool for prefix blocks and one without; both have the
worker's own prefix cache. They get the same rounds of requests in turn, each round with prompts of its own, 256 tokens
in and 64 out: while one works the other waits. Target: under 1 % of throughput.

`ratio` is of the rounds' times, in the median of pairs: on a machine that does other things as well it says little.
`added_share` is the processor time of the worker's threads beside its engine and of the pool's, with a pool less
without, by that of the whole server: what the engine loses where it has every core. `idle_share` is what the main
thread of the pool's process takes of the cores' time, as that of every process of Ray's does, busy or idle.
"""

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from alignedserve.loadgen.client import CompletionApi, CompletionCall, CompletionOutcome, OpenAiClient
from benchmarks.scheduling.live_policies import make_model, served
from benchmarks.support.process_cpu import kind_of
from benchmarks.support.recording import write_result

_SETTINGS = ("decode.count=1", "batches.enabled=false", "model.max_context_len=1024", "decode.kv_cache_bytes=1GiB")
WITHOUT, WITH = "without", "with a pool"
SYSTEMS = {WITHOUT: "prefix_cache.host_bytes=0", WITH: "prefix_cache.host_bytes=2GiB"}
_PROMPT_LEN, _OUTPUT_LEN = 256, 64
_FIRST_TOKEN_ID, _NUM_TOKEN_IDS = 100, 40_000


class ThreadName(NamedTuple):
    """A thread of a server."""

    kind: str  # of its process
    pid: int
    thread_id: int


class Server(NamedTuple):
    """A server that runs."""

    port: int
    pid: int


ThreadTimes = dict[ThreadName, float]  # processor seconds


class Rounds(NamedTuple):
    """What the rounds of one system took, the first left out."""

    seconds: list[float]
    spent: ThreadTimes  # in all of them


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[dict[str, Server]]:
    """Run both systems."""
    me = psutil.Process()
    with contextlib.ExitStack() as stack:
        running: dict[str, Server] = {}
        for system, setting in SYSTEMS.items():
            before = {child.pid for child in me.children()}
            settings = (*_SETTINGS, setting)
            port = stack.enter_context(served(folder, "aligned_slo", "colocated", more_settings=settings))
            (pid,) = {child.pid for child in me.children()} - before
            running[system] = Server(port, pid)
        yield running


def thread_times(pid: int) -> ThreadTimes:
    """Return the processor seconds so far of all threads of a server."""
    times: ThreadTimes = {}
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            kind = kind_of(" ".join(process.cmdline()))
            for thread in process.threads():
                times[ThreadName(kind, process.pid, thread.id)] = thread.user_time + thread.system_time
    return times


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


async def measure(running: dict[str, Server], rounds: int, count: int) -> dict[str, Rounds]:
    """Return what the rounds took by system."""
    taken = {name: Rounds([], {}) for name in running}
    rng = random.Random(1)
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(OpenAiClient(url=f"http://127.0.0.1:{one.port}", timeout_s=120.0))
            for name, one in running.items()
        }
        model = await next(iter(clients.values())).model_name()
        for number in range(rounds + 1):
            order = list(clients) if number % 2 else list(clients)[::-1]
            for name in order:
                before = thread_times(running[name].pid)
                seconds = await round_s(clients[name], model, rng, count)
                if number:
                    _add(taken[name], seconds, before, thread_times(running[name].pid))
            print({name: round(one.seconds[-1], 3) for name, one in taken.items() if one.seconds}, flush=True)
    return taken


def _add(taken: Rounds, seconds: float, before: ThreadTimes, after: ThreadTimes) -> None:
    taken.seconds.append(seconds)
    for name, total in after.items():
        taken.spent[name] = taken.spent.get(name, 0.0) + total - before.get(name, 0.0)


def beside_engine_s(spent: ThreadTimes) -> float:
    """Return the processor seconds of the worker and the pool, without threads that compute (the busiest, one a core)
    and the pool's main thread."""
    of_worker = sorted(seconds for name, seconds in spent.items() if name.kind == "workers")
    of_pool = sum(seconds for name, seconds in spent.items() if name.kind == "pools")
    return sum(of_worker[: -(os.cpu_count() or 1)]) + of_pool - pool_process_s(spent)


def pool_process_s(spent: ThreadTimes) -> float:
    """Return the processor seconds of the pool's main thread, which waits for calls by Ray."""
    return sum(seconds for name, seconds in spent.items() if name.kind == "pools" and name.pid == name.thread_id)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "opt-125m"
        make_model(folder)
        with servers(folder) as running:
            taken = asyncio.run(measure(running, options.rounds, options.requests))
    pooled, alone = taken[WITH], taken[WITHOUT]
    whole_s = sum(alone.spent.values())
    figures: dict[str, Any] = {
        "requests": options.requests,
        "prompt_tokens": _PROMPT_LEN,
        "output_tokens": _OUTPUT_LEN,
        "rounds_s": {name: [round(second, 4) for second in one.seconds] for name, one in taken.items()},
        "ratio": round(statistics.median(map(float.__truediv__, pooled.seconds, alone.seconds)), 4),
        "added_share": round((beside_engine_s(pooled.spent) - beside_engine_s(alone.spent)) / whole_s, 5),
        "idle_share": round(pool_process_s(pooled.spent) / sum(pooled.seconds) / (os.cpu_count() or 1), 5),
    }
    print(figures, write_result("prefix_pool_cost", figures))


if __name__ == "__main__":
    main()
