"""OpenAI's SDK, of any version: a call of a tool, whole and streamed. Prints one JSON object."""

import json
import os

import openai

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]}

chat = openai.OpenAI().chat.completions
tool = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
body = {
    "model": os.environ["MODEL"],
    "temperature": 0,
    "max_tokens": 100,
    "tools": [tool],
    "tool_choice": "required",
    "messages": [{"role": "user", "content": "Add 17 and 25."}],
}
whole = chat.create(**body)
with chat.stream(**body) as stream:
    ended = [event.arguments for event in stream if event.type == "tool_calls.function.arguments.done"]
    streamed = stream.get_final_completion()
calls = [[call.function.arguments for call in chat.choices[0].message.tool_calls] for chat in (whole, streamed)]
print(json.dumps({"version": openai.__version__, "whole": calls[0], "streamed": calls[1], "ended": ended}))
