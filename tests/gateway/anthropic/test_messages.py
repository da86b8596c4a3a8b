"""Anthropic's Messages API: streamed bytes, bodies, every field that changes an answer."""

from typing import Any

from alignedserve.api.errors import GenerationFailed
from alignedserve.core.request import RequestClass, Slo
from tests.gateway.anthropic.messages_support import ask, count, events_of, failure_of, message_of
from tests.gateway.support import gateway, saying, tokens_of
from tests.harnesses.scripted_backend import Script
from tests.support.marks import each


async def test_the_bytes_of_a_stream() -> None:
    async with gateway(saying("the dog", num_cached_tokens=2)) as served:
        response = await ask(served, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    prompt_len = len(served.backend.submitted[0].prompt_token_ids)
    usage = f'"input_tokens":{prompt_len - 2},"cache_creation_input_tokens":0,"cache_read_input_tokens":2'
    lines = [
        f'{{"type":"message_start","message":{{"id":"msg_{response.headers["request-id"]}","type":"message",'
        '"role":"assistant","model":"tiny","content":[],'
        f'"usage":{{{usage},"output_tokens":1,"service_tier":"standard"}},"stop_reason":null,"stop_sequence":null}}}}',
        '{"type":"ping"}',
        '{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}',
        '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"the"}}',
        '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":" dog"}}',
        '{"type":"content_block_stop","index":0}',
        '{"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
        f'"usage":{{{usage},"output_tokens":3}}}}',
        '{"type":"message_stop"}',
    ]
    expected = [f"event: {line.split(chr(34))[3]}\ndata: {line}\n\n" for line in lines]
    assert response.text == "".join(expected)
    assert len(events_of(response)) == 8


async def test_the_bytes_of_a_message() -> None:
    async with gateway(saying("the dog")) as served:
        response = await ask(served)
    prompt_len = len(served.backend.submitted[0].prompt_token_ids)
    assert response.text == (
        f'{{"id":"msg_{response.headers["request-id"]}","type":"message","role":"assistant","model":"tiny",'
        '"content":[{"type":"text","text":"the dog"}],'
        f'"usage":{{"input_tokens":{prompt_len},"cache_creation_input_tokens":0,"cache_read_input_tokens":0,'
        '"output_tokens":3,"service_tier":"standard"},"stop_reason":"end_turn","stop_sequence":null}'
    )
    message_of(response)


@each(
    ("fields", "reason", "sequence", "shown"),
    [
        ({}, "end_turn", None, "the quick brown fox"),
        ({"max_tokens": 2}, "max_tokens", None, "the quick"),
        ({"stop_sequences": ["zzz", " brown"]}, "stop_sequence", " brown", "the quick"),
        ({"stop_sequences": ["zzz"]}, "end_turn", None, "the quick brown fox"),
        ({"stop_sequences": ["fox", "wn fo"]}, "stop_sequence", "wn fo", "the quick bro"),
    ],
)
async def test_why_an_answer_ends(fields: dict[str, Any], reason: str, sequence: str | None, shown: str) -> None:
    async with gateway(saying("the quick brown fox")) as served:
        message = message_of(await ask(served, **fields))
        events = events_of(await ask(served, **fields, stream=True))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert message["content"][0]["text"] == shown
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == shown


async def test_an_answer_may_ask_for_more_than_the_context_has_room_for() -> None:
    async with gateway(lambda _: Script(tokens_of("dog" * 400))) as served:
        message = message_of(await ask(served, max_tokens=32_000))
        (request,) = served.backend.submitted
    assert request.max_context_len == 256
    assert message["stop_reason"] == "model_context_window_exceeded"


async def test_an_empty_answer_has_no_blocks() -> None:
    async with gateway(saying("")) as served:
        assert message_of(await ask(served))["content"] == []
        kinds = [event["type"] for event in events_of(await ask(served, stream=True))]
    assert kinds == ["message_start", "ping", "message_delta", "message_stop"]


async def test_fields_reach_the_request() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 7, "stop_sequences": ["x"],
        "metadata": {"user_id": "someone"}, "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "mcp_servers": [], "container": None, "speed": "standard",
    }  # fmt: skip
    async with gateway() as served:
        message_of(await ask(served, **fields))
        sampling = served.backend.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 3, 7)


@each(
    ("asked", "answered", "request_class", "priority"),
    [
        ("auto", "standard", RequestClass.REAL_TIME, 0),
        ("standard_only", "standard", RequestClass.REAL_TIME, 0),
        ("priority", "priority", RequestClass.REAL_TIME, -1),
        ("flex", "batch", RequestClass.BEST_EFFORT, 0),
    ],
)
async def test_service_tiers(asked: str, answered: str, request_class: RequestClass, priority: int) -> None:
    async with gateway() as served:
        assert message_of(await ask(served, service_tier=asked))["usage"]["service_tier"] == answered
        (request,) = served.backend.submitted
    assert (request.request_class, request.priority) == (request_class, priority)


async def test_objectives_are_told_as_in_the_other_api() -> None:
    async with gateway() as served:
        headers = {"x-slo-ttft-ms": "5000"}
        message = message_of(await ask(served, headers=headers))
        events = events_of(await ask(served, headers=headers, stream=True))
        assert served.backend.submitted[0].slo == Slo(ttft_s=5.0)
    for told in (message, events[-2]):
        assert told["alignedserve"]["slo"]["ttft"]["held"] is True


async def test_turns_of_any_form_are_the_same_conversation() -> None:
    text = {"type": "text", "text": "one", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    same: list[dict[str, Any]] = [
        {"system": "be brief", "messages": [{"role": "user", "content": "one\ntwo"}]},
        {
            "system": [{"type": "text", "text": "be brief"}],
            "messages": [{"role": "user", "content": [text]}, {"role": "user", "content": "two"}],
        },
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [text, {"type": "text", "text": "two", "citations": None}]},
            ]
        },
    ]
    async with gateway() as served:
        for fields in same:
            message_of(await ask(served, **fields))
        counts = {await count(served, **fields) for fields in same}
        prompts = {request.prompt_token_ids for request in served.backend.submitted}
    assert len(prompts) == 1
    assert counts == {len(prompt) for prompt in prompts}


async def test_a_failure_amid_a_stream_is_its_last_event() -> None:
    def breaking(_: object) -> Script:
        return Script(tokens_of("the dog"), failure=GenerationFailed("gone"))

    async with gateway(breaking) as served:
        response = await ask(served, stream=True)
        whole = failure_of(await ask(served), 500)
    last = events_of(response)[-1]
    assert last == {
        "type": "error",
        "error": {"type": "api_error", "message": "gone"},
        "request_id": response.headers["request-id"],
    }
    assert whole["type"] == "api_error"


async def test_models_in_the_shape_of_the_header() -> None:
    async with gateway() as served:
        ours = (await served.client.get("/v1/models")).json()
        theirs = (await served.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
    assert ours["object"] == "list"
    assert theirs["data"][0]["type"] == "model"
