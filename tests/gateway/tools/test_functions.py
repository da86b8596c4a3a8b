"""Functions, which tools replaced: taken and answered in the shapes of older clients."""

import json
from typing import Any

from tests.gateway.support import chunks_of, error_of, gateway
from tests.gateway.tool_support import CALL, HERMES, USER, accepts, function, grammar_of, model_with, prompt_of, saying
from tests.support.marks import each

WEATHER = function()["function"]
FUNCTION_CALL = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
CALLED = {"role": "assistant", "content": None, "function_call": FUNCTION_CALL}
RESULT = {"role": "function", "name": "get_weather", "content": "sunny"}


@each("tokens_per_step", [1, 100])
async def test_a_call_in_the_older_shape(tokens_per_step: int) -> None:
    model = model_with(HERMES)
    async with gateway(saying(model, "Let me see.\n" + CALL, tokens_per_step=tokens_per_step), model=model) as served:
        whole = (await served.chat(functions=[WEATHER])).json()["choices"][0]
        chunks = [chunk["choices"][0] for chunk in chunks_of(await served.chat(functions=[WEATHER], stream=True))]

    message = {"role": "assistant", "content": "Let me see.\n", "refusal": None, "function_call": FUNCTION_CALL}
    assert (whole["message"], whole["finish_reason"]) == (message, "function_call")
    deltas = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
    assert [delta["name"] for delta in deltas if "name" in delta] == ["get_weather"]
    assert "".join(delta["arguments"] for delta in deltas) == '{"city": "Oslo"}'
    assert chunks[-1]["finish_reason"] == "function_call"


async def test_the_template_shows_functions_calls_and_results() -> None:
    model = model_with(HERMES)
    async with gateway(saying(model, "hi"), model=model) as served:
        response = await served.chat(messages=[USER, CALLED, RESULT], functions=[WEATHER])
        assert response.status_code == 200, response.text
        prompt = prompt_of(model, served.backend.submitted[0])
        counted = await served.client.post("/tokenize", json={"messages": [USER], "functions": [WEATHER]})
        usage = (await served.chat(functions=[WEATHER])).json()["usage"]
    assert json.dumps(function()) in prompt
    assert f"<|assistant|>{CALL}<|end|>" in prompt
    assert "sunny<|end|>" in prompt
    assert counted.json()["count"] == usage["prompt_tokens"]


@each(
    ("choice", "allowed", "forbidden"),
    [
        ("auto", ["hi", CALL], [f"{CALL}\n{CALL}"]),
        ({"name": "get_weather"}, [CALL], ["hi"]),
        ("none", [], []),
    ],
)
async def test_answers_are_held_to_the_choice(choice: Any, allowed: list[str], forbidden: list[str]) -> None:
    model = model_with(HERMES)
    grammar = await grammar_of(model, functions=[WEATHER, WEATHER | {"name": "other"}], function_call=choice)
    assert (grammar == "") == (choice == "none")
    assert [text for text in (*allowed, *forbidden) if accepts(model, grammar, text)] == allowed


@each(
    ("fields", "param"),
    [
        ({"functions": [WEATHER], "tools": [function()]}, "functions"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [WEATHER, WEATHER]}, "functions[1].name"),
        ({"functions": [{"name": "f", "parameters": {"not": {}}, "strict": True}]}, "functions[0].parameters"),
        ({"functions": [WEATHER], "function_call": {"name": "other"}}, "function_call"),
        ({"functions": [WEATHER], "function_call": "required"}, "function_call"),
        ({"function_call": {"name": "get_weather"}}, "function_call"),
        ({"tools": [function()], "function_call": "none"}, "function_call"),
        ({"functions": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [USER, RESULT]}, "messages[1].role"),
        ({"messages": [USER, CALLED, USER]}, "messages[2].role"),
        ({"messages": [USER, CALLED, RESULT | {"name": "other"}]}, "messages[2].name"),
        ({"messages": [USER | {"function_call": FUNCTION_CALL}]}, "messages[0].function_call"),
        ({"messages": [USER, CALLED | {"function_call": {"name": "f", "arguments": "{"}}, RESULT]}, "messages[2].name"),
    ],
)
async def test_bad_functions_are_named(fields: dict[str, Any], param: str) -> None:
    model = model_with(HERMES)
    async with gateway(saying(model, "hi"), model=model) as served:
        assert error_of(await served.chat(**fields), 400)["param"] == param


async def test_members_of_a_choice_that_nobody_knows_are_named() -> None:
    model, choice = model_with(HERMES), {"name": "get_weather", "other": 1}
    async with gateway(saying(model, "hi"), model=model) as served:
        response = await served.chat(functions=[WEATHER], function_call=choice)
    assert response.headers["x-alignedserve-ignored-fields"] == "function_call.other"
