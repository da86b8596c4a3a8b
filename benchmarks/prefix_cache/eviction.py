"""Orders of eviction of a prefix cache: hit rates of prompts that come one after the other, without any scheduling.

    python -m benchmarks.prefix_cache.eviction

Mooncake's two traces (from the folder that ALIGNEDSERVE_DATA names) and a mix of conversations with questions about
documents, with caches of some sizes. Orders by the value of a block are `CachedBlocks` with another value, the
product's with its own; the others are in `eviction_orders.py`. Beside them the two ideal caches
(alignedserve/sim/ideal_caches.py).
`saved` is the share of the attention's and products' work that hits saved, on llama-3-8b.
"""

import argparse
import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import msgspec

from alignedserve.config.environment import data_dir
from alignedserve.core.ids import BlockId
from alignedserve.prefix_cache.block_hashes import NamedBlock, packed_tokens
from alignedserve.prefix_cache.cached_blocks import CachedBlock, CachedBlocks
from alignedserve.prefix_cache.eviction import REMEMBERED_SHARE, SavedCost, ValuedBlock, saved_cost
from alignedserve.sim.ideal_caches import PromptBlocks, farthest_next_use, least_recently_used, unbounded
from alignedserve.workload.build import build_workload
from alignedserve.workload.catalogue import Library
from alignedserve.workload.requests import TimedRequest, Workload
from benchmarks.prefix_cache.eviction_orders import Cache, S3Fifo, Sieve, TwoQueues
from benchmarks.support.recording import write_result

BLOCK_LEN = 512
DOUBLING_TOKENS = 32_768  # tokens of context at which attention costs llama-3-8b as much as its products
TOKEN_S = 0.03  # of an answer, for the moments of later turns
TRACES = {
    "conversation": "mooncake_full, arrivals=recorded",
    "synthetic": "mooncake_synthetic, arrivals=recorded",
    "chat and documents": (
        "chat: prompt=lognormal(60,300), output=lognormal(200,700), turns=8, think=20, instruction=800, rate=1;"
        "documents: prompt=80, output=150, instruction=lognormal(6000,15000), instructions=400, rate=2;"
        "agents: prompt=lognormal(500,3000), output=80, turns=12, think=3, instruction=3000, instructions=5, rate=0.2"
    ),
}


def _by_uses_and_depth(block: ValuedBlock) -> float:
    return min(block.num_uses, 8) * (1.0 + block.depth * BLOCK_LEN / 4096)


def _by_uses_and_cost(block: ValuedBlock) -> float:
    return min(block.num_uses, 8) * (1.0 + block.depth * BLOCK_LEN / DOUBLING_TOKENS)


PRODUCT, BELADY = "the product's", "Belady"
VALUES: dict[str, SavedCost] = {
    "LRU": lambda block: 1.0,
    "LFU with aging": lambda block: float(block.num_uses),
    "LFU with aging, 8 uses at most": lambda block: float(min(block.num_uses, 8)),
    "GDSF, costs by depth, 4 096 tokens": _by_uses_and_depth,
    "GDSF, costs by depth, 32 768 tokens": _by_uses_and_cost,
}
ORDERS: dict[str, Callable[[int], Cache]] = {"two queues": TwoQueues, "SIEVE": Sieve, "S3-FIFO": S3Fifo}


class ProductCache:
    """`CachedBlocks` of so many blocks, each as if it were one token."""

    def __init__(self, capacity: int, cost: SavedCost = saved_cost, remembered_share: int = REMEMBERED_SHARE) -> None:
        self._blocks = CachedBlocks(1, cost=cost, remembered_share=remembered_share)
        self._num_free = capacity

    def take(self, prompt: Sequence[int]) -> int:
        """Return how many blocks of a prompt are held, from the first on; hold the prompt from now on."""
        hashes = [number.to_bytes(16, "little") for number in prompt]
        names = [NamedBlock(one, packed_tokens((number,))) for number, one in zip(prompt, hashes, strict=True)]
        held = self._blocks.run_of(names)
        num_hits = len(held)
        self._blocks.acquire(held)
        needed = len(prompt) - num_hits
        freed = self._blocks.evict(min(max(needed - self._num_free, 0), self._blocks.num_unused))
        self._num_free += len(freed)
        parent: CachedBlock | None = held[-1] if held else None
        for number, block_hash in list(zip(prompt, hashes, strict=True))[num_hits : num_hits + self._num_free]:
            parent = self._blocks.store(parent, block_hash, packed_tokens((number,)), BlockId(number))
            assert parent is not None, "two numbers with one hash"
            held.append(parent)
        self._num_free -= len(held) - num_hits
        self._blocks.release(held)
        return num_hits


def prompts_of(workload: Workload) -> list[list[int]]:
    """Return the blocks of all prompts, later turns where they would come if every token took TOKEN_S."""
    numbers, blocks = count(), PromptBlocks(BLOCK_LEN)
    coming: list[tuple[float, int, TimedRequest]] = [
        (request.arrival_s, next(numbers), request) for request in workload.requests
    ]
    heapq.heapify(coming)
    prompts = []
    while coming:
        now_s, _, request = heapq.heappop(coming)
        prompts.append(blocks.of(request.runs, request.prompt_len))
        if request.follow_up is not None:
            next_s = now_s + request.output_len * TOKEN_S + request.follow_up.arrival_s
            heapq.heappush(coming, (next_s, next(numbers), request.follow_up))
    return prompts


def measure(prompts: Sequence[Sequence[int]], cache: Cache) -> dict[str, float]:
    """Return the shares of blocks, and of work, that a cache saves."""
    work = [1.0 + place * BLOCK_LEN / DOUBLING_TOKENS for place in range(max(map(len, prompts)))]
    hits = [cache.take(prompt) for prompt in prompts]
    saved, whole = (sum(map(sum, (work[:length] for length in lengths))) for lengths in (hits, map(len, prompts)))
    return {"hit_rate": round(sum(hits) / sum(map(len, prompts)), 4), "saved": round(saved / whole, 4)}


def caches_of(capacity: int) -> Iterator[tuple[str, Cache]]:
    """Yield every order of eviction, by its name."""
    yield PRODUCT, ProductCache(capacity)
    for name, cost in VALUES.items():
        yield name, ProductCache(capacity, cost, 0)
    for name, make in ORDERS.items():
        yield name, make(capacity)


def rows_of(
    trace: str, prompts: Sequence[Sequence[int]], capacities: Sequence[int], orders: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the hit rates of these orders, or of all, with every capacity."""
    about = {"trace": trace, "prompts": len(prompts), "blocks": sum(map(len, prompts))}
    yield about | {"order": "unbounded", "hit_rate": round(unbounded(prompts).rate, 4)}
    for capacity in capacities:
        sized = about | {"capacity": capacity}
        yield sized | {"order": "ideal LRU", "hit_rate": round(least_recently_used(prompts, capacity).rate, 4)}
        yield sized | {"order": BELADY, "hit_rate": round(farthest_next_use(prompts, capacity).rate, 4)}
        for name, cache in caches_of(capacity):
            if not orders or name in orders:
                yield sized | {"order": name} | measure(prompts, cache)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200.0, help="of arrivals of the mix")
    parser.add_argument("--traces", nargs="+", choices=list(TRACES), default=list(TRACES))
    parser.add_argument("--capacities", type=int, nargs="+", default=[2_000, 4_000, 8_000, 16_000, 32_000])
    parser.add_argument("--orders", nargs="+", default=[], help="names; all without it")
    parser.add_argument("--name", default="eviction", help="of the record")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.traces:
        duration_s = None if "recorded" in TRACES[name] else arguments.seconds
        workload = build_workload(TRACES[name], seed=0, library=Library(data_dir()), duration_s=duration_s)
        for row in rows_of(name, prompts_of(workload), arguments.capacities, arguments.orders):
            rows.append(row)
            print(msgspec.json.encode(row).decode(), flush=True)
            path = write_result(arguments.name, {"block_len": BLOCK_LEN, "rows": rows})
    print(path)


if __name__ == "__main__":
    main()
