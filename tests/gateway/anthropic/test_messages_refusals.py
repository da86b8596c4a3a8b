"""Every bad body of the Messages API: Anthropic's error object, and the field to blame by its own name."""

from typing import Any

from tests.gateway.anthropic.messages_support import ask, failure_of, message_of
from tests.gateway.support import error_of, gateway
from tests.support.marks import each

TEXT = {"type": "text", "text": "hello"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "42"}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@each(
    ("field", "value"),
    [
        ("container", "container_1"),
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        ("diagnostics", {"previous_message_id": "msg_1"}),
        ("fallbacks", [{"model": "other"}]),
        ("inference_geo", "eu"),
        ("mcp_servers", [{"type": "url", "url": "http://localhost", "name": "a"}]),
        ("speed", "fast"),
        ("stop", "x"),
        ("guided_regex", "a+"),
        ("max_completion_tokens", 5),
        ("presence_penalty", 1),
        ("lora_path", "adapter"),
    ],
)
async def test_what_we_do_not_support_is_refused_by_name(field: str, value: Any) -> None:
    async with gateway() as served:
        error = failure_of(await ask(served, **{field: value}), 400)
    assert error == {"type": "invalid_request_error", "message": f"{field} is not supported."}


@each(
    "fields",
    [{"response_format": {"type": "text"}}, {"stream_options": {"include_usage": True}}, {"top_logprobs": 0}],
)
async def test_fields_of_chat_that_ask_for_nothing_are_accepted(fields: dict[str, Any]) -> None:
    async with gateway() as served:
        message_of(await ask(served, **fields))


@each(
    ("fields", "path"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": ["hello"]}]}, "messages[0].content"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"service_tier": "scale"}, "service_tier"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["a"] * 1000}, "stop_sequences"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"output_format": {"type": "json_object"}}, "output_format.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto", "name": "a"}}, "tool_choice.name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a", "input_schema": {}, "input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        (user(TEXT, IMAGE), "messages[0]"),
        (user({"type": "document", "source": {}}), "messages[0].content[0].type"),
        (user({"type": "tool_use", "id": "a", "name": "a", "input": {}}), "messages[0].content[0].type"),
        (user({"type": "text"}), "messages[0].content[0].text"),
        (user({"type": ["text"]}), "messages[0].content[0].type"),
        (user(TEXT | {"cache_control": {"type": "forever"}}), "messages[0].content[0].cache_control.type"),
        (user(TEXT, RESULT), "messages[0].content[1]"),
        (user(RESULT | {"content": [IMAGE]}), "messages[0].content[0].content[0].type"),
    ],
)
async def test_wrong_fields_are_named_as_they_were_sent(fields: dict[str, Any], path: str) -> None:
    async with gateway() as served:
        error = failure_of(await ask(served, **fields), 400)
        assert served.backend.submitted == []
    assert error["type"] == "invalid_request_error"
    assert path in error["message"].replace(":", " ").replace(".  ", " ").split() or f"{path}." in error["message"]


async def test_fields_that_nobody_knows_are_ignored_and_named() -> None:
    odd: dict[str, Any] = user(TEXT | {"mood": 1}, TEXT | {"mood": 2})
    odd |= {"nonsense": 1, "tools": [], "system": [TEXT | {"volume": 1}], "metadata": {"team": "a"}}
    async with gateway() as served:
        response = await ask(served, **odd)
        message_of(response)
    named = response.headers["x-alignedserve-ignored-fields"]
    assert named == "nonsense, metadata.team, system[].volume, messages[].content[].mood"
    async with gateway(strict=True) as served:
        assert "nonsense" in failure_of(await ask(served, nonsense=1), 400)["message"]
        assert "mood" in failure_of(await ask(served, **user(TEXT | {"mood": 1})), 400)["message"]


async def test_errors_show_no_content() -> None:
    async with gateway() as served:
        for fields in (user({"type": "secret"}), {"thinking": {"type": "secret"}}, {"system": {"secret": 1}}):
            assert "secret" not in failure_of(await ask(served, **fields), 400)["message"]


@each(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/nothing", 404, "not_found_error"),
        ("POST", "/v1/messages/count_tokens", 415, "invalid_request_error"),
    ],
)
async def test_errors_of_any_path_of_the_api(method: str, path: str, status: int, kind: str) -> None:
    async with gateway() as served:
        assert failure_of(await served.client.request(method, path), status)["type"] == kind


async def test_other_paths_answer_in_the_shape_of_the_client() -> None:
    async with gateway(api_keys=("right",)) as served:
        error_of(await served.client.get("/v1/nothing"), 401)
        assert failure_of(await served.client.post("/v1/messages"), 401)["type"] == "authentication_error"
        theirs = {"anthropic-version": "2023-06-01"}
        failure_of(await served.client.get("/v1/models", headers=theirs), 401)
        failure_of(await served.client.get("/v1/nothing", headers=theirs | {"x-api-key": "right"}), 404)
        error_of(await served.client.get("/v1/nothing", headers={"x-api-key": "right"}), 404)


async def test_a_bearer_stands_before_another_key() -> None:
    async with gateway(api_keys=("right",)) as served:
        both = {"authorization": "Bearer right", "x-api-key": "wrong"}
        message_of(await ask(served, headers=both))
        failure_of(await ask(served, headers={"authorization": "Bearer wrong", "x-api-key": "right"}), 401)


async def test_a_body_that_is_too_large() -> None:
    async with gateway(max_body_bytes=1000) as served:
        error = failure_of(await ask(served, system="a" * 2000), 413)
    assert error["type"] == "request_too_large"
