"""The copies of a cluster whose workers are on devices, in the order in which they happened.

    python -m benchmarks.memory.prefetch_path

Router, prefill worker, KV pool and decode worker in one process, with a stand-in for devices: memories of their own,
streams in a random order, links that note every copy. Shows the order and the number of the copies, no speed. Writes
benchmarks/results/prefetch_path.json: what, bytes, from, to, and the steps at which each was ordered, began and ended.
"""

import asyncio
import random
import tempfile
from dataclasses import asdict
from pathlib import Path

from alignedserve.config.sections import BatchingConfig
from alignedserve.core.request import SamplingParams
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import RESULTS, write_result
from tests.harnesses.clusters.in_process import RoomCluster, running, small_config
from tests.support.devices.device_stand_in import Copy, Machine

_NUM_FIRST, _NUM_LATER = 4, 8  # requests that run, and those that are prefetched meanwhile
_SAMPLING = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)


def main() -> None:
    """Run the requests, check their tokens, record the timeline and print it."""
    parser = parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the order in which streams run")
    parser.add_argument("--output", type=Path, default=RESULTS / "transfer", help="folder for the figures")
    arguments = parser.parse_args()
    copies = asyncio.run(record_copies(arguments.seed))
    totals = totals_of(copies)
    path = write_result(
        "prefetch_path", {"totals": totals, "copies": [asdict(one) for one in copies]}, folder=arguments.output
    )
    for copy in copies:
        what = "blocks" if copy.is_of_blocks else "digests"
        print(f"{copy.begun:5} {copy.ended:5}  {copy.source:>9} -> {copy.target:<9} {copy.num_bytes:6} B {what}")
    for way, num_bytes in totals.items():
        print(f"{way:24} {num_bytes:8} B")
    print(path)


async def record_copies(seed: int) -> list[Copy]:
    """Return all copies of a run, by the step at which they began. Raises AssertionError for a wrong token."""
    rng = random.Random(seed)
    work = [[rng.randrange(3, 128) for _ in range(rng.randrange(60, 80))] for _ in range(_NUM_FIRST + _NUM_LATER)]
    machine = Machine(seed)
    with tempfile.TemporaryDirectory() as folder:
        config = small_config(Path(folder) / "model", batching=BatchingConfig(min_requests=4, starvation_s=0.2))
        async with running(config, Path(folder), machine) as cluster:
            await _serve(cluster, work)
    return sorted(machine.timeline, key=lambda copy: copy.begun)


async def _serve(cluster: RoomCluster, work: list[list[int]]) -> None:
    first = [cluster.gateway.submit(prompt, _SAMPLING) for prompt in work[:_NUM_FIRST]]
    for answer in first:
        await answer.first_token.wait()
    answers = first + [cluster.gateway.submit(prompt, _SAMPLING) for prompt in work[_NUM_FIRST:]]
    for answer in answers:
        await answer.done.wait()
    for prompt, answer in zip(work, answers, strict=True):
        assert answer.token_ids == cluster.reference(prompt, _SAMPLING), "other tokens than one engine alone"
    await cluster.gateway.idle()


def totals_of(copies: list[Copy]) -> dict[str, int]:
    """Return the bytes of blocks by their way."""
    totals: dict[str, int] = {}
    for copy in copies:
        if copy.is_of_blocks:
            way = f"{copy.way}: {copy.source} to {copy.target}"
            totals[way] = totals.get(way, 0) + copy.num_bytes
    return totals


if __name__ == "__main__":
    main()
