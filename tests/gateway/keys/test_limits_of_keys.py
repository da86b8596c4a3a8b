"""Limits of a key: refusals name the key and the limit, headers say what is left, as OpenAI's clients read them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from alignedserve.api.models.model_registry import ModelRegistry
from alignedserve.gateway.quotas import duration
from alignedserve.gateway.services import Services
from alignedserve.keys.file import KeyRow, ring_of
from alignedserve.keys.ring import digest_of
from tests.gateway.support import Gateway, gateway

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}


@asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[tuple[Gateway, "AsyncOpenAI"]]:
    import openai

    row = {"name": "team-a", "secrets": [{"sha256": digest_of("team-a").hex()}], **limits}
    async with gateway() as running:
        running.services.keys.ring = ring_of((), [msgspec.convert(row, KeyRow)])
        http: Any = running.client
        yield (
            running,
            openai.AsyncOpenAI(api_key="team-a", base_url="http://localhost/v1", http_client=http, max_retries=0),
        )


async def test_requests_per_minute() -> None:
    import openai

    async with served(requests_per_minute=2) as (_, client):
        for left in ("1", "0"):
            raw = await client.chat.completions.with_raw_response.create(**CHAT)
            assert raw.headers["x-ratelimit-limit-requests"] == "2"
            assert raw.headers["x-ratelimit-remaining-requests"] == left
            assert "x-ratelimit-limit-tokens" not in raw.headers
        assert raw.headers["x-ratelimit-reset-requests"] in ("59s", "1m0s")
        with pytest.raises(openai.RateLimitError, match=r"key team-a on requests_per_minute: Limit 2\.") as refused:
            await client.chat.completions.create(**CHAT)
        assert refused.value.code == "rate_limit_exceeded"
        assert 28 <= int(refused.value.response.headers["retry-after"]) <= 30
        assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"


async def test_tokens_that_did_not_come_are_given_back() -> None:
    import openai

    async with served(tokens_per_minute=100) as (running, client):
        asked = CHAT | {"max_tokens": 90}
        raw = await client.chat.completions.with_raw_response.create(**asked)
        usage = raw.parse().usage
        assert usage is not None
        charged = usage.prompt_tokens + 90
        assert int(raw.headers["x-ratelimit-remaining-tokens"]) in (100 - charged, 101 - charged)
        again = await client.chat.completions.with_raw_response.create(**CHAT)
        left = int(again.headers["x-ratelimit-remaining-tokens"])
        assert 0 <= left - (100 - usage.total_tokens - usage.prompt_tokens - 10) <= 4
        with pytest.raises(openai.RateLimitError, match=r"key team-a on tokens_per_minute: Limit 100\. Requested"):
            await client.chat.completions.create(**asked)
        assert len(running.backend.submitted) == 2


async def test_what_no_minute_allows_is_not_tried_again() -> None:
    import openai

    async with served(tokens_per_minute=100) as (_, client):
        with pytest.raises(openai.RateLimitError, match="too large for the key team-a") as refused:
            await client.with_options(max_retries=3).chat.completions.create(**CHAT | {"max_tokens": 100})
        assert refused.value.response.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.value.response.headers


async def test_open_requests() -> None:
    import openai

    async with served(open_requests=1) as (running, client):
        key = running.services.keys.ring.named("team-a")
        assert key is not None
        await running.services.quotas.open_requests.open(key)
        with pytest.raises(openai.RateLimitError, match=r"key team-a on open_requests: Limit 1\."):
            await client.chat.completions.create(**CHAT)
        running.services.quotas.open_requests.close(key)
        for stream in (False, True, False):  # each has ended before the next begins
            answer = await client.chat.completions.create(**CHAT, stream=stream)
            if isinstance(answer, openai.AsyncStream):
                assert [chunk async for chunk in answer]


async def test_calls_that_wait_for_a_model_that_sleeps_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    import openai

    is_awake = asyncio.Event()
    monkeypatch.setattr(ModelRegistry, "is_asleep", lambda self, name: not is_awake.is_set())
    monkeypatch.setattr(Services, "awake_model", lambda self, name, request_class: is_awake.wait())
    async with served(open_requests=1) as (running, client):
        waiting = asyncio.create_task(client.chat.completions.create(**CHAT))
        while not running.services.quotas.open_requests._counts.of("key.team-a"):  # noqa: ASYNC110  (no event tells it)
            await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="open_requests"):
            await client.chat.completions.create(**CHAT)
        is_awake.set()
        assert (await waiting).choices  # it takes no second place once the model is there


def test_times_are_written_as_openai_does() -> None:
    assert [duration(seconds) for seconds in (0.0, 0.0123, 1.0, 59.1, 360.0)] == ["0ms", "13ms", "1s", "1m0s", "6m0s"]
