"""A real server on a real port: OpenAI's SDK, disconnects, ports in use, start and stop, a whole gateway on links."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.api.errors import Overloaded, Unavailable
from alignedserve.batches.location import BatchLocation, SharedState
from alignedserve.batches.stores.redis_location import RedisLocation
from alignedserve.config.sections import BatchesConfig, GatewayConfig
from alignedserve.core.errors import AddressInUse, ConfigError, ModelNotFound, StorageError
from alignedserve.gateway.server import GatewayServer, HttpServer, bind, shares_limits
from alignedserve.process.addresses import AddressBook
from tests.gateway.deployment_support import EchoingDeployment, deployed, gateway_links
from tests.gateway.support import saying, services_for, tokens_of
from tests.harnesses.scripted_backend import Script, ScriptedBackend
from tests.support.servers.state_links import Entries
from tests.support.waiting import holds

SECRET = b"s" * 32


@asynccontextmanager
async def serving(script: Any = None, *, api_keys: tuple[str, ...] = (), **config: Any) -> AsyncIterator[Any]:
    """(base URL, backend, SDK client) of a running server."""
    import openai

    backend = ScriptedBackend(script or saying("the quick brown fox"))
    listener = bind("127.0.0.1", 0)
    server = HttpServer(services_for(backend, GatewayConfig(**config), api_keys), listener)
    await server.start()
    url = f"http://127.0.0.1:{server.port}"
    key = api_keys[0] if api_keys else "none"
    try:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            yield url, backend, client
    finally:
        await server.stop()


MESSAGES: Any = [{"role": "user", "content": "hello"}]


async def test_a_request_that_has_ended_waits_for_no_collection_of_garbage() -> None:
    # It would stop every stream: at 50 chats a second for up to a second.
    async with serving() as (_, _, client):
        await _ask_often(client)  # the first leave what is kept for all, and their connection keeps the last one
        gc.collect()
        gc.disable()
        try:
            left = _num_left()
            await _ask_often(client)
            await holds(lambda: _num_left() <= left)
        finally:
            gc.enable()


async def _ask_often(client: Any) -> None:
    for stream in (False, True) * 3:
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=stream)
        if stream:
            async for _ in answer:
                pass


def _num_left() -> int:
    kinds = {"Generation", "RequestStream", "StreamedBody"}
    return sum(type(one).__name__ in kinds for one in gc.get_objects())


async def test_the_openai_sdk() -> None:
    async with serving() as (_, _, client):
        chat = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, n=2, logprobs=True, top_logprobs=1, service_tier="flex"
        )
        assert chat.choices[1].message.content == "the quick brown fox"
        assert chat.choices[0].logprobs.content[0].token == "the"
        assert chat.service_tier == "flex"
        assert chat.usage.completion_tokens == 10
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, stop=" fox"
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "the quick brown"
        assert chunks[-1].usage.total_tokens > 3
        completion = await client.completions.create(model="tiny", prompt=["a", "b"], logprobs=1, echo=True)
        assert [choice.text[0] for choice in completion.choices] == ["a", "b"]
        assert completion.choices[0].logprobs.token_logprobs[0] is None
        pieces = await client.completions.create(model="tiny", prompt="a", stream=True, max_tokens=2)
        assert "".join([piece.choices[0].text async for piece in pieces]) == "the quick"
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).owned_by == "alignedserve"
        raw = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, extra_body={"top_k": 2}, extra_headers={"x-slo-ttft-ms": "10000"}
        )
        assert raw.model_extra["alignedserve"]["slo"]["ttft"]["held"] is True


async def test_error_classes_of_the_sdk() -> None:
    import openai

    async with serving(api_keys=("right",), requests_per_minute=3) as (url, _, client):
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[{"type": "function"}])
        assert (bad.value.param, bad.value.code) == ("tools[0].function", "missing_required_parameter")
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as long:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=9999)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.RateLimitError) as limited:
            await client.completions.create(model="tiny", prompt="a")
        assert int(limited.value.response.headers["retry-after"]) > 0
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()


async def test_failures_in_the_sdk() -> None:
    import openai

    scripts = [
        Script((), failure=Overloaded("full", retry_after_s=1.0)),
        Script(tokens_of("the quick"), failure=Unavailable("a worker was lost")),
    ]
    async with serving(lambda request: scripts[0 if request.sampling.seed == 1 else 1]) as (_, _, client):
        with pytest.raises(openai.InternalServerError) as full:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, seed=1)
        assert full.value.status_code == 503
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, seed=2, stream=True)
        with pytest.raises(openai.APIError, match="a worker was lost"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("first_token_delay_s", [0.0, 30.0])
async def test_a_disconnect_aborts_at_once(is_streamed: bool, first_token_delay_s: float) -> None:
    script = Script((5,) * 100, token_delay_s=0.02, first_token_delay_s=first_token_delay_s)
    async with serving(lambda _: script) as (url, backend, _):
        port = int(url.rpartition(":")[2])
        body = json.dumps({"model": "tiny", "messages": MESSAGES, "stream": is_streamed, "n": 2}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)

        def asked() -> set[str]:
            return {one.request_id for one in backend.submitted if not one.request_id.startswith("canary")}

        await holds(lambda: len(asked()) == 2)
        writer.close()
        # Before the end of the script, after which there would be nothing to abort.
        await holds(lambda: asked() <= set(backend.aborted))
        assert len(asked()) == 2


async def test_a_port_in_use() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"Port {port} on 127.0.0.1 is taken"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"gateway\.host"):
        bind("203.0.113.1", port)


async def test_a_whole_gateway(tmp_path: Path, unused_tcp_port: int) -> None:
    cluster = await EchoingDeployment(tmp_path).start()
    config = GatewayConfig(port=unused_tcp_port)
    server = GatewayServer(links=gateway_links(tmp_path), deployments=[deployed()], config=config)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url) as client:
            async with asyncio.timeout(60):
                while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110  (in the gateway)
                    await asyncio.sleep(0.02)
            answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "the lazy dog"})
            assert answer.json()["choices"][0]["text"] == "the lazy dog"
    finally:
        await server.stop()
        await server.stop()
        await cluster.close()


async def test_a_gateway_that_cannot_start_leaves_nothing(tmp_path: Path, unused_tcp_port: int) -> None:
    links = gateway_links(tmp_path)
    config = GatewayConfig(port=unused_tcp_port)
    with pytest.raises(ModelNotFound):
        await GatewayServer(links=links, deployments=[deployed(folder=tmp_path)], config=config).start()
    first = [deployed()]
    with bind("127.0.0.1", unused_tcp_port), pytest.raises(AddressInUse):
        await GatewayServer(links=links, deployments=first, config=config).start()
    (tmp_path / "state").touch()
    state = SharedState(BatchLocation(BatchesConfig(), tmp_path / "state", RedisLocation("redis://127.0.0.1:1")))
    with pytest.raises(StorageError):
        await GatewayServer(links=links, deployments=first, config=config, state=state).start()
    again = GatewayServer(links=links, deployments=first, config=config)
    await again.start()
    await again.stop()


def test_a_gateway_that_is_alone_shares_limits_where_others_may_join(tmp_path: Path) -> None:
    one_host, one_of_hosts = AddressBook(tmp_path), AddressBook(tmp_path, "node-0", "127.0.0.1", Entries())
    assert not shares_limits("gateway-0", ("gateway-0",), one_host)
    assert shares_limits("gateway-0", ("gateway-0", "gateway-1"), one_host)
    assert shares_limits("gateway-0", ("gateway-0",), one_of_hosts)
