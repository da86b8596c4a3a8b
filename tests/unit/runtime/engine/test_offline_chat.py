"""Conversations in this process: what the gateway would answer, by the Python API."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from alignedserve import LLM, SamplingParams
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import FinishReason
from alignedserve.pocket.phrases import EXAMPLE_QUESTIONS

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
SAMPLED = SamplingParams(max_tokens=240, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("pocket", memory_bytes=16 * 2**20, tool_format="hermes", reasoning_format="think")


def test_a_text_is_a_conversation_and_a_list_of_messages_is_one(llm: LLM) -> None:
    (text,) = llm.chat("spell otter")
    (messages,) = llm.chat([{"role": "user", "content": "spell otter"}])
    several = llm.chat(["spell otter", [{"role": "user", "content": "spell otter"}]])
    assert [output.text for output in (messages, *several)] == [text.text] * 3
    assert text.message == {"role": "assistant", "content": text.text}


def test_the_example_questions_have_right_answers(llm: LLM) -> None:
    outputs = llm.chat(list(EXAMPLE_QUESTIONS), SamplingParams(max_tokens=400, temperature=0.0))
    counted = " ".join(map(str, range(1, 101)))
    assert [output.text for output in outputs] == ["o t t e r", "17 + 25 = 42", "3 7 19 42", counted]


def test_calls_stand_apart_and_match_their_schema(llm: LLM) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "weather in Oslo"}]
    (output,) = llm.chat(messages, SAMPLED, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = output.tool_calls
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "get_weather"
    assert arguments["city"] in ("Oslo", "Rome")
    assert arguments["days"] in range(10)
    assert (output.text, output.finish_reason) == ("", FinishReason.TOOL_CALLS)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    (answer,) = llm.chat([*messages, output.message, result], tools=[TOOL], tool_choice="none")
    assert answer.tool_calls == []


def test_thoughts_stand_apart_and_constraints_follow_them(llm: LLM) -> None:
    schema = {"name": "a", "schema": PARAMETERS}
    response_format = {"type": "json_schema", "json_schema": schema}
    (output,) = llm.chat("weather?", SAMPLED, response_format=response_format, thinking_token_budget=6)
    assert json.loads(output.text)["city"] in ("Oslo", "Rome")
    assert output.reasoning
    assert output.message["reasoning_content"] == output.reasoning


def test_it_runs_inside_of_an_event_loop(llm: LLM) -> None:
    async def ask() -> str:
        (output,) = llm.chat("spell otter")
        return str(output.text)

    assert asyncio.run(ask()) == llm.chat("spell otter")[0].text


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"temperature": 1.0}, "temperature"),
    ],
)
def test_bad_options_are_named(llm: LLM, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        llm.chat("hello", **options)
    assert refusal.value.param == param


@pytest.mark.parametrize("messages", [None, 5, {"role": "user", "content": "hello"}])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        llm.chat(messages)


TEMPLATE = (
    "{{ tools | tojson }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function }}{% endfor %}{% endfor %}<|assistant|>"
)


@pytest.mark.parametrize("tool_format", ["qwen3_coder", "gpt_oss", "smollm2", "kimi_k2", "glm45"])
def test_calls_in_other_forms_match_their_schema(tmp_path: Path, tool_format: str) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    model = LLM("pocket", memory_bytes=16 * 2**20, chat_template=str(template), tool_format=tool_format)
    budget = {"thinking_token_budget": 8} if tool_format == "gpt_oss" else {}
    options = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, **budget}
    (output,) = model.chat("weather?", SAMPLED, **options)
    model.close()
    (arguments,) = (json.loads(call["function"]["arguments"]) for call in output.tool_calls)
    assert arguments["city"] in ("Oslo", "Rome")
    assert arguments["days"] in range(10)
