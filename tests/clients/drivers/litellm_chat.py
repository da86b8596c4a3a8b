"""LiteLLM as a library: chat, streamed chat, a completion, an error. Prints one JSON object."""

import json
import os

import litellm

model = f"openai/{os.environ['MODEL']}"
messages = [{"role": "user", "content": "Spell cat."}]
common = {"model": model, "temperature": 0, "max_tokens": 24}
whole = litellm.completion(messages=messages, metadata={"trace": "a"}, user="someone", **common)
chunks = list(litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **common))
text = litellm.text_completion(prompt="One, two,", model=f"text-completion-openai/{os.environ['MODEL']}", max_tokens=4)
try:
    litellm.completion(messages=messages, **common | {"temperature": 9}, num_retries=0)
    refused = "accepted"
except litellm.BadRequestError as error:
    refused = type(error).__name__
told = {
    "whole": whole.choices[0].message.content,
    "usage": whole.usage.total_tokens,
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    "text_tokens": text.usage.completion_tokens,
    "refused": refused,
}
print(json.dumps(told))
