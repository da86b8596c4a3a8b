"""What an open live page costs: processor time of its looks, and with a server at hand the throughput that it takes.

python -m benchmarks.serving.live_page [--url URL --rounds 12]

The page looks once a second. In process: the processor time of one look, from the request to the encoded document, for
a small and a large cluster, beside that of one scrape of /metrics; and what describing the cluster adds to the report
that a router of many requests makes every second. With `--url`: rounds of the same answers, in pairs without and with a
page open, and the median of their ratios. Processor time is of this thread alone, but on a busy machine it is longer.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import httpx
from msgspec.structs import replace

from alignedserve.core.request import RequestClass
from alignedserve.messages.cluster_view import LengthLeaf, LengthTree, PlacedTree
from alignedserve.messages.gateways import ClusterStatus
from benchmarks.support.recording import write_result
from router.cluster_view import tier_load, trees_of, worker_view
from tests.gateway.live_samples import BUSY_STATUS
from tests.gateway.support import gateway
from tests.harnesses.router import RouterHarness, colocated_router
from tests.support.samples import request

_PATH = "/v1/alignedserve/live"
_REPEATS = 200
_NUM_REQUESTS = 1000
_ANSWERS = 16  # at a time, in a round
_MAX_TOKENS = 128


def _large() -> ClusterStatus:
    """Return the report of 32 workers and four pools, whose trees are as fine as may be told."""
    workers = tuple(replace(BUSY_STATUS.workers[1], worker=f"decode-{number}") for number in range(32))
    tree = LengthTree(65536, 16, tuple(LengthLeaf(7 * index, 3, 9) for index in range(64)))
    return replace(BUSY_STATUS, workers=workers, trees=tuple(PlacedTree(f"pool-{n}", tree) for n in range(4)))


async def _look_ms(status: ClusterStatus, path: str) -> float:
    """Return the median processor time of one look, without the client's part of it."""
    async with gateway() as served:
        served.backend.set_status(status)
        looks = await _times_ms(lambda: served.client.get(path))
        empty = await _times_ms(lambda: served.client.get("/health"))
    return statistics.median(looks) - statistics.median(empty)


async def _times_ms(look: Callable[[], Awaitable[httpx.Response]]) -> list[float]:
    times = []
    for _ in range(_REPEATS):
        began = time.thread_time()
        (await look()).raise_for_status()
        times.append((time.thread_time() - began) * 1000.0)
    return times


def _router_ms() -> float:
    """Return the median processor time that a router's report of many requests has for those who look on."""
    made: RouterHarness = colocated_router(num_blocks=100_000)
    for number in range(_NUM_REQUESTS):
        made.submit(request(f"r{number}", 1 + number % 3000))
    requests, placement = made.logic._registry.requests.values(), made.logic._placement
    times = []
    for _ in range(_REPEATS):
        began = time.thread_time()
        for request_class in RequestClass:
            tier_load(requests, request_class, 1.0)
        [worker_view(worker) for worker in placement.workers.values()]
        trees_of(requests, placement)
        times.append((time.thread_time() - began) * 1000.0)
    return statistics.median(times)


async def _paired(url: str, rounds: int) -> dict[str, object]:
    ratios, rates = [], []
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:
        await _round(client)
        for number in range(rounds):
            is_open_first = bool(number % 2)
            first = await _round(client, is_open=is_open_first)
            second = await _round(client, is_open=not is_open_first)
            closed, opened = (second, first) if is_open_first else (first, second)
            ratios.append(opened / closed)
            rates.append(closed)
    return {
        "tokens_per_s_without": round(statistics.median(rates), 1),
        "ratio_with_over_without": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


async def _round(client: httpx.AsyncClient, *, is_open: bool = False) -> float:
    """Return the tokens per second of one round of answers."""
    page = asyncio.create_task(_watch(client)) if is_open else None
    body = {"model": "pocket", "prompt": "Spell cat. " * 8, "max_tokens": _MAX_TOKENS, "ignore_eos": True}
    began = time.monotonic()
    answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(_ANSWERS)))
    taken_s = time.monotonic() - began
    if page is not None:
        page.cancel()
        await asyncio.gather(page, return_exceptions=True)
    return float(sum(answer.json()["usage"]["completion_tokens"] for answer in answers) / taken_s)


async def _watch(client: httpx.AsyncClient) -> None:
    while True:
        (await client.get(_PATH)).raise_for_status()
        await asyncio.sleep(1.0)


async def _measure(url: str | None, rounds: int) -> dict[str, object]:
    figures: dict[str, object] = {
        "look_ms": {
            "2 workers, 1 tree": round(await _look_ms(BUSY_STATUS, _PATH), 3),
            "32 workers, 4 trees of 64 ranges": round(await _look_ms(_large(), _PATH), 3),
        },
        "scrape_of_metrics_ms": {"2 workers": round(await _look_ms(BUSY_STATUS, "/metrics"), 3)},
        "router_report_ms": {f"{_NUM_REQUESTS} requests": round(_router_ms(), 3)},
    }
    return figures | ({"paired_rounds": await _paired(url, rounds)} if url is not None else {})


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a gateway that serves the pocket model")
    parser.add_argument("--rounds", type=int, default=12, help="pairs")
    options = parser.parse_args()
    figures = asyncio.run(_measure(options.url, options.rounds))
    print(figures)
    write_result("live_page", figures)


if __name__ == "__main__":
    main()
