"""A message that uses a tool, the tool's result, and a stream."""

from anthropic import Anthropic

# --- shown
client = Anthropic()
cold = {"temperature": 0}  # this version of the SDK has no argument for it
schema = {"type": "object", "properties": {"word": {"enum": ["cat", "dog"]}}, "required": ["word"]}
asked = {"model": "pocket", "max_tokens": 200, "tools": [{"name": "spell", "input_schema": schema}]}
messages = [{"role": "user", "content": "Spell cat."}]
using = client.messages.create(**asked, messages=messages, tool_choice={"type": "any"}, extra_body=cold)
use = using.content[-1]
print(using.stop_reason, use.type, use.name, use.input)

result = {"type": "tool_result", "tool_use_id": use.id, "content": " ".join(use.input["word"])}
messages += [{"role": "assistant", "content": using.content}, {"role": "user", "content": [result]}]
told = client.messages.create(**asked, messages=messages, tool_choice={"type": "none"}, extra_body=cold)
print(told.stop_reason, [block.text for block in told.content])

plain = {"model": "pocket", "max_tokens": 24, "messages": [{"role": "user", "content": "Spell dog."}]}
with client.messages.stream(**plain, extra_body=cold) as stream:
    print(list(stream.text_stream), stream.get_final_message().usage.output_tokens, "tokens")
