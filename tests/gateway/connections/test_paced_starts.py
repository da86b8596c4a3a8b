"""A thousand requests that come at once begin a few at a time."""

import asyncio
from collections import Counter

from alignedserve.gateway.connections.paced_starts import PacedStarts


async def test_streams_have_turns_while_many_requests_begin() -> None:
    starts, num_turns, begun = PacedStarts(), 0, list[tuple[int, int]]()

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async def request(number: int) -> None:
        await starts.turn("one client")
        begun.append((number, num_turns))

    stream = asyncio.create_task(take_turns())
    requests = [asyncio.create_task(request(number)) for number in range(50)]
    await asyncio.sleep(0)
    requests[20].cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    stream.cancel()
    assert sorted(number for number, _ in begun) == [number for number in range(50) if number != 20]
    assert [number for number, _ in begun[:8]] == [0, 1, 2, 3, 4, 49, 5, 48]  # what came last waits for few
    assert max(Counter(turn for _, turn in begun).values()) <= 4


async def test_who_sends_one_request_does_not_wait_for_all_of_another_client() -> None:
    starts, begun = PacedStarts(), list[str]()

    async def request(client: str) -> None:
        await starts.turn(client)
        begun.append(client)

    clients = [*["many"] * 100, "one", "another"]
    await asyncio.gather(*map(request, clients))
    assert len(begun) == len(clients)
    assert {"one", "another"} <= set(begun[:9])


async def test_a_request_that_comes_alone_begins_at_once() -> None:
    starts = PacedStarts()
    for _ in range(3):
        request = asyncio.create_task(starts.turn("a client"))
        await asyncio.sleep(0)
        assert request.done()
