"""Bodies that one key sends slowly leave connections to other keys."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

from alignedserve.config.sections import GatewayConfig
from tests.gateway.batches.batch_support import batch_gateway
from tests.gateway.support import gateway

BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}).encode()
PADDING = b" " * 1900


class SlowBodies:
    """Bodies of which the second half comes when that is said."""

    def __init__(self, num_bodies: int, padding: bytes = b"", body: bytes = BODY) -> None:
        self._num_left = num_bodies
        self._padding, self._body = padding, body
        self.have_begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def body(self) -> AsyncIterator[bytes]:
        yield self._padding + self._body[:10]
        self._num_left -= 1
        if not self._num_left:
            self.have_begun.set()
        await self.may_end.wait()
        yield self._body[10:]


async def in_pieces(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def test_one_key_cannot_take_the_connections_of_others_by_bodies_that_arrive_slowly() -> None:
    slow, of_one, of_other = SlowBodies(2), {"x-api-key": "one"}, {"x-api-key": "other"}
    headers = of_one | {"content-type": "application/json"}
    async with gateway(max_connections=8, api_keys=("one", "other")) as running:
        client, path = running.client, "/v1/chat/completions"
        held = [asyncio.create_task(client.post(path, content=slow.body(), headers=headers)) for _ in range(2)]
        await slow.have_begun.wait()
        refused = await client.post(path, json=json.loads(BODY), headers=of_one)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["connection"] == "close"
        assert (await client.post(path, json=json.loads(BODY), headers=of_other)).status_code == 200
        slow.may_end.set()
        assert [answer.status_code for answer in await asyncio.gather(*held)] == [200, 200]
        assert (await client.post(path, json=json.loads(BODY), headers=of_one)).status_code == 200


async def test_one_key_cannot_fill_memory_by_large_bodies_that_arrive_slowly() -> None:
    slow, refused_body = SlowBodies(68, PADDING), SlowBodies(1, PADDING)
    of_one, of_other = {"x-api-key": "one"}, {"x-api-key": "other"}
    headers = of_one | {"content-type": "application/json"}
    async with gateway(max_body_bytes=2048, api_keys=("one", "other")) as running:
        client, path = running.client, "/v1/chat/completions"
        held = [asyncio.create_task(client.post(path, content=slow.body(), headers=headers)) for _ in range(68)]
        await slow.have_begun.wait()
        refused = await client.post(path, content=refused_body.body(), headers=headers)  # 64 whole ones are held
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
        assert (await client.post(path, json=json.loads(BODY), headers=of_other)).status_code == 200
        slow.may_end.set()
        assert {answer.status_code for answer in await asyncio.gather(*held)} == {200}
        whole = PADDING + BODY[:10], BODY[10:]
        assert (await client.post(path, content=in_pieces(*whole), headers=headers)).status_code == 200


async def test_one_key_cannot_fill_memory_by_message_batches_that_arrive_slowly(tmp_path: Path) -> None:
    """Of each the gateway keeps one request at a time: no more of it counts than one may have."""
    params = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    batch = json.dumps({"requests": [{"custom_id": "a", "params": params}]}).encode()
    slow, refused_body = SlowBodies(64, PADDING * 2, batch), SlowBodies(1, PADDING * 2, batch)
    headers, path = {"x-api-key": "one", "content-type": "application/json"}, "/v1/messages/batches"
    limits = GatewayConfig(max_body_bytes=2048)
    async with batch_gateway(
        tmp_path, api_keys=("one", "other"), is_driven=False, max_line_bytes=2048, gateway_config=limits
    ) as served:
        held = [asyncio.create_task(served.client.post(path, content=slow.body(), headers=headers)) for _ in range(64)]
        await slow.have_begun.wait()
        refused = await served.client.post(path, content=refused_body.body(), headers=headers)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        other = await served.client.post(path, content=batch, headers=headers | {"x-api-key": "other"})
        assert other.status_code == 200
        slow.may_end.set()
        assert {answer.status_code for answer in await asyncio.gather(*held)} == {200}


async def test_bodies_that_are_whole_are_as_many_as_a_key_likes() -> None:
    async with gateway(max_connections=4, api_keys=("one",)) as running:
        calls = [
            running.client.post("/v1/chat/completions", json=json.loads(BODY), headers={"x-api-key": "one"})
            for _ in range(20)
        ]
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
