"""What clients and operators are told of tools: members of a choice that nobody knows, and metrics."""

from typing import Any

from tests.gateway.support import error_of, gateway
from tests.gateway.tool_support import CALL, HERMES, USER, function, model_with, saying
from tests.support.marks import each

OF_CHAT = {"messages": [USER], "tools": [function()]}
OF_RESPONSES = {"input": "hello", "tools": [{"type": "function", "name": "get_weather"}]}


@each(
    ("path", "fields", "choice", "named"),
    [
        (
            "/v1/chat/completions",
            OF_CHAT,
            {"type": "function", "function": {"name": "get_weather", "mood": 1}, "other": 1, "unset": None},
            "tool_choice.other, tool_choice.function.mood",
        ),
        (
            "/v1/chat/completions",
            OF_CHAT,
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function()], "most": 1}},
            "tool_choice.allowed_tools.most",
        ),
        (
            "/v1/chat/completions",
            OF_CHAT,
            function(),
            "tool_choice.function.description, tool_choice.function.parameters",
        ),
        (
            "/v1/responses",
            OF_RESPONSES,
            {"type": "function", "name": "get_weather", "other": 1},
            "tool_choice.other",
        ),
    ],
)
async def test_members_of_a_choice_that_nobody_knows_are_named(
    path: str, fields: dict[str, Any], choice: dict[str, Any], named: str
) -> None:
    model, body = model_with(HERMES), {"model": "tiny", **fields, "tool_choice": choice}
    async with gateway(saying(model, CALL), model=model) as served:
        answer = await served.client.post(path, json=body)
    async with gateway(saying(model, CALL), model=model, strict=True) as served:
        refusal = await served.client.post(path, json=body)
    assert (answer.status_code, answer.headers.get("x-alignedserve-ignored-fields")) == (200, named)
    assert error_of(refusal, 400)["code"] == "unknown_parameter"


async def test_metrics_count_an_answer_with_calls_as_stopped() -> None:
    model = model_with(HERMES)
    async with gateway(saying(model, CALL), model=model) as served:
        await served.chat(tools=[function()])
        text = (await served.client.get("/metrics")).text
    assert 'vllm:request_success_total{finished_reason="stop",model_name="tiny"} 1.0' in text
    assert "tool_calls" not in text
