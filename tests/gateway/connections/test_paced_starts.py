"""A thousand requests that come at once begin a few at a time."""

import asyncio
from collections import Counter
from pathlib import Path

import httpx

from alignedserve.gateway.middleware import PacedStarts
from alignedserve.keys.file import KeyRow, ring_of
from tests.gateway.keys.token_support import issuer, key_set, token
from tests.gateway.support import Gateway, gateway


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


MADE_UP = [f"key-{number}" for number in range(200)]


async def ends_of(client: httpx.AsyncClient, presented: list[str], last: str, other: httpx.AsyncClient) -> int:
    """Send requests that come at once, and a last one by another client; return how many ended before that."""
    ended = list[str]()

    async def request(by: httpx.AsyncClient, key: str) -> None:
        await by.post("/v1/nothing", headers={"x-api-key": key})
        ended.append(key)

    await asyncio.gather(*[request(client, key) for key in presented], request(other, last))
    return ended.index(last)


async def test_who_makes_up_keys_has_no_turns_for_each_of_them() -> None:
    async with gateway(api_keys=("plain",)) as running:
        assert await ends_of(running.client, MADE_UP, "plain", running.client) < 20


async def test_a_client_with_a_token_does_not_wait_for_made_up_ones(tmp_path: Path) -> None:
    path, known = tmp_path / "jwks.json", token()
    path.write_bytes(key_set("one"))
    async with gateway(keys_file="/not/read/here", jwt=(issuer(str(path)),)) as running:
        running.services.keys.ring = ring_of((), [KeyRow("team-a")])
        assert await ends_of(running.client, [], known, running.client) == 0  # verified now, and remembered
        assert await ends_of(running.client, [f"{key}.a.b" for key in MADE_UP], known, running.client) < 20


async def test_where_no_keys_are_set_addresses_have_turns_whatever_keys_they_bring(served: Gateway) -> None:
    address = httpx.ASGITransport(served.app, client=("192.0.2.1", 1))
    async with httpx.AsyncClient(transport=address, base_url="http://localhost") as other:
        assert await ends_of(served.client, MADE_UP, "another", other) < 20
