"""Work for a cluster of rooms, and what its answers must be."""

import asyncio
import random
from collections.abc import Sequence

from alignedserve.core.request import SamplingParams
from alignedserve.messages.gateways import ClusterStatus
from tests.harnesses.client_gateway import Answer
from tests.harnesses.clusters.in_process import RoomCluster
from tests.support.waiting import holds


def prompts(count: int, shortest: int = 1, longest: int = 120, seed: int = 8) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 128) for _ in range(rng.randrange(shortest, longest))] for _ in range(count)]


def growing_prompts(count: int = 8) -> list[list[int]]:
    """Return prompts whose caches outgrow a small memory one after the other."""
    return [[3 + (7 * number + position) % 120 for position in range(10 + 3 * number)] for number in range(count)]


async def submitted(
    cluster: RoomCluster, work: list[list[int]], sampling: SamplingParams, num_first: int = 4
) -> list[Answer]:
    """Submit the first ones, and the others when those run, so that the others are prefetched."""
    first = [cluster.gateway.submit(prompt, sampling) for prompt in work[:num_first]]
    for answer in first:
        await answer.first_token.wait()
    await holds(lambda: all(len(answer.token_ids) > 1 for answer in first))
    return first + [cluster.gateway.submit(prompt, sampling) for prompt in work[num_first:]]


async def check(
    cluster: RoomCluster, work: Sequence[list[int]], answers: Sequence[Answer], sampling: SamplingParams
) -> ClusterStatus:
    """Wait for the answers: each must be that of one engine alone, and nothing may be held anywhere after them."""
    async with asyncio.timeout(120):
        for answer in answers:
            await answer.done.wait()
    for prompt, answer in zip(work, answers, strict=True):
        assert answer.failure is None
        assert answer.token_ids == cluster.reference(prompt, sampling)
    status = await cluster.gateway.idle()
    assert cluster.num_buffer_blocks_used() == 0
    return status
