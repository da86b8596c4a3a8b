"""A worker is killed while its eight streams flow: how soon do they go on, with a standby and without?

    python -m benchmarks.serving.standby --rounds 3

One elastic worker of the pocket model, or of another with --model, beside it none that stands by, or one. The pause of
a stream is its longest gap between tokens after the blow; it may come later, while the lost worker is started again on
the same cores. Of memory: what both workers take each (RSS), and what the pair takes of
the machine (the sum of PSS), before the first blow. Target: a standby goes on within 1 s, without a second copy of
the weights.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from alignedserve.loadgen.client import CompletionOutcome, OpenAiClient
from benchmarks.serving.worker_loss import calls
from benchmarks.support.kill_cluster import KillCluster
from benchmarks.support.kill_schedules import Target
from benchmarks.support.recording import write_result

_SETTINGS = ("model.dtype=float32", "batches.enabled=false", "decode.count=1", "prefix_cache.enabled=false")
_SETTLED_S = 1.0
_MIB = 1024 * 1024
_RETURNS_S = 120.0


async def measure(cluster: KillCluster, options: argparse.Namespace, num_workers: int) -> list[dict[str, Any]]:
    """Return the row of every loss."""
    rows = []
    async with OpenAiClient(url=cluster.url) as client:
        for number in range(options.rounds):
            await _whole(cluster, num_workers)
            rows.append(await _one_round(client, cluster, options.tokens, number))
            print(rows[-1], flush=True)
    return rows


async def _whole(cluster: KillCluster, num_workers: int) -> None:
    """Wait until as many workers run, and have loaded."""
    ends_s = time.monotonic() + _RETURNS_S
    while len(cluster.processes(Target.DECODE)) < num_workers:
        assert time.monotonic() < ends_s, "a worker has not returned"
        await asyncio.sleep(0.1)
    await asyncio.sleep(5 * _SETTLED_S)


async def _one_round(client: OpenAiClient, cluster: KillCluster, num_tokens: int, number: int) -> dict[str, Any]:
    streams = calls(num_tokens, seed=number)
    outcomes = [CompletionOutcome() for _ in streams]
    flowing = asyncio.Event()

    def on_text(*_: object) -> None:
        if all(one.token_times_s for one in outcomes):
            flowing.set()

    before = {one.pid: _cpu_s(one) for one in cluster.processes(Target.DECODE)}
    tasks = [asyncio.create_task(client.complete(*pair, on_text)) for pair in zip(streams, outcomes, strict=True)]
    await flowing.wait()
    await asyncio.sleep(_SETTLED_S)
    # The one that computes.
    victim = max(cluster.processes(Target.DECODE), key=lambda one: _cpu_s(one) - before.get(one.pid, 0.0))
    killed_s = time.monotonic()
    victim.kill()
    await asyncio.gather(*tasks)
    gaps = [_longest_gap(one, killed_s) for one in outcomes]
    pauses = [later - earlier for earlier, later in gaps]
    return {
        "pause_max_s": round(max(pauses), 3),
        "pause_p50_s": round(statistics.median(pauses), 3),
        "pauses_over_max_s": round(max(later for _, later in gaps) - killed_s, 3),
        "streams_cut": sum(one.failure is not None or one.num_tokens != num_tokens for one in outcomes),
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _longest_gap(outcome: CompletionOutcome, killed_s: float) -> tuple[float, float]:
    """Return when the longest gap between tokens after the blow began and ended; a token may have been on its way."""
    pairs = [(earlier, later) for earlier, later in itertools.pairwise(outcome.token_times_s) if later > killed_s]
    return max(pairs, key=lambda pair: pair[1] - pair[0], default=(killed_s, killed_s))


def memory_of(cluster: KillCluster) -> dict[str, Any]:
    """Return what the workers take, in MiB."""
    infos = [one.memory_full_info() for one in cluster.processes(Target.DECODE)]
    return {
        "worker_rss_mib": sorted(one.rss // _MIB for one in infos),
        "workers_pss_mib": sum(one.pss for one in infos) // _MIB,
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1500, help="of each stream: they have to outlast the loss")
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--loaded", action="store_true", help="note that other programs used the cores")
    options = parser.parse_args()
    figures: dict[str, Any] = {"model": options.model, "cores_were_loaded": options.loaded}
    for standby in (0, 1):
        settings = (*_SETTINGS, *options.settings, f"decode.standby={standby}")
        with tempfile.TemporaryDirectory(prefix="standby-") as name:
            words = (word for one in settings for word in ("--set", one))
            cluster = KillCluster(Path(name), (options.model, *words))
            cluster.start()
            try:
                asyncio.run(_whole(cluster, 1 + standby))
                memory = memory_of(cluster)
                rounds = asyncio.run(measure(cluster, options, 1 + standby))
            finally:
                cluster.stop()
        medians = {"pause_max_median_s": statistics.median(one["pause_max_s"] for one in rounds)}
        figures["with_standby" if standby else "without"] = {**medians, **memory, "rounds": rounds}
    print(figures)
    print(write_result("standby", figures))


if __name__ == "__main__":
    main()
