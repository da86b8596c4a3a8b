"""Chat completions of a model that answers in channels, as gpt-oss does."""

from typing import Any

import pytest

from alignedserve.api.models.model_services import ModelCard
from tests.gateway.support import chunks_of, error_of, gateway
from tests.gateway.tool_support import (
    HARMONY,
    USER,
    accepts,
    called,
    choice_of,
    function,
    grammar_of,
    harmony_model,
    model_with,
    prompt_of,
    result,
    saying,
)
from tests.support.marks import each

NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>so it is{NEXT}"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}'
TEMPLATE_CALL = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}'
FINAL = "<|channel|>final<|message|>hello"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}}}


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
@pytest.mark.parametrize("model", [harmony_model(), model_with(HARMONY)], ids=["tokens", "text"])
async def test_an_answer_in_channels(model: ModelCard, tokens_per_step: int) -> None:
    script = saying(model, f"{THOUGHT}{FINAL}", tokens_per_step=tokens_per_step)
    async with gateway(script, model=model) as served:
        whole = (await served.chat()).json()
        chunks = chunks_of(await served.chat(stream=True))
    message = {"role": "assistant", "content": "hello", "refusal": None, "reasoning_content": "so it is"}
    assert whole["choices"][0]["message"] == message
    assert 0 < whole["usage"]["completion_tokens_details"]["reasoning_tokens"] < whole["usage"]["completion_tokens"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "so it is"
    assert "".join(delta.get("content", "") for delta in deltas) == "hello"


async def test_a_call() -> None:
    choice = await choice_of(harmony_model(), THOUGHT + CALL, tools=[function()])
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


@pytest.mark.parametrize("tokens_per_step", [1, 22, 40, 200])
async def test_a_thought_after_words_to_the_user_is_behind_them_however_its_tokens_come(tokens_per_step: int) -> None:
    model = harmony_model()
    words = f"<|channel|>commentary<|message|>I look now{NEXT}"
    second = f"<|channel|>analysis<|message|>and so on{NEXT}"
    script = saying(model, f"{THOUGHT}{words}{second}{FINAL}", tokens_per_step=tokens_per_step)
    tool: dict[str, Any] = function()["function"]
    message = {"messages": [USER], "max_tokens": 500}
    message |= {"tools": [{"name": tool["name"], "input_schema": tool["parameters"]}]}
    answer = {"input": "hello", "tools": [tool | {"type": "function"}], "include": ["message.output_text.logprobs"]}
    async with gateway(script, model=model) as served:
        response = (await served.client.post("/v1/responses", json={"model": "tiny"} | answer)).json()
        blocks = (await served.client.post("/v1/messages", json={"model": "tiny"} | message)).json()["content"]
    texts = [item["content"][0]["text"].strip() for item in response["output"]]
    assert texts == ["so it is", "I look now", "and so on", "hello"]
    assert [block.get("thinking", block.get("text")).strip() for block in blocks] == texts
    for place in (1, 3):  # each text has the log-probabilities of its own tokens
        part = response["output"][place]["content"][0]
        assert part["text"].endswith("".join(entry["token"] for entry in part["logprobs"]))


@pytest.mark.parametrize("tokens_per_step", [1, 9, 1000])
async def test_words_after_a_call_are_behind_it_however_their_tokens_come(tokens_per_step: int) -> None:
    model = harmony_model()
    tool: dict[str, Any] = function()["function"]
    script = saying(
        model, f"{CALL}<|end|><|start|>assistant{FINAL}<|end|><|start|>assistant{CALL}", tokens_per_step=tokens_per_step
    )
    message = {"model": "tiny", "messages": [USER], "max_tokens": 500}
    message |= {"tools": [{"name": tool["name"], "input_schema": tool["parameters"]}]}
    answer = {"model": "tiny", "input": "hello", "tools": [tool | {"type": "function"}]}
    async with gateway(script, model=model) as served:
        response = (await served.client.post("/v1/responses", json=answer)).json()
        blocks = (await served.client.post("/v1/messages", json=message)).json()["content"]
    assert [item["type"] for item in response["output"]] == ["function_call", "message", "function_call"]
    assert [block.get("input", block.get("text")) for block in blocks] == [{"city": "Oslo"}, "hello", {"city": "Oslo"}]


async def test_the_template_shows_thoughts_calls_results_and_effort() -> None:
    model = harmony_model()
    asked = called() | {"reasoning_content": "hm"}
    bare = {"type": "function", "function": {"name": "bare"}}
    async with gateway(saying(model, FINAL), model=model) as served:
        await served.chat(messages=[USER, asked, result()], tools=[function(), bare], reasoning_effort="minimal")
        prompt = prompt_of(model, served.backend.submitted[0])
        error = error_of(await served.chat(reasoning_effort="none"), 400)
    assert "Reasoning: low<|end|>// does get_weatherget_weather\n// bare\n<|start|>user" in prompt
    assert (
        f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{TEMPLATE_CALL}<|call|><|start|>functions" in prompt
    )
    assert error["param"] == "reasoning_effort"


@each(
    ("fields", "allowed", "forbidden"),
    [
        (
            {"tools": [function()]},
            [FINAL, THOUGHT + FINAL, THOUGHT + CALL, TEMPLATE_CALL, THOUGHT + THOUGHT + CALL,
             f"{THOUGHT}<|channel|>commentary<|message|>let me see{NEXT}{CALL}"],
            ["hello", CALL.replace("city", "town"), CALL.replace("get_weather", "other"), CALL + FINAL],
        ),
        ({"tools": [function()], "tool_choice": "required"}, [THOUGHT + CALL, CALL], [FINAL, THOUGHT + FINAL]),
        ({"response_format": SCHEMA}, [f"{THOUGHT}<|channel|>final<|message|>1"], [THOUGHT + FINAL, "1"]),
        (
            {"response_format": SCHEMA, "tools": [function()]},
            ["<|channel|>final<|message|>1", CALL],
            [FINAL, f"<|channel|>commentary<|message|>let me see{NEXT}{CALL}"],
        ),
        ({"thinking_token_budget": 12}, [THOUGHT + FINAL, FINAL], [THOUGHT + THOUGHT + FINAL, "a" * 3 + FINAL]),
        ({"thinking_token_budget": 2}, [FINAL], [THOUGHT + FINAL]),
    ],
)  # fmt: skip
async def test_answers_are_held_to_tools_and_constraints(
    fields: dict[str, Any], allowed: list[str], forbidden: list[str]
) -> None:
    model = harmony_model()
    grammar = await grammar_of(model, **fields)
    assert [text for text in (*allowed, *forbidden) if accepts(model, grammar, text)] == allowed


async def test_an_answer_that_goes_on_with_the_last_message() -> None:
    model = harmony_model()
    messages = [USER, {"role": "assistant", "content": "Once"}]
    async with gateway(saying(model, " upon"), model=model) as served:
        fields: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
        choice = (await served.chat(messages=messages, **fields)).json()["choices"][0]
        assert prompt_of(model, served.backend.submitted[0]).endswith("final<|message|>Once")
    assert choice["message"]["content"] == " upon"


async def test_a_call_cannot_go_on_with_the_last_message() -> None:
    messages = [USER, {"role": "assistant", "content": "Once"}]
    fields: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    async with gateway(model=harmony_model()) as served:
        response = await served.chat(messages=messages, tools=[function()], tool_choice="required", **fields)
        assert error_of(response, 400)["param"] == "tool_choice"
