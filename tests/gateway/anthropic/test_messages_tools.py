"""Tools, thoughts and JSON schemas of the Messages API, through Anthropic's own SDK, unchanged."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from alignedserve.api.models.model_services import ModelCard
from alignedserve.core.request import Request
from tests.gateway.anthropic.messages_support import ask, count, failure_of, message_of, sdk_client
from tests.gateway.support import EOS, gateway
from tests.gateway.tool_support import HERMES, LEVELS, OPENED, PLAIN, THINKING, model_with
from tests.gateway.tool_support import saying as scripted
from tests.harnesses.scripted_backend import Script
from tests.support.marks import each

WEATHER: Any = {
    "name": "get_weather",
    "description": "Says how the weather is.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
STRING = {"input_schema": {"type": "string"}, "strict": True}
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "hello"}]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def saying(model: ModelCard, *texts: str) -> Callable[[Request], Script]:
    """Return a script that says these texts in turn, in the model's tokens."""
    tokenizer, left = model.load_tokenizer(), list(texts)
    return lambda _: Script((*tokenizer.encode(left.pop(0), add_special_tokens=False), EOS))


def prompt_of(model: ModelCard, request: Request) -> str:
    return model.load_tokenizer().decode(request.prompt_token_ids, skip_special_tokens=False)


def contents(message: Any) -> list[Any]:
    """Return the blocks, of whichever types they are."""
    return list(message.content)


async def test_a_call_whole_and_streamed() -> None:
    model = model_with(HERMES)
    answer = "Let me see. " + CALL
    async with sdk_client(saying(model, answer, answer), model=model) as (client, served):
        whole = await client.messages.create(**ASKED, tools=[WEATHER])
        async with client.messages.stream(**ASKED, tools=[WEATHER]) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_message()
        assert served.backend.submitted[0].sampling.grammar
    for message in (whole, streamed):
        text, call = contents(message)
        assert (text.type, call.type, message.stop_reason) == ("text", "tool_use", "tool_use")
        assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    assert "".join(event.partial_json for event in events if event.type == "input_json") == '{"city": "Oslo"}'


@pytest.mark.parametrize("tokens_per_step", [1, 200])
async def test_text_that_might_begin_a_stop_sequence_stands_before_the_call(tokens_per_step: int) -> None:
    model = model_with(HERMES)
    script = scripted(model, "Let me see.\n" + CALL, tokens_per_step=tokens_per_step)
    async with gateway(script, model=model) as served:
        message = message_of(await ask(served, tools=[WEATHER], stop_sequences=["\nObservation:"]))
    text, call = message["content"]
    assert (text["text"], call["name"], call["input"]) == ("Let me see.\n", "get_weather", {"city": "Oslo"})


async def test_an_agent_runs_its_tools_until_the_answer() -> None:
    import anthropic

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """Says how the weather is.

        Args:
            city: Where.
        """
        return f"sunny in {city}"

    model = model_with(HERMES)
    async with sdk_client(saying(model, CALL, "It is sunny."), model=model) as (client, served):
        runner = client.beta.messages.tool_runner(**ASKED, tools=[get_weather])
        last = await runner.until_done()
        prompt = prompt_of(model, served.backend.submitted[1])
    assert last.content[0].text == "It is sunny."
    assert prompt.count("<tool_call>") == 1
    assert "<|tool|>sunny in Oslo" in prompt


async def test_results_reach_the_model_after_their_calls() -> None:
    model = model_with(HERMES)
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such city", "is_error": True}
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ]
    async with gateway(saying(model, "well"), model=model) as served:
        message = message_of(await ask(served, messages=turns, tools=[WEATHER]))
        prompt = prompt_of(model, served.backend.submitted[0])
        assert await count(served, messages=turns, tools=[WEATHER]) == message["usage"]["input_tokens"]
    assert '"arguments": {"city": "Oslo"}' in prompt
    assert prompt.endswith("<|tool|>Error: no such city<|end|><|user|>go on<|end|><|assistant|>")


@each(
    "sent", [{}, {"input": None}, {"input": '{"city": "Os'}, {"input": {"city": "Oslo"}}, {"input": {"a": [[]] * 40}}]
)
async def test_calls_of_any_input_are_told_with_their_results(sent: dict[str, Any]) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", **sent}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "cut off"}
    turns = [*ASKED["messages"], {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    model = model_with(HERMES)
    async with gateway(saying(model, "well"), model=model) as served:
        message_of(await ask(served, messages=turns))
        assert prompt_of(model, served.backend.submitted[0]).endswith("<|tool|>cut off<|end|><|assistant|>")


async def test_the_conversation_goes_on_behind_an_answer_that_max_tokens_cut() -> None:
    model = model_with(HERMES)
    async with gateway(scripted(model, CALL), model=model) as served:
        for max_tokens in range(1, 50, 3):
            first = message_of(await ask(served, tools=[WEATHER], max_tokens=max_tokens))
            answer = {"role": "assistant", "content": first["content"]}
            calls = [block["id"] for block in first["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call_id} for call_id in calls]
            for behind in ([], results):
                turn = {"role": "user", "content": [*behind, {"type": "text", "text": "go on"}]}
                message_of(await ask(served, messages=[*ASKED["messages"], answer, turn], tools=[WEATHER]))


@each(
    ("fields", "path"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER | {"name": "no spaces"}]}, "tools[0].name"),
        ({"tools": [WEATHER] * 500}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER | STRING]}, "tools[0].input_schema"),
        ({"tools": [WEATHER | {"defer_loading": True}, WEATHER | {"name": "b"} | STRING]}, "tools[1].input_schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
            "output_config.format.schema",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "messages[0]",
        ),
    ],
)
async def test_bad_tools_are_named_as_they_were_sent(fields: dict[str, Any], path: str) -> None:
    model = model_with(HERMES)
    async with gateway(saying(model, "well"), model=model) as served:
        error = failure_of(await ask(served, **fields), 400)
    assert error["type"] == "invalid_request_error"
    assert path in error["message"], error["message"]


async def test_a_thought_is_a_block_of_its_own() -> None:
    model = model_with(OPENED)
    answer = "so what</think>\n\nhello"
    async with sdk_client(saying(model, *[answer] * 3), model=model) as (client, _):
        whole = await client.messages.create(**ASKED)
        async with client.messages.stream(**ASKED) as stream:
            streamed = await stream.get_final_message()
        hidden = await client.messages.create(**ASKED, thinking={"type": "adaptive", "display": "omitted"})
    for message in (whole, streamed):
        thought, text = contents(message)
        assert (thought.type, thought.thinking, text.text) == ("thinking", "so what", "hello")
        assert message.usage.output_tokens_details is not None
        assert message.usage.output_tokens_details.thinking_tokens > 0
    (before, _), (after, _) = contents(whole), contents(hidden)
    assert (after.thinking, after.signature) == ("", before.signature)


async def test_thinking_is_switched_and_bounded() -> None:
    model = model_with(THINKING)
    async with gateway(saying(model, "a", "<think>b</think>c"), model=model) as served:
        message_of(await ask(served, thinking={"type": "disabled"}))
        enabled = {"type": "enabled", "budget_tokens": 2000}
        message = message_of(await ask(served, thinking=enabled))
        without, with_thought = served.backend.submitted
    assert prompt_of(model, without).rstrip().endswith("</think>")
    assert "max_tokens=2000" in with_thought.sampling.grammar
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]


async def test_a_model_that_does_not_think_says_so() -> None:
    fields: dict[str, Any] = {"max_tokens": 32000, "thinking": {"type": "enabled", "budget_tokens": 31999}}
    async with gateway() as served:
        answer = await ask(served, **fields)
        assert [block["type"] for block in message_of(answer)["content"]] == ["text"]
        assert served.backend.submitted[0].sampling.grammar == ""
        assert await count(served, thinking=fields["thinking"]) > 0
        message_of(await ask(served, thinking={"type": "adaptive"}))
    assert answer.headers["x-alignedserve-ignored-fields"] == "thinking"
    async with gateway(strict=True) as served:
        assert failure_of(await ask(served, **fields), 400)["message"] == "thinking: This model does not think."


async def test_effort_goes_to_templates_that_know_it() -> None:
    model = model_with(LEVELS)
    async with gateway(saying(model, "a", "a"), model=model) as served:
        message_of(await ask(served, output_config={"effort": "low"}))
        message_of(await ask(served, output_config={"effort": "max"}))
        low, most = served.backend.submitted
    assert prompt_of(model, low).endswith("low")
    assert prompt_of(model, most).endswith("max")


class Reading(BaseModel):
    city: str
    degrees: int


async def test_an_answer_under_a_schema() -> None:
    model = model_with(HERMES)
    answer = json.dumps({"city": "Oslo", "degrees": 7})
    async with sdk_client(saying(model, answer), model=model) as (client, served):
        parsed = await client.messages.parse(**ASKED, output_format=Reading)
        assert "degrees" in served.backend.submitted[0].sampling.grammar
    assert parsed.parsed_output == Reading(city="Oslo", degrees=7)


async def test_a_model_without_tools_is_told_of_them() -> None:
    model = model_with(PLAIN)
    async with sdk_client(saying(model, "hello"), model=model) as (client, served):
        await client.messages.create(**ASKED, tools=[WEATHER])
        assert "<tools>" in prompt_of(model, served.backend.submitted[0])


async def test_a_model_that_always_thinks_says_that_it_does() -> None:
    model = model_with(OPENED)
    async with gateway(scripted(model, "so</think>hello"), model=model) as served:
        answers = [await ask(served, thinking={"type": "disabled"}), await served.chat(reasoning_effort="none")]
    assert [answer.status_code for answer in answers] == [200, 200]
    names = [answer.headers["x-alignedserve-ignored-fields"] for answer in answers]
    assert names == ["thinking", "reasoning_effort"]


async def test_an_effort_without_a_switch_is_ignored_and_named() -> None:
    async with gateway() as served:
        response = await ask(served, output_config={"effort": "low"})
    assert response.status_code == 200
    assert response.headers["x-alignedserve-ignored-fields"] == "output_config.effort"
