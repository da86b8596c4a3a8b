"""Lines of batches with tools and thoughts: each answer as the same request gets it from the route."""

import json
from pathlib import Path
from typing import Any

from tests.gateway.batches.batch_support import batch_gateway
from tests.gateway.tool_support import CALL, THINKING, accepts, function, model_with, saying
from tests.support.batch_samples import chat_line

THOUGHT = "<think>\nso it is\n</think>\n\n"
LINES: dict[str, dict[str, Any]] = {
    "tools": {"tools": [function()]},
    "forced": {"tools": [function()], "tool_choice": "required"},
    "functions": {"functions": [function()["function"]]},
    "plain": {},
    "bad": {"tools": [function(), function()]},
    "nothing to force": {"tool_choice": "required"},
}


async def test_lines_with_tools(tmp_path: Path) -> None:
    model = model_with(THINKING)
    content = b"\n".join(chat_line(name, **fields) for name, fields in LINES.items())
    async with batch_gateway(tmp_path, saying(model, THOUGHT + CALL), model=model) as served:
        done = await served.wait_for((await served.submit(content))["id"])
        assert done["request_counts"] == {"total": 6, "completed": 4, "failed": 2}
        found = [json.loads(line) for line in await served.results(done["output_file_id"])]
        errors = [json.loads(line) for line in await served.results(done["error_file_id"])]
        grammars = {request.sampling.grammar for request in served.backend.submitted}
    answers: dict[str, Any] = {line["custom_id"]: line["response"]["body"]["choices"][0] for line in found}
    assert {name: answer["finish_reason"] for name, answer in answers.items()} == {
        "tools": "tool_calls",
        "forced": "tool_calls",
        "functions": "function_call",
        "plain": "stop",
    }
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    for name in ("tools", "forced"):
        assert [one["function"] for one in answers[name]["message"]["tool_calls"]] == [call]
    assert answers["functions"]["message"]["function_call"] == call
    assert answers["plain"]["message"]["content"] == CALL
    assert all(answer["message"]["reasoning_content"] == "so it is\n" for answer in answers.values())
    forced = [grammar for grammar in grammars if grammar and not accepts(model, grammar, "hi")]
    assert [accepts(model, grammar, THOUGHT + CALL) for grammar in forced] == [True]
    params = {line["custom_id"]: line["response"]["body"]["error"]["param"] for line in errors}
    assert params == {"bad": "tools[1].function.name", "nothing to force": "tool_choice"}


async def test_a_line_goes_on_after_a_tools_result(tmp_path: Path) -> None:
    model = model_with(THINKING)
    called = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    async with batch_gateway(tmp_path, saying(model, "It is sunny."), model=model) as served:
        content = chat_line("line", messages=messages, tools=[function()])
        done = await served.wait_for((await served.submit(content))["id"])
        (line,) = [json.loads(line) for line in await served.results(done["output_file_id"])]
        (request,) = served.backend.submitted
    prompt = model.load_tokenizer().decode(request.prompt_token_ids)
    assert "sunny" in prompt
    assert line["response"]["body"]["choices"][0]["message"]["content"] == "It is sunny."
