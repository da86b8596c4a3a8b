"""An object by a tool call."""

from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Animal(BaseModel):
    name: Literal["cat", "dog"]
    legs: Literal[2, 4]


# --- shown
client = instructor.from_openai(OpenAI(), mode=instructor.Mode.TOOLS)
messages = [{"role": "user", "content": "A cat."}]
print(repr(client.create(model="pocket", response_model=Animal, messages=messages, max_retries=0, temperature=0)))
