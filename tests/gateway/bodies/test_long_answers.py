"""Long answers, which are written beside the event loop."""

import asyncio
import threading
from typing import Any

import pytest

from alignedserve.api.embeddings.response_format import EmbeddingFormatter
from alignedserve.api.metrics.gateway_metrics import CollectedMetrics
from alignedserve.api.openai.response_format import ChatFormatter, CompletionFormatter
from alignedserve.api.responses.formatter import ResponsesFormatter
from tests.gateway.support import gateway
from tests.harnesses.scripted_backend import Script
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
    await streams_go_on_while(formatter, "body", "POST", path, {"model": "tiny", **fields}, monkeypatch)


async def test_streams_go_on_while_the_last_events_of_a_response_hold_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    asked = {"model": "tiny", "input": "hello", "stream": True, **shown}
    await streams_go_on_while(ResponsesFormatter, "closing_events", "POST", "/v1/responses", asked, monkeypatch)


async def test_streams_go_on_while_metrics_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    await streams_go_on_while(CollectedMetrics, "render", "GET", "/metrics", None, monkeypatch)


async def test_metrics_do_not_wait_for_long_bodies() -> None:
    goes_on = threading.Event()
    async with gateway() as served:
        lanes = served.services.lanes
        bodies = [asyncio.create_task(lanes.run(length, goes_on.wait)) for length in (10_000, 10_000, 1_000_000)]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(20):
                assert (await served.client.get("/metrics")).status_code == 200
        finally:
            goes_on.set()
            await asyncio.gather(*bodies)


async def streams_go_on_while(
    writer: type[Any], name: str, method: str, path: str, asked: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let this writer wait over the answer to what is asked, until a stream has had its end."""
    goes_on, has_begun, write = threading.Event(), threading.Event(), getattr(writer, name)
    are_others_answered: list[bool] = []

    def waiting(*arguments: Any) -> Any:
        has_begun.set()
        are_others_answered.append(goes_on.wait(20))
        return write(*arguments)

    monkeypatch.setattr(writer, name, waiting)
    async with gateway(lambda _: Script((70,) * 20)) as served:
        writing = asyncio.create_task(served.client.request(method, path, json=asked))
        await holds(has_begun.is_set)
        assert (await served.chat(stream=True)).text.endswith("data: [DONE]\n\n")
        goes_on.set()
        assert (await writing).status_code == 200
    assert are_others_answered == [True]
