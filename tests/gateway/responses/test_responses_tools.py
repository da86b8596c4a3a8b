"""Calls, thoughts and formats of the Responses API, over models that have them; an agent's loop by OpenAI's SDK."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from alignedserve.api.models.model_services import ModelCard
from alignedserve.core.request import Request
from tests.gateway.batches.batch_server import listening
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway
from tests.gateway.responses.responses_support import events_of, response_of
from tests.gateway.support import EOS, error_of, gateway
from tests.gateway.tool_support import HERMES, THINKING, model_with
from tests.harnesses.scripted_backend import Script
from tests.support.marks import each

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'

CALLED = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "x"}
ASKED = {"role": "user", "content": "Oslo?"}


def saying(model: ModelCard, *texts: str) -> Callable[[Request], Script]:
    """Say these texts one after the other, control tokens included."""
    tokenizer, left = model.load_tokenizer(), list(texts)
    return lambda _: Script((*tokenizer.encode(left.pop(0), add_special_tokens=False), EOS))


@each(
    ("items", "problem"),
    [
        ([OUTPUT], "no call before it has the id 'call_1'"),
        ([CALLED], "the call 'call_1' has no result, which must follow it"),
        ([CALLED, ASKED], "the call 'call_1' before it has no result yet, which must follow it at once"),
    ],
)
async def test_a_long_history_is_told_which_of_its_calls_is_wrong(items: list[dict[str, Any]], problem: str) -> None:
    async with gateway(model=model_with(HERMES)) as served:
        answer = await served.client.post("/v1/responses", json={"model": "tiny", "input": [ASKED, *items]})
    assert error_of(answer, 400)["message"] == f"Invalid value for input: {problem}."


@each("arguments", ['{"city":', "[1]", "{}"])
@each("status", ["incomplete", "completed"])
async def test_a_cut_call_counts_with_its_output_and_is_left_out_without(status: str, arguments: str) -> None:
    cut = CALLED | {"status": status, "arguments": arguments}
    is_whole = (status, arguments) == ("completed", "{}")
    model = model_with(HERMES)
    async with gateway(saying(model, *["ok"] * 3), model=model) as served:
        for behind in ([OUTPUT], [ASKED], []):
            body = {"model": "tiny", "store": False, "input": [ASKED, cut, *behind]}
            answer = await served.client.post("/v1/responses", json=body)
            assert answer.status_code == (400 if is_whole and OUTPUT not in behind else 200), answer.text


@each("continues", ["previous_response_id", "conversation"])
@each("has_output", [True, False])
async def test_a_stored_turn_that_was_cut_goes_on(continues: str, has_output: bool, tmp_path: Path) -> None:
    model = model_with(HERMES)
    async with batch_gateway(tmp_path, saying(model, CALL, "ok"), model=model, is_driven=False) as served:
        body: dict[str, Any] = {"model": "tiny", "tools": [WEATHER]}
        if continues == "conversation":
            body["conversation"] = (await served.client.post("/v1/conversations", json={})).json()["id"]
        first = response_of(
            await served.client.post("/v1/responses", json=body | {"input": [ASKED], "max_output_tokens": 40})
        )
        [call] = first["output"]
        assert (call["type"], call["status"]) == ("function_call", "incomplete")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "cut off"}
        body |= {"input": [output] if has_output else [ASKED]}
        body |= {"previous_response_id": first["id"]} if continues == "previous_response_id" else {}
        response_of(await served.client.post("/v1/responses", json=body))
        assert ("<|tool|>cut off" in prompts_of(served, model)[1]) == has_output


def prompts_of(served: BatchGateway, model: ModelCard) -> Sequence[str]:
    decode = model.load_tokenizer().decode
    return [decode(request.prompt_token_ids, skip_special_tokens=False) for request in served.backend.submitted]


@asynccontextmanager
async def sdk(folder: Path, model: ModelCard, *texts: str) -> AsyncIterator[tuple[Any, BatchGateway]]:
    import openai

    async with (
        batch_gateway(folder, saying(model, *texts), model=model) as served,
        listening(served.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, served


async def test_an_agents_loop_over_stored_responses(tmp_path: Path) -> None:
    model = model_with(HERMES)
    tools: Any = [WEATHER]
    async with sdk(tmp_path, model, "I look.\n" + CALL, "It is sunny.") as (client, served):
        first = await client.responses.create(model="tiny", input="Oslo?", tools=tools)
        assert [item.type for item in first.output] == ["message", "function_call"]
        call: Any = first.output[1]
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
        second = await client.responses.create(model="tiny", input=output, tools=tools, previous_response_id=first.id)
        assert second.output_text == "It is sunny."
        assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}' in prompts_of(served, model)[1]
        assert "<|tool|>sunny<|end|>" in prompts_of(served, model)[1]


async def test_an_agents_loop_without_state(tmp_path: Path) -> None:
    model = model_with(HERMES)
    tools: Any = [WEATHER]
    async with sdk(tmp_path, model, CALL, "It is sunny.") as (client, served):
        history: Any = [{"role": "user", "content": "Oslo?"}]
        first = await client.responses.create(model="tiny", input=history, tools=tools, store=False)
        history += [item.model_dump() for item in first.output]
        call: Any = first.output[0]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
        second = await client.responses.create(model="tiny", input=history, tools=tools, store=False)
        assert second.output_text == "It is sunny."
        assert "<|tool|>sunny<|end|>" in prompts_of(served, model)[1]


async def test_the_sdk_streams_and_parses_calls(tmp_path: Path) -> None:
    import openai

    class GetWeather(BaseModel):
        city: str

    model = model_with(HERMES)
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    async with (
        sdk(tmp_path, model, CALL) as (client, _),
        client.responses.stream(model="tiny", input="Oslo?", tools=[tool]) as stream,
    ):
        events = [event async for event in stream]
        final = await stream.get_final_response()
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    [call] = final.output
    assert call.type == "function_call"
    assert ("".join(pieces), call.parsed_arguments) == (call.arguments, GetWeather(city="Oslo"))


async def test_the_sdk_parses_structured_output(tmp_path: Path) -> None:
    class Answer(BaseModel):
        city: str

    model = model_with(HERMES)
    async with sdk(tmp_path, model, '{"city": "Oslo"}') as (client, served):
        parsed = await client.responses.parse(model="tiny", input="Where?", text_format=Answer)
        assert parsed.output_parsed == Answer(city="Oslo")
        [request] = served.backend.submitted
        assert "city" in request.sampling.grammar


async def test_thoughts_are_items_of_their_own(tmp_path: Path) -> None:
    model = model_with(THINKING)
    text = "<think>\nit rains\n</think>\n\nyes"
    async with batch_gateway(tmp_path, saying(model, text, text, "so"), model=model) as served:
        body: dict[str, Any] = {"model": "tiny", "input": "hello"}
        whole = response_of(await served.client.post("/v1/responses", json=body))
        events = events_of(await served.client.post("/v1/responses", json=body | {"stream": True}))
        thought, answer = whole["output"]
        assert thought["content"][0]["text"].strip() == "it rains"
        assert answer["content"][0]["text"].strip() == "yes"
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        pieces = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
        assert "".join(pieces) == thought["content"][0]["text"]
        body |= {"input": [*whole["output"], {"role": "user", "content": "so?"}]}
        response_of(await served.client.post("/v1/responses", json=body))


def of_a_namespace(*tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": "weather", "tools": list(tools)}


@each(
    "choice",
    [
        {"type": "function", "function": {"name": "get_weather"}},  # as chat completions have it
        {"type": "allowed_tools", "mode": "auto", "tools": 7},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}, 7]},
    ],
)
async def test_a_choice_of_another_shape_is_refused_with_the_shapes_of_this_api(choice: dict[str, Any]) -> None:
    async with gateway(model=model_with(HERMES)) as served:
        body = {"model": "tiny", "input": "hello", "tools": [WEATHER], "tool_choice": choice}
        error = error_of(await served.client.post("/v1/responses", json=body), 400)
    assert error["param"] == "tool_choice"
    assert "{type: 'function', name}" in error["message"]


async def test_errors_of_tools_and_formats_name_fields_of_this_api(tmp_path: Path) -> None:
    model = model_with(HERMES)
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "nothing"}}
    orphan = {"type": "function_call_output", "call_id": "a", "output": "x"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER | {"name": "no name"}]}, "tools[0].name"),
        ({"tools": [of_a_namespace(WEATHER, WEATHER | {"name": "no name"})]}, "tools[0].tools[1].name"),
        (
            {"tools": [of_a_namespace(WEATHER, WEATHER | {"name": "rain"}), WEATHER | {"parameters": {"not": {}}}]},
            "tools[1].parameters",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": schema}}, "text.format.schema"),
        ({"input": [orphan]}, "input"),
    ]
    async with batch_gateway(tmp_path, model=model, is_driven=False) as served:
        for fields, param in cases:
            answer = await served.client.post("/v1/responses", json={"model": "tiny", "input": "hello", **fields})
            error = error_of(answer, 400)
            assert error["param"] == param, error
            assert "messages" not in error["message"]
            assert "response_format" not in error["message"]
