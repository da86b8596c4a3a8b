"""Every bad input: status, OpenAI's error object, the field to blame."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from alignedserve.api.errors import GenerationFailed, Overloaded, TimedOut, Unavailable, Unservable
from alignedserve.gateway import streaming
from tests.gateway.support import documents_held, error_of, gateway, saying, tokens_of
from tests.harnesses.scripted_backend import Script
from tests.support.marks import each
from tests.support.waiting import holds

CHAT_PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@each(
    ("field", "value"),
    [
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("modalities", ["text", "audio"]),
        ("moderation", {"model": "m"}),
        ("web_search_options", {}),
        ("best_of", 2),
        ("suffix", "end"),
        ("service_tier", "scale"),
        ("lora_path", "adapter"),
        ("vllm_xargs", {"a": 1}),
        ("regex", "a+"),
        ("use_beam_search", True),
        ("prompt_embeds", "AAAA"),
        ("repeat_penalty", 1.1),
        ("xtc_probability", 0.5),
        ("max_new_tokens", 5),
        ("truncation_side", "right"),
        ("include_reasoning", False),
        ("no_stop_trim", True),
    ],
)
async def test_what_we_do_not_support_is_refused_by_name(field: str, value: Any) -> None:
    async with gateway() as served:
        error = error_of(await served.chat(**{field: value}), 400)
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == field
    assert error["message"].startswith(field)
    assert error["message"].endswith("is not supported.")


@each(
    ("field", "value"),
    [
        ("store", False),
        ("parallel_tool_calls", True),
        ("modalities", ["text"]),
        ("response_format", {"type": "text"}),
        ("tools", []),
        ("tool_choice", "none"),
        ("metadata", {"a": "b"}),
        ("metadata", None),
        ("store", True),
        ("prediction", {"type": "content", "content": "x"}),
        ("prompt_cache_options", {"mode": "explicit", "ttl": "30m"}),
        ("prompt_cache_retention", "24h"),
        ("verbosity", "low"),
        ("use_beam_search", False),
        ("length_penalty", 1.0),
        ("repeat_penalty", 1.0),
        ("n_predict", -1),
        ("top_n_sigma", 0),
        ("include_reasoning", True),
        ("top_k", -1),
        ("audio", None),
        ("top_logprobs", 0),
        ("stop", None),
        ("max_tokens", None),
        ("temperature", None),
        ("stream_options", None),
        ("user", "someone"),
        ("safety_identifier", "hash"),
    ],
)
async def test_what_asks_for_nothing_is_accepted(field: str, value: Any) -> None:
    async with gateway() as served:
        assert (await served.chat(**{field: value})).status_code == 200


@each(("field", "value"), [("best_of", 1), ("suffix", ""), ("suffix", None), ("modalities", ["text"])])
async def test_completions_accept_what_asks_for_nothing(field: str, value: Any) -> None:
    async with gateway() as served:
        assert (await served.complete(**{field: value})).status_code == 200


@each(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"n": "1"}, "n"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": [1]}, "stop[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"store": "yes"}, "store"),
        ({"verbosity": "chatty"}, "verbosity"),
        ({"prediction": {"content": "x"}}, "prediction.type"),
        ({"top_k": -2}, "top_k"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"echo": True}, "echo"),
        ({"priority": 5000}, "priority"),
    ],
)
async def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    async with gateway() as served:
        error = error_of(await served.chat(**fields), 400)
        assert served.backend.submitted == []
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["code"] in ("invalid_value", "missing_required_parameter", "unsupported_parameter")


@each(
    ("fields", "limit"),
    [
        ({"top_k": 1 << 31}, "less than 2147483648"),
        ({"seed": 1 << 63}, "less than 9223372036854775808"),
        ({"stop_token_ids": [5] * 65}, "at most 64 items"),
        ({"logit_bias": {str(token): 1 for token in range(301)}}, "at most 300 items"),
    ],
)
async def test_limits_are_told(fields: dict[str, Any], limit: str) -> None:
    async with gateway() as served:
        assert limit in error_of(await served.chat(**fields), 400)["message"]


@each(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [100_000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
async def test_bad_fields_of_completions(fields: dict[str, Any], param: str) -> None:
    async with gateway() as served:
        assert error_of(await served.complete(**fields), 400)["param"] == param


@each("value", ["", "abc", "-5", "0", "1e3", "inf", "nan", "99999999", "٣"])
async def test_bad_slo_headers(value: str) -> None:
    async with gateway() as served:
        response = await served.chat(headers={"x-slo-ttft-ms": value.encode()})  # type: ignore[dict-item]
        assert error_of(response, 400)["param"] == "x-slo-ttft-ms"


async def test_unknown_model() -> None:
    async with gateway() as served:
        for response in (await served.chat(model="gpt-9"), await served.client.get("/v1/models/gpt-9")):
            error = error_of(response, 404)
            assert (error["code"], error["param"]) == ("model_not_found", "model")


@each(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'{"model": NaN}', 400),
        (b'{"model": "\xff"}', 400),
        (b'{"model": "\\ud800"}', 400),
        (b'{"model": ' + b"[" * 40 + b"]" * 40 + b"}", 400),
        (b'{"model": ' + b"[" * 50_000 + b"}", 400),
        (b'{"model": "' + b"x" * 200_000 + b'"}', 413),
        (json.dumps({str(number): 1 for number in range(2000)}).encode(), 400),
    ],
)
async def test_bad_bodies(body: bytes, status: int) -> None:
    async with gateway(max_body_bytes=100_000) as served:
        error = error_of(await served.client.post(CHAT_PATH, content=body, headers=JSON), status)
    assert len(error["message"]) < 200


async def test_a_body_without_length_is_cut_off_as_well() -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(1000):
            read += 1000
            yield b" " * 1000

    async with gateway(max_body_bytes=10_000) as served:
        error_of(await served.client.post(CHAT_PATH, content=endless(), headers=JSON), 413)
    assert read >= 11_000


async def test_other_content_types_are_refused() -> None:
    async with gateway() as served:
        response = await served.client.post(CHAT_PATH, content=b"{}", headers={"content-type": "text/plain"})
        assert error_of(response, 415)["code"] == "unsupported_media_type"


@each(
    ("path", "meant"),
    [
        ("/v1/v1/messages", "/v1/messages"),  # Anthropic's do
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/v1/responses/", "/v1/responses"),
    ],
)
async def test_a_base_url_with_a_v1_or_a_slash_too_few_or_too_many_is_noticed(path: str, meant: str) -> None:
    async with gateway() as served:
        error = error_of(await served.client.post(path, json={}), 404)
    assert error["message"] == f"Invalid URL (POST {path}). Did you mean {meant}? Look at the base URL of your client."


async def test_unknown_paths_and_methods() -> None:
    async with gateway() as served:
        unknown = error_of(await served.client.get("/v1/nothing"), 404)
        assert (unknown["code"], unknown["message"]) == ("unknown_url", "Invalid URL (GET /v1/nothing).")
        response = await served.client.get(CHAT_PATH)
        assert error_of(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"] == "POST"


@each(
    ("failure", "status", "retry_after"),
    [
        (Overloaded("the queue is full", retry_after_s=2.1), 503, "3"),
        (Unavailable("a worker was lost"), 503, "1"),
        (Unservable("too large"), 400, None),
        (TimedOut("silence"), 504, None),
        (GenerationFailed("broken"), 500, None),
    ],
)
async def test_failures_before_the_first_token(failure: Any, status: int, retry_after: str | None) -> None:
    async with gateway(lambda _: Script((), failure=failure)) as served:
        for is_streamed in (False, True):
            response = await served.chat(stream=is_streamed)
            error = error_of(response, status)
            assert error["message"] == str(failure)
            assert response.headers.get("retry-after") == retry_after


async def test_a_failure_after_the_first_token_is_an_event() -> None:
    script = saying("the quick", failure=Unavailable("a worker was lost"))
    async with gateway(script) as served:
        response = await served.chat(stream=True)
        assert (await served.chat()).status_code == 503
        assert served.services.limiter.num_open == 0
    assert response.status_code == 200
    assert '"content":"the"' in response.text
    last = 'data: {"error":{"message":"a worker was lost","type":"server_error","param":null,"code":"unavailable"}}\n\n'
    assert response.text.endswith(last)


async def test_faults_of_ours_show_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(_: Any) -> Script:
        raise ZeroDivisionError("a secret of the inside")

    async with gateway(breaks) as served:
        response = await served.chat()
        error = error_of(response, 500)
    assert error["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in caplog.text


async def test_too_many_requests_at_once_is_our_capacity() -> None:
    goes_on = asyncio.Event()
    async with gateway(saying("the", held_until=goes_on), max_concurrent_requests=2) as served:
        first = asyncio.create_task(served.chat(n=2))
        await holds(lambda: served.services.limiter.num_open == 2)
        response = await served.chat()
        assert error_of(response, 503)["code"] == "overloaded"
        assert response.headers["retry-after"] == "1"
        goes_on.set()
        assert (await first).status_code == 200
        assert error_of(await served.chat(n=3), 400)["param"] == "prompt"
        goes_on.clear()
        one = asyncio.create_task(served.chat())
        await holds(lambda: served.services.limiter.num_open == 1)
        assert error_of(await served.chat(n=2), 503)["code"] == "overloaded"
        goes_on.set()
        assert (await one).status_code == 200


async def test_documents_that_wait_take_no_place_of_chat() -> None:
    goes_on = asyncio.Event()
    async with gateway(documents_held("the", goes_on), max_concurrent_requests=1, max_best_effort_requests=2) as served:
        waiting = [asyncio.create_task(served.chat(service_tier="flex")) for _ in range(2)]
        await holds(lambda: served.services.limiter.num_open == 2)
        response = await served.chat(service_tier="flex")
        assert error_of(response, 429)["code"] == "resource_unavailable"
        assert response.headers["retry-after"] == "30"
        assert (await served.chat()).status_code == 200
        goes_on.set()
        assert [(await one).status_code for one in waiting] == [200, 200]


async def test_a_failing_request_is_logged_once_without_its_content(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway(api_keys=("right",)) as served:
        headers = {"authorization": "Bearer verysecret"}
        response = await served.chat(headers=headers, messages=[{"role": "user", "content": "private"}])
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("alignedserve")]
    assert len(lines) == 1
    assert response.headers["x-request-id"] in lines[0]
    assert "verysecret" not in caplog.text + response.text
    assert "private" not in caplog.text + response.text


async def test_refusals_do_not_repeat_what_was_sent() -> None:
    secret = "a private text"
    async with gateway() as served:
        completions: list[dict[str, Any]] = [{"suffix": secret}, {"prompt": {"a": secret}}]
        chats: list[dict[str, Any]] = [{"tool_choice": secret}, {"seed": secret}, {"n": 0, secret: 1}]
        answers = [await served.complete(**fields) for fields in completions]
        answers += [await served.chat(**fields) for fields in chats]
    assert [answer.status_code for answer in answers] == [400] * 5
    assert all(secret not in answer.text for answer in answers)


async def test_half_characters_in_scripts_do_not_break_scoring() -> None:
    async with gateway(lambda _: Script(tokens_of("€")[:2])) as served:
        assert (await served.complete(logprobs=1, echo=True, prompt="€")).status_code == 200


async def test_a_client_that_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_SEND_TIMEOUT_S", 0.1)
    monkeypatch.setattr(streaming, "_CHECK_PAUSE_S", 0.02)
    body = json.dumps({"model": "tiny", "prompt": "a", "stream": True}).encode()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[str] = []

    async def receive() -> Any:
        return incoming.pop() if incoming else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1"}
    scope |= {"headers": [(b"content-type", b"application/json"), (b"host", b"localhost")]}
    async with gateway(saying("the quick brown fox", token_delay_s=0.05)) as served, asyncio.timeout(20):
        await served.app(scope, receive, send)
        assert served.services.limiter.num_open == 0
    assert sent == ["http.response.start", "http.response.body"]
