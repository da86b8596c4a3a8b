"""Long answers, which are written beside the event loop."""

import asyncio
import threading
from typing import Any

import pytest

from alignedserve.api.backend.scripted import Script
from alignedserve.api.embeddings.response_format import EmbeddingFormatter
from alignedserve.api.openai.response_format import ChatFormatter, CompletionFormatter
from tests.gateway.support import gateway
from tests.support.waiting import holds

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("formatter", "path", "fields"),
    [
        (ChatFormatter, "/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 20}),
        (CompletionFormatter, "/v1/completions", {"prompt": "hi " * 40, "echo": True, "logprobs": 20, "max_tokens": 0}),
        (CompletionFormatter, "/v1/completions", {"prompt": ["hello"] * 40, "max_tokens": 1}),
        (EmbeddingFormatter, "/v1/embeddings", {"input": ["hello"] * 40}),
    ],
    ids=["log-probabilities", "an echo", "many choices", "vectors"],
)
async def test_streams_go_on_while_a_long_answer_is_written(
    formatter: type[Any], path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, has_begun, body = threading.Event(), threading.Event(), formatter.body

    def waiting(*arguments: Any) -> Any:
        has_begun.set()
        assert goes_on.wait(5), "nothing else was answered"
        return body(*arguments)

    monkeypatch.setattr(formatter, "body", waiting)
    async with gateway(lambda _: Script((70,) * 20)) as served:
        writing = asyncio.create_task(served.client.post(path, json={"model": "tiny", **fields}))
        await holds(has_begun.is_set)
        assert (await served.chat(stream=True)).text.endswith("data: [DONE]\n\n")
        goes_on.set()
        assert (await writing).status_code == 200
