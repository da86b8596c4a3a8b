"""Anthropic's own SDK, unchanged, against the Messages API."""

from typing import Any

import pytest

from alignedserve.api.errors import GenerationFailed, Overloaded, TimedOut, Unavailable
from tests.gateway.anthropic.messages_support import sdk_client
from tests.gateway.support import saying, tokens_of
from tests.harnesses.scripted_backend import Script
from tests.support.marks import each

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": HELLO}


async def test_a_message() -> None:
    async with sdk_client(saying("the dog")) as (client, _):
        message = await client.messages.create(**ASKED)
        again = await client.messages.create(**ASKED | {"messages": [*HELLO, message.to_param(), *HELLO]})
    assert message.content[0].to_dict() == {"type": "text", "text": "the dog"}
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 3)
    assert message._request_id is not None
    assert again.usage.input_tokens > message.usage.input_tokens


async def test_a_stream() -> None:
    async with (
        sdk_client(saying("the quick brown fox")) as (client, _),
        client.messages.stream(**ASKED, stop_sequences=[" fox"]) as stream,
    ):
        texts = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert "".join(texts) == "the quick brown"
    assert len(texts) > 2
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " fox")
    assert message.usage.output_tokens > 3


async def test_counting_and_models() -> None:
    import anthropic

    async with sdk_client() as (client, served):
        counted = await client.messages.count_tokens(model="tiny", messages=HELLO)
        message = await client.messages.create(**ASKED)
        models = [model async for model in client.models.list()]
        model = await client.models.retrieve("tiny")
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("other")
    assert counted.input_tokens == message.usage.input_tokens == len(served.backend.submitted[0].prompt_token_ids)
    assert models == [model]
    assert (model.id, model.max_input_tokens) == ("tiny", 256)


@each(
    ("failure", "expected"),
    [
        (Overloaded("full", retry_after_s=1.0), "OverloadedError"),
        (Unavailable("no router"), "ServiceUnavailableError"),
        (TimedOut("silent"), "GatewayTimeoutError"),
        (GenerationFailed("gone"), "InternalServerError"),
    ],
)
async def test_failures_are_the_exceptions_of_the_sdk(failure: Any, expected: str) -> None:
    import anthropic

    async with sdk_client(lambda _: Script((), failure=failure)) as (client, _):
        for is_streamed in (False, True):
            with pytest.raises(getattr(anthropic, expected)) as caught:
                await client.messages.create(**ASKED, stream=is_streamed)
            assert caught.value.request_id is not None


async def test_a_failure_amid_a_stream_is_an_exception() -> None:
    import anthropic

    script = Script(tokens_of("the dog"), failure=GenerationFailed("gone"))
    async with sdk_client(lambda _: script) as (client, _), client.messages.stream(**ASKED) as stream:
        with pytest.raises(anthropic.APIStatusError, match="gone"):
            await stream.get_final_message()


async def test_refusals_are_the_exceptions_of_the_sdk() -> None:
    import anthropic

    async with sdk_client(requests_per_minute=6, max_body_bytes=2000) as (client, _):
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**ASKED | {"model": "claude"})
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            await client.messages.create(**ASKED | {"messages": []})
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* tokens > 255 maximum"):
            await client.messages.create(**ASKED | {"messages": [{"role": "user", "content": "dog " * 400}]})
        with pytest.raises(anthropic.RequestTooLargeError):
            await client.messages.create(**ASKED | {"messages": [{"role": "user", "content": "dog " * 4000}]})
        await client.messages.create(**ASKED)
        await client.messages.create(**ASKED)
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(**ASKED)
    assert "retry-after" in caught.value.response.headers


async def test_keys() -> None:
    import anthropic

    async with sdk_client(api_keys=("right",), api_key="right") as (client, _):
        assert (await client.messages.create(**ASKED)).role == "assistant"
        by_token = client.with_options(api_key=None, auth_token="right")
        assert (await by_token.messages.create(**ASKED)).role == "assistant"
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").messages.create(**ASKED)
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
