"""OpenAI's own client of the Responses API, over a real port."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.batches.batch_server import listening
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway, eventually


@asynccontextmanager
async def sdk(folder: Path, script: Any = None) -> AsyncIterator[tuple[Any, BatchGateway]]:
    import openai

    async with (
        batch_gateway(folder, script) as served,
        listening(served.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, served


async def test_create_continue_retrieve_list_delete(tmp_path: Path) -> None:
    import openai

    async with sdk(tmp_path) as (client, _):
        first = await client.responses.create(model="tiny", input="hello", instructions="be kind")
        second = await client.responses.create(
            model="tiny", input=[{"role": "user", "content": "more"}], previous_response_id=first.id
        )
        assert (second.output_text, second.status, second.previous_response_id) == (
            "hello world",
            "completed",
            first.id,
        )
        assert await client.responses.retrieve(second.id) == second
        [item] = [item async for item in client.responses.input_items.list(second.id)]
        assert item.type == "message"
        counted = await client.responses.input_tokens.count(model="tiny", input="hello", instructions="be kind")
        assert first.usage is not None
        assert counted.input_tokens == first.usage.input_tokens
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError, match="conversation"):
            await client.responses.create(model="tiny", input="hello", conversation="conv_1")


async def test_a_conversation(tmp_path: Path) -> None:
    async with sdk(tmp_path) as (client, _):
        conversation = await client.conversations.create(
            items=[{"role": "user", "content": "one"}], metadata={"a": "b"}
        )
        response = await client.responses.create(model="tiny", input="two", conversation=conversation.id)
        assert response.conversation is not None
        assert response.conversation.id == conversation.id
        roles = [
            getattr(item, "role", None) async for item in client.conversations.items.list(conversation.id, limit=1)
        ]
        assert roles == ["assistant", "user", "user"]
        assert (await client.conversations.delete(conversation.id)).deleted


async def test_output_is_sent_back_as_input(tmp_path: Path) -> None:
    async with sdk(tmp_path) as (client, _):
        first = await client.responses.create(model="tiny", input="hello", store=False)
        history: Any = [*(item.model_dump() for item in first.output), {"role": "user", "content": "more"}]
        assert (await client.responses.create(model="tiny", input=history)).output_text == "hello world"


async def test_stream(tmp_path: Path) -> None:
    async with sdk(tmp_path) as (client, _):
        async with client.responses.stream(model="tiny", input="hello") as stream:
            texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert ("".join(texts), final.output_text) == ("hello world", "hello world")
        raw = await client.responses.create(model="tiny", input="hello", stream=True)
        assert [event.type async for event in raw][-1] == "response.completed"


async def test_background(tmp_path: Path) -> None:
    async with sdk(tmp_path) as (client, _):
        queued = await client.responses.create(model="tiny", input="hello", background=True)
        assert queued.status == "queued"

        async def is_over() -> bool:
            return bool((await client.responses.retrieve(queued.id)).status == "completed")

        await eventually(is_over)
        assert (await client.responses.cancel(queued.id)).output_text == "hello world"
