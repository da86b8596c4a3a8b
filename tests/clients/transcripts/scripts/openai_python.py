"""Chat held to a schema, a tool call, the events of a response, and a conversation."""

from typing import Literal

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel


class Animal(BaseModel):
    name: Literal["cat", "dog"]
    legs: Literal[2, 4]


class Spell(BaseModel):
    word: Literal["cat", "dog"]


# --- shown
client = OpenAI()
asked = {"model": "pocket", "temperature": 0, "messages": [{"role": "user", "content": "Spell cat."}]}
chat = client.chat.completions
print("object:", repr(chat.parse(**asked, response_format=Animal).choices[0].message.parsed))
spell = pydantic_function_tool(Spell, name="spell")
choice = chat.create(**asked, tools=[spell], tool_choice="required").choices[0]
called = choice.message.tool_calls[0].function
print("call:", called.name, called.arguments, choice.finish_reason)
response = {"model": "pocket", "temperature": 0, "input": "Spell cat."}
for event in client.responses.create(**response, stream=True):
    print(event.sequence_number, event.type, repr(getattr(event, "delta", "")))

conversation = client.conversations.create().id
first = client.responses.create(**response, conversation=conversation)
second = client.responses.create(**response | {"input": "Spell dog."}, conversation=conversation)
print("conversation:", [first.output_text, second.output_text], second.usage.input_tokens, "tokens read")
items = client.conversations.items.list(conversation, order="asc")
print("its items:", [(item.role, item.content[0].text) for item in items])
