"""Thoughts on chat completions: apart from the answer, turned off, bounded, and outside of its constraints."""

import re
from typing import Any

import pytest

from alignedserve.api.endpoints import CHAT
from alignedserve.api.openai.parsing import parse_chat
from alignedserve.api.reasoning import FORMATS, thought_start
from tests.gateway.support import chunks_of, error_of, gateway
from tests.gateway.tool_support import (
    CALL,
    HERMES,
    LEVELS,
    OPENED,
    THINKING,
    USER,
    accepts,
    choice_of,
    function,
    grammar_of,
    model_with,
    prompt_of,
    saying,
)
from tests.support.marks import each


async def test_a_thought_stands_apart() -> None:
    model = model_with(THINKING)
    async with gateway(saying(model, "<think>\nso it is\n</think>\n\nhello"), model=model) as served:
        whole = (await served.chat()).json()
        chunks = chunks_of(await served.chat(stream=True))
    message = whole["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "hello", "refusal": None, "reasoning_content": "so it is\n"}
    assert 0 < whole["usage"]["completion_tokens_details"]["reasoning_tokens"] < whole["usage"]["completion_tokens"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "so it is\n"
    assert "".join(delta.get("content", "") for delta in deltas) == "hello"


async def test_a_marker_that_never_ends_is_the_answer() -> None:
    model = model_with(THINKING)
    async with gateway(saying(model, "<thi"), model=model) as served:
        assert (await served.chat()).json()["choices"][0]["message"]["content"] == "<thi"


@each(
    ("text", "content", "thought"),
    [
        ("still so</think>hello", "still so</think>hello", None),
        ("so<think>it</think> is", "so<think>it</think> is", None),
        ("<think>so<think>it</think>is</think> so", "is</think> so", "so<think>it"),
        ("<tool_call>a</tool_call>b", "<tool_call>a</tool_call>b", None),
    ],
)
@each("fields", [{}, {"logprobs": True}, {"skip_special_tokens": False}, {"stop": "nowhere"}])
async def test_marks_out_of_place_are_hidden_or_shown_by_their_names(
    text: str, content: str, thought: str | None, fields: dict[str, Any]
) -> None:
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    message = (await choice_of(model_with(THINKING, *marks), text, **fields))["message"]
    if fields.get("skip_special_tokens", True):
        content, thought = _without(content, marks), thought and _without(thought, marks)
    assert (message["content"], message.get("reasoning_content")) == (content, thought)


def _without(text: str, marks: tuple[str, ...]) -> str:
    return "".join(re.split("|".join(map(re.escape, marks)), text))


async def test_the_log_probabilities_beside_a_hidden_mark_keep_their_places() -> None:
    model = model_with(HERMES, "<tool_call>", "</tool_call>")
    async with gateway(saying(model, "the</tool_call> dog"), model=model) as served:
        fields: dict[str, Any] = {"tools": [function()], "logprobs": True}
        whole = (await served.chat(**fields)).json()["choices"][0]
        named = (await served.chat(**fields, skip_special_tokens=False)).json()["choices"][0]
    assert whole["message"]["content"] == "the dog"
    assert [entry["token"] for entry in whole["logprobs"]["content"]] == ["the", " dog"]
    assert named["message"]["content"] == "the</tool_call> dog"
    assert [entry["token"] for entry in named["logprobs"]["content"]] == ["the", "</tool_call>", " dog"]


@each(
    ("text", "fields"),
    [
        ("<think>so</think> the dog", {}),
        ("<think>so</think>\n\n the dog", {"stop": "nowhere"}),
        (" the dog", {"reasoning_effort": "none"}),
    ],
)
@each("is_streamed", [False, True])
async def test_a_token_whose_space_is_hidden_keeps_its_log_probability(
    text: str, fields: dict[str, Any], is_streamed: bool
) -> None:
    model = model_with(THINKING)
    async with gateway(saying(model, text), model=model) as served:
        response = await served.chat(logprobs=True, stream=is_streamed, **fields)
    choices = [chunk["choices"][0] for chunk in chunks_of(response)] if is_streamed else response.json()["choices"]
    parts = [choice["delta" if is_streamed else "message"] for choice in choices]
    assert "".join(part.get("content", "") for part in parts) == "the dog"
    shown = [entry["token"] for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert shown == [" the", " dog"]


async def test_a_control_token_in_arguments_is_hidden_or_shown_by_its_name() -> None:
    model = model_with(HERMES, "<tool_call>", "</tool_call>")
    call = CALL.replace("Oslo", "<tool_call>Oslo")
    async with gateway(saying(model, call), model=model) as served:
        hidden = (await served.chat(tools=[function()])).json()["choices"][0]["message"]
        named = (await served.chat(tools=[function()], skip_special_tokens=False)).json()["choices"][0]["message"]
    assert hidden["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert named["tool_calls"][0]["function"]["arguments"] == '{"city": "<tool_call>Oslo"}'


async def test_a_prompt_that_opens_the_thought_itself() -> None:
    messages = [USER, {"role": "assistant", "content": "hi", "reasoning_content": "old"}, USER]
    message = (await choice_of(model_with(OPENED), "so</think>hello", messages=messages))["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", "hello")


@each(
    ("continued", "answer", "thought", "content"),
    [
        ("<think>\nLet me see: 2 + 2", " is 4.</think>\n\nIt is 4.", " is 4.", "It is 4."),
        ("<think>\n", "so</think>hello", "so", "hello"),
        ("<think>so</think>It is", " 4.", None, " 4."),
        ("It is", " 4.", None, " 4."),
    ],
)
@each("control_tokens", [(), ("<think>", "</think>")])
async def test_an_answer_goes_on_within_its_thought_or_after_it(
    continued: str, answer: str, thought: str | None, content: str, control_tokens: tuple[str, ...]
) -> None:
    model = model_with(THINKING, *control_tokens)
    messages = [USER, {"role": "assistant", "content": continued}]
    async with gateway(saying(model, answer), model=model) as served:
        response = await served.chat(messages=messages, continue_final_message=True)
    message = response.json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thought, content)


@each("continued", ["<think>\nLet me see", "<think>so</think>It is", "<think>a</think><think>b", "It is", ""])
def test_a_long_body_keeps_whether_its_answer_goes_on_within_a_thought(continued: str) -> None:
    body: dict[str, Any] = {"model": "tiny", "continue_final_message": True}
    chat = parse_chat(body | {"messages": [USER, {"role": "assistant", "content": continued}]})
    short = parse_chat(body | CHAT.short(chat)) if CHAT.short is not None else chat
    starts = [thought_start("", FORMATS["think"], one.messages[-1].text) for one in (chat, short)]
    assert starts[0] is starts[1]


async def test_the_rest_of_a_thought_is_bounded_and_a_constraint_follows_it() -> None:
    model = model_with(THINKING)
    messages = [USER, {"role": "assistant", "content": "<think>so"}]
    async with gateway(saying(model, "hi"), model=model) as served:
        fields: dict[str, Any] = {"response_format": SCHEMA, "thinking_token_budget": 20}
        response = await served.chat(messages=messages, continue_final_message=True, **fields)
        assert response.status_code == 200, response.text
        grammar = served.backend.submitted[0].sampling.grammar
    assert accepts(model, grammar, ' it is</think>\n\n{"a": 1}')
    assert not accepts(model, grammar, " ".join(map(str, range(20))) + '</think>{"a": 1}')
    assert not accepts(model, grammar, '{"a": 1}')


async def test_a_message_may_be_a_thought_alone() -> None:
    model, cut = model_with(THINKING), {"role": "assistant", "content": None, "reasoning": "so it"}
    async with gateway(saying(model, "hello"), model=model) as served:
        assert (await served.chat(messages=[USER, cut, USER])).status_code == 200
        [request] = served.backend.submitted
    assert prompt_of(model, request).count("<|assistant|><|end|>") == 1  # an empty text: templates know no null


async def test_variables_that_the_template_does_not_read_are_named() -> None:
    model, variables = model_with(THINKING), {"enable_thinking": False, "enable_thinkng": False}
    async with gateway(saying(model, "hello"), model=model) as served:
        response = await served.chat(chat_template_kwargs=variables)
    assert response.headers["x-alignedserve-ignored-fields"] == "chat_template_kwargs.enable_thinkng"
    async with gateway(saying(model, "hello"), model=model, strict=True) as served:
        error = error_of(await served.chat(chat_template_kwargs=variables), 400)
    assert error["param"] == "chat_template_kwargs.enable_thinkng"


@each("fields", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
async def test_thinking_is_turned_off(fields: dict[str, Any]) -> None:
    model = model_with(THINKING)
    async with gateway(saying(model, "hello"), model=model) as served:
        message = (await served.chat(**fields)).json()["choices"][0]["message"]
        assert prompt_of(model, served.backend.submitted[0]).endswith("<think>\n\n</think>\n\n")
    assert message == {"role": "assistant", "content": "hello", "refusal": None}


async def test_templates_that_know_levels_of_effort() -> None:
    model = model_with(LEVELS)
    async with gateway(saying(model, "hello"), model=model) as served:
        await served.chat(reasoning_effort="low")
        await served.chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "much"})
        assert [prompt_of(model, request)[-4:].strip(">") for request in served.backend.submitted] == ["low", "much"]


SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}},
}


@pytest.mark.parametrize("control_tokens", [(), ("<think>", "</think>")])
@pytest.mark.parametrize(
    ("template", "fields", "allowed", "forbidden"),
    [
        (
            THINKING,
            {"response_format": SCHEMA},
            ['<think>so {</think>\n\n{"a": 1}', '{"a": 1}'],
            ["<think>a</think>b", '\n{"a": 1}', '\n\n{"a": 1}'],
        ),
        (
            OPENED,
            {"response_format": SCHEMA},
            ['so {</think>{"a": 1}', 'so</think>\n\n{"a": 1}'],
            ['{"a": 1}', "so</think>\n\n1"],
        ),
        (THINKING, {"tools": [function()]}, ["<think>a</think>\n\nhi", f"<think>a</think>\n\n{CALL}", CALL], []),
        (
            THINKING,
            {"tools": [function()], "tool_choice": "required"},
            [f"<think>a</think>\n\n{CALL}", CALL],
            ["<think>a</think>\n\nhi", "hi", f"\n{CALL}"],
        ),
        (OPENED, {"thinking_token_budget": 12}, ["a</think>hi", "</think>hi"], ["0123456789abcdefg</think>hi"]),
        (OPENED, {"thinking_token_budget": 0}, ["</think>hi"], ["a</think>hi"]),
        (THINKING, {"thinking_token_budget": 3}, ["<think>123</think>hi"], ["<think>12345</think>hi", "hi"]),
    ],
)
async def test_constraints_begin_after_the_thought(
    template: str, control_tokens: tuple[str, ...], fields: dict[str, Any], allowed: list[str], forbidden: list[str]
) -> None:
    model = model_with(template, *control_tokens)
    grammar = await grammar_of(model, **fields)
    assert [text for text in (*allowed, *forbidden) if accepts(model, grammar, text)] == allowed


@each(
    ("fields", "cut", "content"),
    [
        ({"tools": [function()], "tool_choice": "required"}, "<think>so</think>\n\n<tool", ""),
        ({"tools": [function()], "tool_choice": "required"}, "<", ""),
        ({"tools": [function()]}, "<tool", "<tool"),
        ({"thinking_token_budget": 9}, "<thi", ""),
        ({"thinking_token_budget": 9, "tools": [function()]}, "<thi", ""),
        ({"thinking_token_budget": 9, "tools": [function()]}, "<think>so</think>the <tool", "the <tool"),
    ],
)
async def test_the_beginning_of_a_mark_is_content_only_where_content_may_stand(
    fields: dict[str, Any], cut: str, content: str
) -> None:
    model = model_with(THINKING)
    num_tokens = len(model.load_tokenizer().encode(cut, add_special_tokens=False))
    choice = await choice_of(model, cut, max_tokens=num_tokens, **fields)
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, "length")


async def test_a_plain_chat_has_no_grammar() -> None:
    model = model_with(THINKING)
    async with gateway(saying(model, "hi"), model=model) as served:
        await served.chat()
        assert served.backend.submitted[0].sampling.grammar == ""
